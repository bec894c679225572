"""Host memory for the saves in flight, and which save may have it.

Invariant, which ``tests/checkpoint/test_checkpointer.py`` tries to break: a memory has one job; it
is free when that job's save is over, whichever thread ended it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter

from residency._checkpoint._job import Job
from residency._transfer import SlabArena


def _new_arena() -> SlabArena:
    return SlabArena(reuse=True)


@dataclass(slots=True, eq=False)
class SaveMemory:
    """The host memory of one save in flight.

    Attributes:
        arena: The memory.
        job: The save that had it last.
    """

    arena: SlabArena = field(default_factory=_new_arena)
    job: Job | None = None

    @property
    def is_free(self) -> bool:
        """Whether no save has it."""
        return self.job is None or self.job.save.is_done()

    def emptied(self) -> SlabArena:
        """Returns the memory with nothing in it, for the next save."""
        is_lost = self.job is not None and self.job.is_lost
        return _new_arena() if is_lost else self.arena.emptied()


def memory_for_next(memories: list[SaveMemory], policy: str) -> SaveMemory | None:
    """Returns the memory for a save, waiting where the policy has it so; None to skip the save.

    With ``"replace"``, it may be that of a save that is not yet being written.
    """
    while True:
        free = next((memory for memory in memories if memory.is_free), None)
        if free is not None or policy == "skip":
            return free
        taken = [(job.number, memory, job) for memory in memories if (job := memory.job)]
        _, memory, newest = max(taken, key=itemgetter(0))
        if policy == "replace" and not newest.is_begun:
            return memory
        min(taken, key=itemgetter(0))[2].save._outcome.wait()
