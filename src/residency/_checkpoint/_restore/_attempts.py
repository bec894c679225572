"""Tries the saves of a directory, the newest first, until one is restored, on all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from residency._checkpoint._disk._manifest import MANIFEST
from residency._checkpoint._disk._naming import damage_named
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._disk._published import step_name
from residency._checkpoint._job import Ranks
from residency._checkpoint._progress import progress_bar
from residency._checkpoint._restore._plan import RestorePlan
from residency._checkpoint._restore._restore import carry_out, plan_state
from residency._errors import CorruptSaveError, RefusedError, warn

_MOST_ATTEMPTS = 100  # beside a writer that removes or replaces each save that is tried
_Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Attempts:
    """One call of ``Checkpointer.restore``, with what it was asked for.

    Attributes:
        directory: Where the saves are.
        ranks: Which rank this process is, and of how many.
        state: What to fill.
        strict: Whether differences are refused.
        rng: Whether the random number generators go back, too.
        eager: Whether a plain optimizer's state goes onto the device at once.
        progress: Whether to draw a progress bar.
    """

    directory: CheckpointDirectory
    ranks: Ranks
    state: Mapping[str, Any]
    strict: bool
    rng: bool
    eager: bool
    progress: bool

    def restore(self, step: int | None) -> int:
        """Restores a step, or the newest whole one; returns which; see ``Checkpointer.restore``."""
        self.ranks.meet("restore")
        first = self.ranks.of_first(lambda: step)
        self.ranks.together(partial(self._check_is_of_all, step, first), "restore")
        touched: list[int] = []  # the steps of which some tensors may have bytes by now
        tried: set[tuple[int, _Identity]] = set()
        published = self._published(step)
        while True:
            candidate = next(each for each in published.items() if each not in tried)
            tried.add(candidate)
            try:
                self._try(candidate[0], touched)
            except Exception as error:
                if step is not None:
                    raise
                # Every rank is here, as none goes on where another fails: what they decide next
                # follows from what the first one sees.
                published = self.ranks.of_first(self._seen)
                is_gone = published.get(candidate[0]) != candidate[1]
                has_more = any(each not in tried for each in published.items())
                is_tried_on = is_gone and len(tried) < _MOST_ATTEMPTS
                if not has_more or not (is_tried_on or isinstance(error, CorruptSaveError)):
                    _add_what_was_changed(error, candidate[0], touched)
                    _add_how_many(error, len(tried), self.directory)
                    raise
                if not is_gone:  # else another save has taken its place meanwhile
                    warn(f"{error} An older save is tried.")
            else:
                return candidate[0]

    def _check_is_of_all(self, step: int | None, first: int | None) -> None:
        """Raises RefusedError where ranks ask for different saves, which have other shards."""
        if step != first:
            raise RefusedError(
                f"rank {self.ranks.rank} restores step {step}, and rank 0 step {first}; expected "
                "one step on all ranks. Nothing was changed."
            )

    def _published(self, step: int | None) -> dict[int, _Identity]:
        """Returns the saves to try, the newest first."""
        published = self.ranks.of_first(self._seen)
        if not published:
            raise RefusedError(
                f"{str(self.directory.path)!r} has no published save; steps() is empty. Nothing "
                "was changed; give the directory that the run saved to."
            )
        if step is not None and step not in published:
            raise RefusedError(
                f"{str(self.directory.path)!r} has no save of step {step}; it has "
                f"{sorted(published)}. Nothing was changed; name one that it has."
            )
        return published if step is None else {step: published[step]}

    def _seen(self) -> dict[int, _Identity]:
        """Returns which saves there are, the newest first, and what tells each from a later one of
        its step: a writer may replace and remove them at any time.
        """
        found: dict[int, _Identity] = {}
        for step in reversed(self.directory.steps()):
            found[step] = 0, 0
            with suppress(OSError):  # moved or removed since
                about = (self.directory.path / step_name(step)).stat()
                found[step] = about.st_ino, about.st_ctime_ns
        return found

    def _try(self, step: int, touched: list[int]) -> None:
        made: list[RestorePlan] = []
        folder = self.directory.path / step_name(step)

        @damage_named(folder, file=MANIFEST)
        def fill() -> None:
            touched.append(step)
            carry_out(made[0], advance)

        @damage_named(folder, file=MANIFEST)
        def plan() -> int:
            save = self.directory.open(step)
            planned = plan_state(
                self.state,
                save,
                rank=self.ranks.rank,
                world_size=self.ranks.world_size,
                strict=self.strict,
                rng=self.rng,
                eager=self.eager,
            )
            made.append(planned)
            return sum(record.num_bytes for record in save.files.values())

        what = f"restore step {step}"
        try:
            total = self.ranks.together(plan, what)
            with progress_bar(f"restoring step {step}", total, is_shown=self.progress) as advance:
                self.ranks.together(fill, what)
        finally:
            for planned in made:  # where another rank failed, it holds tensors still
                planned.clear()


def _add_what_was_changed(error: Exception, step: int, touched: Sequence[int]) -> None:
    """Makes an error say what all attempts changed, not the last one alone."""
    others = [each for each in touched if each != step]
    if not others:
        return
    said = (
        f"Tensors may hold bytes of the damaged save of step {', '.join(map(str, others))}, which "
        "was tried first: restore another one before they are used."
    )
    message = str(error).replace("othing was changed", "othing was changed by this attempt")
    error.args = (f"{said} Then: {message}", *error.args[1:])


def _add_how_many(error: Exception, count: int, directory: CheckpointDirectory) -> None:
    """Makes the last error of a restore say that no save is left, and what names all damage."""
    if not isinstance(error, CorruptSaveError):
        return
    path = str(directory.path)
    said = f"None of the {count} saves in {path!r} can be restored"
    each = "the damage of each"
    if count == 1:
        said, each = f"It is the only save in {path!r}", "all of its damage"
    error.args = (
        f"{error} {said}: `residency checkpoint verify {path}` names {each}.",
        *error.args[1:],
    )
