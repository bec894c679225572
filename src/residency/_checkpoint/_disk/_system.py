"""The system calls of a save, in one object, so that a test can let any one of them fail, count
them, or end the process in the midst of one.

Every call goes through `System.perform`. A call that a signal interrupted is made again, so that
no caller has to think of it. A dry run puts its own in the place of this one (`_dry`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from residency._checkpoint._disk._crc import crc32
from residency._checkpoint._disk._descriptor import Descriptor
from residency._system import posix

# What a file system answers when it knows no such operation, or not for this file.
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
# Where there is no such flag (macOS, Windows), files are opened without it.
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_MEM_ALIGN = 0x98  # where the answer has it


class System:
    """The system calls of a save.

    Attributes:
        is_alone: Whether the other ranks of a job are not there, as in a dry run.
    """

    is_alone = False

    def perform(self, name: str, function: Callable[..., object], *arguments: object) -> Any:
        """Makes one call; a test overrides this to see and change what happens.

        Args:
            name: The name of the method that makes the call, such as ``"pwritev"``.
            function: What makes the call.
            arguments: Its arguments.
        """
        return function(*arguments)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        while True:
            try:
                return self.perform(name, function, *arguments)
            except InterruptedError:
                continue

    def open(self, path: str | os.PathLike[str], flags: int) -> Descriptor:
        """Opens a file or a directory, which is closed where another program is executed."""
        found: Descriptor = self._call("open", Descriptor, path, flags)
        return found

    def close(self, fd: Descriptor) -> None:
        """Closes a file."""
        self._call("close", Descriptor.close, fd)

    def pwritev(self, fd: Descriptor, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes buffers at an offset; returns how many bytes were written, maybe fewer."""
        return int(self._call("pwritev", os.pwritev, fd, buffers, offset))

    def preadv(self, fd: Descriptor, buffers: Sequence[memoryview], offset: int) -> int:
        """Fills buffers from an offset; returns how many bytes were read, 0 at the end."""
        return int(self._call("preadv", os.preadv, fd, buffers, offset))

    def fsync(self, fd: Descriptor) -> None:
        """Returns when a file's bytes, or a directory's entries, are on the disk."""
        self._call("fsync", os.fsync, fd)

    def ftruncate(self, fd: Descriptor, num_bytes: int) -> None:
        """Gives a file a length."""
        self._call("ftruncate", os.ftruncate, fd, num_bytes)

    def fallocate(self, fd: Descriptor, num_bytes: int) -> None:
        """Reserves a file's blocks from its start, and makes the file as long."""
        self._call("fallocate", _fallocate, fd, num_bytes)

    def direct_alignment(self, fd: Descriptor) -> int | None:
        """Returns what addresses and lengths in memory are multiples of in direct writes to a file,
        or None where the system does not say.
        """
        found: int | None = self._call("statx", _direct_alignment, fd)
        return found

    def drop_cache(self, fd: Descriptor) -> None:
        """Asks the system to forget what it has of a file in memory; nothing is sure to go.

        Where the system knows no such request, nothing happens.
        """
        advise = getattr(os, "posix_fadvise", None)
        if advise is not None:
            self._call("fadvise", advise, fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def rename(self, source: Path, target: Path) -> None:
        """Renames, in the place of what has the new name."""
        self._call("rename", os.rename, source, target)

    def symlink(self, target: str, path: Path) -> None:
        """Makes a symbolic link at ``path``."""
        self._call("symlink", os.symlink, target, path)

    def mkdir(self, path: Path) -> None:
        """Makes a directory; one that exists is an error."""
        self._call("mkdir", os.mkdir, path)

    def unlink(self, path: Path) -> None:
        """Removes a file's name."""
        self._call("unlink", os.unlink, path)

    def rmdir(self, path: Path) -> None:
        """Removes an empty directory."""
        self._call("rmdir", os.rmdir, path)

    def listdir(self, path: Path) -> list[str]:
        """Returns the names in a directory, sorted."""
        return sorted(self._call("listdir", os.listdir, path))

    def stat(self, path: Path) -> os.stat_result:
        """Returns what the file system knows of a file."""
        found: os.stat_result = self._call("stat", os.stat, path)
        return found

    def fstat(self, fd: Descriptor) -> os.stat_result:
        """Returns what the file system knows of an open file."""
        found: os.stat_result = self._call("fstat", os.fstat, fd)
        return found

    def lstat(self, path: Path) -> os.stat_result:
        """Returns what the file system knows of a name, of a symbolic link that of the link."""
        found: os.stat_result = self._call("lstat", os.lstat, path)
        return found

    def readlink(self, path: Path) -> str:
        """Returns what a symbolic link says."""
        return str(self._call("readlink", os.readlink, path))

    def room_bytes(self, path: Path) -> int:
        """Returns the room that the file system has on which a path lies."""
        found: os.statvfs_result = self._call("statvfs", os.statvfs, path)
        return found.f_bavail * found.f_frsize

    def flock(self, fd: Descriptor, operation: int) -> None:
        """Locks or unlocks an open file."""
        self._call("flock", posix("fcntl", "a save locks files").flock, fd, operation)

    def sleep(self, seconds: float) -> None:
        """Waits."""
        self._call("sleep", time.sleep, seconds)

    def now_seconds(self) -> float:
        """Returns a clock that only goes forward."""
        return time.monotonic()

    def crc32(self, buffer: memoryview, before: int = 0) -> int:
        """Returns the checksum of bytes behind others that have one."""
        return crc32(buffer, before)

    def source(self, view: memoryview, tensor_bytes: int) -> memoryview:
        """Returns what is written for a part of a tensor of so many bytes: that part."""
        return view

    def target(
        self, view: memoryview, path: str | os.PathLike[str], offset: int, sizes: Iterable[int]
    ) -> memoryview:
        """Returns where bytes are read to that ranges of these sizes want: their place."""
        return view


SYSTEM = System()
_in_use: list[System] = []


def use_system(system: System | None) -> None:
    """Sets what makes the system calls of saves from now on; None is ``SYSTEM``."""
    _in_use[:] = [] if system is None else [system]


def system_in_use() -> System:
    """Returns what makes the system calls of this process's saves, which a dry run has replaced."""
    return _in_use[0] if _in_use else SYSTEM


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _fallocate(fd: Descriptor, num_bytes: int) -> None:
    # Not os.posix_fallocate: where the file system cannot reserve, the C library writes to every
    # block instead, which takes as long as the save.
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    if _libc().fallocate(fd.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _direct_alignment(fd: Descriptor) -> int | None:
    # Not in Python's os; Linux 6.1 and later say it. Source: statx(2).
    statx: Any = getattr(_libc(), "statx", None)
    if sys.platform != "linux" or statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd.fileno(), b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    (mask,) = struct.unpack_from("=I", answer, 0)
    (alignment,) = struct.unpack_from("=I", answer, _STATX_DIO_MEM_ALIGN)
    return alignment if mask & _STATX_DIOALIGN and alignment else None


def close_quietly(system: System, fd: Descriptor) -> None:
    """Closes a file of which nothing is expected any more."""
    with suppress(OSError):
        system.close(fd)


def sync_folder(system: System, path: Path) -> None:
    """Returns when a directory's entries, or a file's bytes, are on the disk."""
    fd = system.open(path, os.O_RDONLY)
    try:
        system.fsync(fd)
    finally:
        close_quietly(system, fd)


def make_folders(system: System, path: Path) -> None:
    """Makes a directory and those above it that are missing; returns when all are on the disk.

    The entry of a new directory is one of the directory above, which a loss of power may undo
    otherwise, with all that was written below.
    """
    if exists(system, path):
        return
    make_folders(system, path.parent)
    with suppress(FileExistsError):
        system.mkdir(path)
    try:
        sync_folder(system, path.parent)
    except OSError as error:  # where entries may be made and not be read, or never are synced
        if error.errno not in UNSUPPORTED | {errno.EACCES, errno.EPERM}:
            raise


def read_file(system: System, path: Path) -> bytes:
    """Returns all bytes of a file."""
    fd = system.open(path, os.O_RDONLY)
    try:
        return read_bytes(system, fd, system.fstat(fd).st_size, 0)
    finally:
        close_quietly(system, fd)


def read_bytes(system: System, fd: Descriptor, num_bytes: int, offset: int) -> bytes:
    """Returns bytes of an open file, fewer where it ends before."""
    try:
        data = bytearray(num_bytes)
    except MemoryError as error:
        raise OSError(errno.ENOMEM, f"there is no memory for its {num_bytes} bytes") from error
    return bytes(data[: read_into(system, fd, memoryview(data), offset)])


def read_into(system: System, fd: Descriptor, view: memoryview, offset: int) -> int:
    """Fills a buffer from an open file; returns how many bytes there were."""
    done = 0
    while done < view.nbytes:
        num_bytes = system.preadv(fd, [view[done:]], offset + done)
        if num_bytes == 0:
            break
        done += num_bytes
    return done


def write_bytes(system: System, fd: Descriptor, data: bytes) -> None:
    """Writes all of a buffer, from the begin of a file on."""
    view, offset = memoryview(data), 0
    while view.nbytes:
        num_bytes = system.pwritev(fd, [view], offset)
        if num_bytes == 0:
            raise OSError(errno.EIO, "the file system wrote nothing, and named no error")
        view, offset = view[num_bytes:], offset + num_bytes


def write_file(system: System, path: Path, data: bytes) -> None:
    """Writes a file that is either whole and on the disk or not there under its name.

    The caller brings the directory's entry to the disk.
    """
    partial = path.with_name(f"{path.name}.partial")
    fd = system.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_bytes(system, fd, data)
        system.fsync(fd)
    finally:
        close_quietly(system, fd)
    system.rename(partial, path)


def lexists(system: System, path: Path) -> bool:
    """Returns whether something has this name, if only a symbolic link to nothing."""
    try:
        system.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def exists(system: System, path: Path) -> bool:
    """Returns whether something has this name."""
    try:
        system.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
