"""The request of one rank for a save, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from residency._checkpoint._disk._manifest import check_file_name
from residency._checkpoint._disk._marks import DATA_SUFFIX
from residency._checkpoint._disk._open_save import StoredSave
from residency._checkpoint._disk._parts import FilePlan
from residency._checkpoint._disk._published import check_token
from residency._errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The files that one rank is to write.

    Attributes:
        step: The training step.
        files: The rank's files; no two ranks have a name in common.
        document: The rest of the rank's state, as JSON.
        metrics: Figures of the step; those of rank 0 are kept.
        rank: This rank, from 0.
        world_size: The number of ranks.
        token: Is the same on all ranks of this run, and in no other run.
        number: Its place in the order of this rank's calls; 0 where calls are not counted.
        is_repeated: Says whether this rank was asked for a save of the step again since.
        check_whole: Raises unless what all ranks wrote can be restored; rank 0 asks it.
    """

    step: int
    files: Sequence[FilePlan]
    document: dict[str, Any]
    metrics: Mapping[str, float]
    rank: int
    world_size: int
    token: str
    number: int = 0
    is_repeated: Callable[[], bool] = bool
    check_whole: Callable[[StoredSave], object] = id

    def check(self) -> None:
        """Checks that the request can become a save.

        Raises:
            InvalidArgumentError: The step, the rank, the token or a file name is invalid.
        """
        check_token(self.token)
        if self.step < 0:
            raise InvalidArgumentError(f"step is {self.step}; a step cannot be negative.")
        if not 0 <= self.rank < self.world_size:
            raise InvalidArgumentError(f"rank {self.rank} is not one of {self.world_size}.")
        names: set[str] = set()
        for plan in self.files:
            check_file_name(plan.name)
            if not plan.name.endswith(DATA_SUFFIX):  # no name of a report, a mark or the manifest
                raise InvalidArgumentError(f"{plan.name!r} does not end in {DATA_SUFFIX!r}.")
            if plan.name in names:
                raise InvalidArgumentError(f"two files of a save are named {plan.name!r}.")
            names.add(plan.name)
