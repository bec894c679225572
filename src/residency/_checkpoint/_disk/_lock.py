"""Who writes here: locks on files, which the system takes back from a process that ends, however it
ends.

A directory has one writer. A save under way is locked by each of its ranks, so that what a dead
writer left can be distinguished from what is being written.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from residency._checkpoint._disk._descriptor import Descriptor
from residency._checkpoint._disk._system import (
    O_NOFOLLOW,
    UNSUPPORTED,
    System,
    close_quietly,
    read_bytes,
    write_bytes,
)
from residency._errors import RefusedError, warn
from residency._registries import WeakRegistry
from residency._system import in_forked_child, posix

_TAKEN = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
# ENOLCK: the file system's lock service does not answer (NFS).
_NO_LOCKS = UNSUPPORTED | {errno.ENOLCK}
_MAX_OWNER_BYTES = 256


class FileLock:
    """A lock on a file, shared or not; it is not handed on to processes that are forked."""

    def __init__(self, system: System, path: Path) -> None:
        self.path = path
        self._system = system
        self._fd: Descriptor | None = None  # while it is held
        self._opened: Descriptor | None = (
            None  # while it may be: an interrupt comes between any two lines
        )
        self.is_enforced = True
        _locks.add(self)

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd is not None

    def take(self, *, shared: bool) -> bool:
        """Takes the lock, and returns whether it could be had at once.

        Where the file system knows no locks it warns, and counts it as had.
        """
        self.give_back()
        fcntl = posix("fcntl", "a Checkpointer locks its directory")
        flags = os.O_RDWR | os.O_CREAT | O_NOFOLLOW  # `sign` must not write where a link leads
        fd = self._opened = self._system.open(self.path, flags)
        try:
            self._system.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.give_back()
                if error.errno in _TAKEN:
                    return False
                raise
            self.is_enforced = False
            warn(
                f"{self.path.parent} is on a file system without locks ({error}): a second writer "
                "is not noticed, and files of a dead one are not removed.",
                RuntimeWarning,
            )
        except BaseException:
            self.give_back()
            raise
        self._fd = fd
        return True

    def is_at_its_path(self) -> bool:
        """Returns whether the file that is locked still has its name."""
        if self._fd is None:
            return False
        try:
            named = self._system.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(named, self._system.fstat(self._fd))

    def sign(self) -> None:
        """Writes into the file who holds the lock."""
        if self._fd is not None:
            self._system.ftruncate(self._fd, 0)
            write_bytes(self._system, self._fd, f"{_this_process()}\n".encode())

    def owner(self) -> str:
        """Returns what the holder wrote."""
        try:
            fd = self._system.open(self.path, os.O_RDONLY)
            text = read_bytes(self._system, fd, _MAX_OWNER_BYTES, 0)
        except OSError as error:
            return f"that cannot be named ({error})"
        return text.decode("utf-8", "replace").strip() or "that has not yet given its number"

    def give_back(self) -> None:
        """Gives the lock back; nothing to give back is fine, and so is another call."""
        self._fd, fd = None, self._opened
        if fd is not None:
            # Unlocked by name: should closing fail, the lock must not stay with this process.
            with suppress(OSError):
                self._system.flock(fd, posix("fcntl", "a lock ends").LOCK_UN)
            self._opened = None  # first: another file may have the number once it is closed
            close_quietly(self._system, fd)

    def forget(self) -> None:
        """Closes the file in a forked process, where the lock still is its parent's."""
        self._fd, fd, self._opened = None, self._opened, None
        if fd is not None:
            with suppress(OSError):
                fd.close()


class WriterLock(FileLock):
    """The lock of a directory's one writer."""

    def take_or_refuse(self) -> None:
        """Takes the lock, or raises RefusedError that names who has it."""
        if not self.take(shared=False):
            owner = self.owner()
            wait = "Wait until it ends, or give this run a directory of its own."
            if owner == _this_process():
                wait = "It is this one: close its other Checkpointer, whose save may be under way."
            raise RefusedError(
                f"{self.path.parent} is being written by process {owner}; expected one writer. "
                f"{wait}"
            )
        try:
            self.sign()
        except BaseException:
            self.give_back()
            raise


def _this_process() -> str:
    return f"{os.getpid()} on {os.uname().nodename}"


_locks: WeakRegistry[FileLock] = WeakRegistry()


def _forget_all() -> None:
    for lock in _locks:
        lock.forget()


# A DataLoader's worker would otherwise keep its dead parent's lock for as long as it lives.
in_forked_child(_forget_all)
