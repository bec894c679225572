"""The directory of a save that is being written, and the lock that tells it from what a dead writer
left.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from residency._checkpoint._disk._lock import FileLock
from residency._checkpoint._disk._marks import DATA_SUFFIX, WRITERS, is_of_ranks
from residency._checkpoint._disk._system import System
from residency._errors import CheckpointError

_MAX_ATTEMPTS = 100
_PAUSE_SECONDS = 0.001


class SaveFolder:
    """The directory of one save under way.

    Attributes:
        path: Where it is.
        has_joined: Whether ``join`` made or found it.
    """

    def __init__(self, system: System, path: Path) -> None:
        self.path = path
        self.has_joined = False
        self._system = system
        self._lock = FileLock(system, path / WRITERS)

    def join(self) -> None:
        """Makes the directory, or finds it, and locks it against being cleaned up."""
        for _ in range(_MAX_ATTEMPTS):
            with suppress(FileExistsError):
                self._system.mkdir(self.path)
            # Someone who cleans up may remove the directory before it is locked.
            with suppress(FileNotFoundError):
                if self._lock.take(shared=True) and self._lock.is_at_its_path():
                    self.has_joined = True
                    return
            self._lock.give_back()
            self._system.sleep(_PAUSE_SECONDS)
        raise CheckpointError(
            f"{self.path} was removed {_MAX_ATTEMPTS} times; keep whatever cleans that directory "
            "up away from it."
        )

    def remove_data(self, names: list[str] | None = None) -> None:
        """Gives the room of files back: of those that are named, or of all that hold tensors."""
        if names is None:
            names = [name for name in self._system.listdir(self.path) if name.endswith(DATA_SUFFIX)]
        for name in names:
            with suppress(OSError):
                self._system.unlink(self.path / name)

    def strip(self) -> None:
        """Removes what is no part of a published save."""
        for name in self._system.listdir(self.path):
            if is_of_ranks(name):
                with suppress(FileNotFoundError):
                    self._system.unlink(self.path / name)

    def leave(self) -> None:
        """Unlocks the directory."""
        self._lock.give_back()
