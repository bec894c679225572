"""The watch over what processes of a dry run do to files: it is noted first, and can be undone.

Python says of every file that it is about to be opened, renamed or removed: its audit events. What
was there before the run is set aside then, on its own file system, and the journal says where; so
what the script reads and writes in the run is as always. ``_undo`` reads the journal at the end.
A change that cannot be undone is not made: `tests/dryrun/test_files.py` tries to lose a file.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

JOURNAL = "files.journal"
_KEPT = ".residency-dry-run-kept"  # how the name of a folder begins that things are set aside in
# Up to here what is opened to be changed in place is copied: data sets are mapped so, too.
_MOST_COPIED = 64 << 20
_CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_watch: list[FilesWatch] = []


class MadePaths:
    """The paths that a run has made, and those of its saves.

    Attributes:
        saves: Where saves are.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self.saves: set[str] = set()
        self._made: set[str] = set()
        self._older: set[str] = set()  # what the run has moved into folders that it has made

    def __contains__(self, path: str) -> bool:
        """Returns whether the run has made what is there, or the folder that it is in."""
        while True:
            if path in self._older:
                return False
            if path in self._made:
                return True
            path, below = os.path.dirname(path), path
            if path == below:
                return False

    def is_itself_made(self, path: str) -> bool:
        """Returns whether the run has made what is there, by its own name."""
        return path in self._made and path not in self._older

    def add(self, path: str) -> None:
        """Takes a path as made."""
        self._older.discard(path)
        self._made.add(path)

    def put_back(self, path: str) -> None:
        """Takes what is at a path as older than the run, though not what is below."""
        self.saves.discard(path)
        self._made.discard(path)
        self._older.add(path)

    def forget(self, path: str) -> None:
        """Knows nothing any more of a path, and of those below."""
        for paths in (self.saves, self._made, self._older):
            paths -= {each for each in paths if _moved(each, path, path)}

    def has_older_in(self, path: str) -> bool:
        """Returns whether the run has moved something older below a path."""
        return any(_moved(each, path, path) for each in self._older)

    def all(self) -> list[str]:
        """Returns the paths by whose own names something was made."""
        return sorted(self._made - self._older)

    def move(self, source: str, target: str, *, is_folder: bool) -> bool:
        """Follows a move; a path that was left stays: no other process makes anything there.

        Returns:
            Whether the run has made what was moved.
        """
        is_made = source in self
        if is_folder:
            self.forget(target)  # what was below is gone
        for paths in (self.saves, self._made, self._older):
            if is_folder:
                paths |= {_moved(each, source, target) for each in paths} - {""}
            elif source in paths:
                paths.add(target)
        if is_made:
            self.add(target)
        else:
            self._older.add(target)
        return is_made


def _moved(path: str, source: str, target: str) -> str:
    """Returns where a path is after a folder's move; nothing for one outside the folder."""
    return target + path[len(source) :] if f"{path}/".startswith(f"{source}/") else ""


class FilesWatch:
    """The watch over what this process does to files."""

    def __init__(self, folder: str) -> None:
        """Takes the folder of the run, for the journal and for what can be set aside there."""
        self._folder = os.path.realpath(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._path = os.path.join(self._folder, JOURNAL)
        self._journal = os.open(self._path, flags, 0o600)
        self._made = MadePaths()
        self._copied: set[tuple[int, int]] = set()  # files on their devices
        self._linked: dict[str, tuple[int, int]] = {}
        self._mapped: set[tuple[int, int]] = set()  # whose bytes are read when they are asked for
        self._left: set[str] = set()  # what the run is made for, and stays
        self._kept: set[str] = set()  # folders
        self._local = threading.local()
        self._handlers: dict[str, Callable[..., None]] = {
            "open": self._before_open,
            "os.link": self._before_link,
            "os.mkdir": self._before_mkdir,
            "os.remove": self._before_remove,
            "os.rename": self._before_rename,
            "os.rmdir": self._before_rmdir,
            "os.symlink": self._before_symlink,
            "os.truncate": self._before_truncate,
            "shutil.copyfile": self._before_copy,
        }

    def start(self) -> None:
        """Watches from now on, to the end of the process: Python lets no such hook go."""
        sys.addaudithook(self._hear)

    def note_save(self, path: str, *, is_new: bool = True) -> None:
        """Notes that a file is a save, which goes when the run ends.

        Args:
            path: Of the file.
            is_new: Whether it is yet to be written, by code that Python has no events of.
        """
        place = os.path.realpath(path)
        if self._is_out(place):
            return
        with self._silently():
            if is_new:
                self._before_write(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self._note("save", place)
            self._made.saves.add(place)

    def note_result(self, path: str) -> None:
        """Notes that a file is what the run is made for: it stays, in the place of an older one."""
        place = os.path.realpath(path)
        with self._silently():
            self._left.add(place)
            self._note("result", place)

    def note_mapping(self, path: str) -> None:
        """Notes that a file is about to be mapped into memory, though the script has not asked for
        that: who writes it anew writes another file, as the bytes here would be gone.
        """
        found = _found(path)
        if found is not None:
            self._mapped.add(_id(found))

    def note_change(self, path: str) -> None:
        """Notes that a file may be written, in place, by code that Python has no events of."""
        with self._silently():
            self._before_open(path, None, os.O_WRONLY | os.O_CREAT)

    # ---------------------------------------------------------------------------------- the events

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        handler = self._handlers.get(event)
        if handler is not None and not getattr(self._local, "is_silent", False):
            with self._silently():
                handler(*arguments)

    def _silently(self) -> _Silence:
        return _Silence(self._local)

    def _before_open(self, path: object, mode: object, flags: int) -> None:
        if not flags & _CHANGING or not isinstance(path, str | bytes):
            return
        place = os.path.realpath(os.fsdecode(path))
        if not self._is_out(place):
            self._before_write(place, flags)

    def _before_truncate(self, path: object, length: int) -> None:
        self._before_open(path, None, os.O_WRONLY)

    def _before_write(self, place: str, flags: int) -> None:
        found = _found(place)
        if found is None:
            if flags & os.O_CREAT:
                self._make(place)
        elif not stat.S_ISREG(found.st_mode):
            return
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            return  # which fails
        elif self._is_free(place, found):
            if flags & os.O_TRUNC and _id(found) in self._mapped and os.access(place, os.W_OK):
                os.unlink(place)
        elif found.st_nlink > 1:  # what other names show must not change
            kept = self._set_aside(place, os.rename)
            self._make(place)
            if not flags & os.O_TRUNC:
                shutil.copy2(kept, place)
        elif not found.st_size or (flags & os.O_APPEND and not flags & os.O_TRUNC):
            # In place, as the file may be a lock, and a log that others append to.
            self._note("size", place, found.st_size, found.st_mtime_ns)
        elif flags & os.O_TRUNC:
            self._set_aside(place, os.rename)
            self._make(place)
        elif _id(found) not in self._copied and found.st_size <= _MOST_COPIED:
            self._copied.add(_id(found))
            kept = os.path.join(self._folder, os.urandom(8).hex())
            shutil.copy2(place, kept)
            self._note("copied", place, kept)

    def _before_remove(self, path: object, folder: int) -> None:
        place = _place(path, folder)
        if not self._is_out(place):
            self._before_loss(place)

    def _before_loss(self, place: str) -> None:
        """Sets aside what is at a path, which another thing is about to take, or nothing."""
        found = _found(place, follows=False)
        if found is None or self._is_free(place, found):
            return
        if stat.S_ISLNK(found.st_mode):
            self._note("link", place, os.readlink(place))
        elif stat.S_ISDIR(found.st_mode):
            self._note("folder", place, stat.S_IMODE(found.st_mode))
        elif stat.S_ISREG(found.st_mode):
            self._linked[place] = _id(found)
            self._set_aside(place, os.link)

    def _is_free(self, place: str, found: os.stat_result) -> bool:
        """Returns whether the script may do as it likes with a thing, as the run has made it."""
        # What was linked, and was not replaced after all, has its bytes in both places.
        is_same = self._linked.get(place) == _id(found)
        return (place in self._made and not is_same) or place in self._left

    def _before_rename(self, source: object, target: object, first: int, second: int) -> None:
        old, new = _place(source, first), _place(target, second)
        if old == new or self._is_out(old) or self._is_out(new):
            return
        found = _found(old, follows=False)
        if found is None or not _can_move(old, new, found):
            return
        for kept in self._kept:
            if _moved(kept, old, new):
                raise _refusal(f"not moved, as it has what the dry run keeps in {kept}", old)
        self._before_loss(new)
        is_folder = stat.S_ISDIR(found.st_mode)
        self._note("moved", old, new, is_folder)
        self._made.move(old, new, is_folder=is_folder)

    def _before_rmdir(self, path: object, folder: int) -> None:
        self._before_remove(path, folder)

    def _before_mkdir(self, path: object, mode: int, folder: int) -> None:
        self._before_new(_place(path, folder))

    def _before_symlink(self, source: object, target: object, folder: int) -> None:
        self._before_new(_place(target, folder))

    def _before_link(self, source: object, target: object, first: int, second: int) -> None:
        old, new = _place(source, first), _place(target, second)
        if self._is_out(new) or _found(new, follows=False) is not None:
            return
        if old in self._made:
            self._make(new)
        else:  # another name of what is older: its bytes are not the run's
            self._note("name", new)
            self._made.put_back(new)
        self._follow_save(old, new)

    def _before_copy(self, source: object, target: object) -> None:
        if isinstance(source, str | os.PathLike) and isinstance(target, str | os.PathLike):
            self._follow_save(os.path.realpath(source), os.path.realpath(target))

    def _before_new(self, place: str) -> None:
        if not self._is_out(place) and _found(place, follows=False) is None:
            self._make(place)

    def _follow_save(self, source: str, copy: str) -> None:
        if source in self._made.saves:
            self._note("save", copy)
            self._made.saves.add(copy)

    # ------------------------------------------------------------------------------ what is noted

    def _make(self, place: str) -> None:
        if not self._made.is_itself_made(place):
            self._note("new", place)
            self._made.add(place)

    def _note(self, *entry: object) -> None:
        if not os.path.exists(self._path):
            # A process that its launcher has left behind: what it does now is not undone.
            raise _refusal("the dry run has ended, and this process changes no file any more")
        os.write(self._journal, json.dumps(entry).encode() + b"\n")

    def _is_out(self, place: str) -> bool:
        """Returns whether a path is none of the script's files.

        Raises:
            PermissionError: It is one that the dry run keeps.
        """
        if any(_moved(place, kept, kept) for kept in self._kept):
            raise _refusal("this is what the dry run keeps of the files before it", place)
        return place.startswith((f"{self._folder}/", *_NO_FILES))

    def _set_aside(self, place: str, take: Callable[[str, str], None]) -> str:
        """Moves or links a file to where the script does not look; returns its path there.

        It is noted first, as the process may be killed: a file that is not there is none to put
        back.
        """
        name = os.urandom(8).hex()
        for folder in self._folders(place):
            kept = os.path.join(folder, name)
            self._note("kept", place, kept)
            try:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                take(place, kept)
            except OSError:
                continue
            if folder != self._folder:
                self._kept.add(folder)
            return kept
        kept = os.path.join(self._folder, name)
        shutil.copy2(place, f"{kept}~")
        self._note("kept", place, kept)
        os.rename(f"{kept}~", kept)
        if take is os.rename:
            os.unlink(place)
        return kept

    def _folders(self, place: str) -> Iterator[str]:
        """Yields folders on a file's own file system: that of the run, then outer ones first."""
        yield self._folder
        outer = os.path.dirname(place)
        device, outers = os.stat(outer).st_dev, []
        while os.stat(outer).st_dev == device:
            outers.append(outer)
            if outer == "/":
                break
            outer = os.path.dirname(outer)
        for each in reversed(outers):
            if os.access(each, os.W_OK):
                yield os.path.join(each, f"{_KEPT}-{os.path.basename(self._folder)}")


class _Silence:
    """A part of this thread's work whose own events are not heard."""

    def __init__(self, local: threading.local) -> None:
        self._local = local
        self._before = False

    def __enter__(self) -> None:
        self._before = getattr(self._local, "is_silent", False)
        self._local.is_silent = True

    def __exit__(self, *error: object) -> None:
        self._local.is_silent = self._before


def _refusal(message: str, *place: str) -> PermissionError:
    """Returns an error of the system's kind: `shutil.rmtree` writes the path into it."""
    return PermissionError(errno.EACCES, message, *place)


def _found(place: str, *, follows: bool = True) -> os.stat_result | None:
    try:
        return os.stat(place, follow_symlinks=follows)
    except (OSError, ValueError):
        return None


def _id(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _can_move(source: str, target: str, found: os.stat_result) -> bool:
    """Returns whether the system can do a move, as far as it can be known."""
    outers = os.path.dirname(source), os.path.dirname(target)
    if not all(os.access(outer, os.W_OK) for outer in outers):
        return False
    if os.stat(outers[0]).st_dev != os.stat(outers[1]).st_dev or _moved(target, source, source):
        return False
    there = _found(target, follows=False)
    if there is None:
        return True
    is_folder = stat.S_ISDIR(found.st_mode)
    if is_folder != stat.S_ISDIR(there.st_mode):
        return False
    return not is_folder or not os.listdir(target)


def _place(path: Any, folder: int) -> str:
    """Returns where a name is, without following what it may link to."""
    name = os.fsdecode(path).rstrip("/") or "/"
    if folder != -1:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    outer, inner = os.path.split(os.path.abspath(name))
    return os.path.join(os.path.realpath(outer), inner)


def watch_files_of_run(folder: str) -> None:
    """Watches what this process does to files, for the run with this folder."""
    _watch[:] = [FilesWatch(folder)]
    _watch[0].start()


def files_of_run() -> FilesWatch | None:
    """Returns the watch of this process; None where it is none of a dry run."""
    return _watch[0] if _watch else None
