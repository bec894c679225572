"""Which saves of a directory stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from residency._errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule by which saves stay; the newest one always does.

    Attributes:
        newest: How many of the newest stay. None keeps all; with ``best``, None keeps one.
        best: How many more stay because their metric is best.
        metric: The metric's name. A save that lacks it, or has NaN, never counts as one of the
            best.
        greatest: Whether a greater metric is a better one.
    """

    newest: int | None = None
    best: int = 0
    metric: str | None = None
    greatest: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError for counts that are none, or too small."""
        for name, count in (("newest", self.newest), ("best", self.best)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
                raise InvalidArgumentError(f"{name} is {count!r}; expected a whole number.")
        if self.metric is not None and not isinstance(self.metric, str):
            raise InvalidArgumentError(f"metric is {self.metric!r}; give its name.")
        if self.newest is not None and self.newest < 1:
            raise InvalidArgumentError(
                f"newest is {self.newest}; the newest save always stays, so expected at least 1."
            )
        if self.best < 0:
            raise InvalidArgumentError(f"best is {self.best}; give 0 or more.")
        if (self.best > 0) != (self.metric is not None):
            raise InvalidArgumentError(
                f"best is {self.best} and metric is {self.metric!r}; give both, or neither."
            )


def steps_above(steps: Sequence[int], step: int) -> list[int]:
    """Returns those of some steps that are above one, to go on from there.

    Raises:
        InvalidArgumentError: All are above it, so that none would stay.
    """
    if steps and min(steps) > step:
        raise InvalidArgumentError(
            f"there is no save of step {step} or below, so that none would stay. The lowest step "
            f"is {min(steps)}."
        )
    return [each for each in steps if each > step]
