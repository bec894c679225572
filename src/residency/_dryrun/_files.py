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
from contextlib import suppress
from typing import Any

from residency._dryrun._facts import facts_of
from residency._dryrun._hearing import Preceded, Silence
from residency._dryrun._made import MadePaths, moved

JOURNAL = "files.journal"
SEEN_BY = "audit events"  # where the watch hears of changes; the answer says so
_KEPT = ".residency-dry-run-kept"  # how the name of a folder begins that things are set aside in
# Up to here what is opened to be changed in place is copied: data sets are mapped so, too.
_MOST_COPIED = 64 << 20
_CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_BESIDE_DATABASES = ("-journal", "-shm", "-wal")  # files that sqlite3 makes, and may leave
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_watch: list[FilesWatch] = []


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
        self._noted: set[tuple[object, ...]] = set()  # of which files facts are
        self._linked: dict[str, tuple[int, int]] = {}
        self._mapped: set[tuple[int, int]] = set()  # whose bytes are read when they are asked for
        self._left: set[str] = set()  # what the run is made for, and stays
        self._kept: set[str] = set()  # folders
        self._local = threading.local()
        self._handlers: dict[str, Callable[..., None]] = {
            "open": self._before_open,
            "os.chmod": self._before_facts,
            "os.chown": self._before_facts,
            "os.link": self._before_link,
            "os.mkdir": self._before_mkdir,
            "os.remove": self._before_remove,
            "os.removexattr": self._before_attribute,
            "os.rename": self._before_rename,
            "os.rmdir": self._before_rmdir,
            "os.setxattr": self._before_attribute,
            "os.symlink": self._before_symlink,
            "os.truncate": self._before_truncate,
            "os.utime": self._before_facts,
            "shutil.copyfile": self._before_copy,
            "socket.bind": self._before_bind,
            "sqlite3.connect": self._before_connect,
        }

    def start(self) -> None:
        """Watches from now on, to the end of the process: Python lets no such hook go."""
        sys.addaudithook(self._hear)
        # Python has no events of the last two, and that of the first leaves out the folder.
        system: Any = os
        before: dict[str, Callable[..., None]] = {
            "open": self._before_open_in,
            "mkfifo": self._before_node,
            "mknod": self._before_node,
        }
        for name, hear in before.items():
            told = Preceded(getattr(os, name), hear, self._local)
            setattr(system, name, told)
            system.supports_dir_fd.add(told)

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

    def _silently(self) -> Silence:
        return Silence(self._local)

    def _before_open(self, path: object, mode: object, flags: int, folder: int = -1) -> None:
        if not flags & _CHANGING or flags & (os.O_PATH | os.O_DIRECTORY):
            return
        name = _place(path, folder)
        if flags & os.O_NOFOLLOW and os.path.islink(name):
            return  # which fails
        place = os.path.realpath(name)
        if not os.path.exists(place) or os.access(place, os.W_OK):
            self._before_change(place, flags)

    def _before_open_in(
        self, path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> None:
        self._before_open(path, None, flags, -1 if dir_fd is None else dir_fd)

    def _before_truncate(self, path: object, length: int) -> None:
        self._before_open(path, None, os.O_WRONLY)

    def _before_change(self, place: str, flags: int) -> None:
        if not self._is_out(place):
            self._before_write(place, flags)

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
                _make_empty(place, found)
        elif found.st_nlink > 1:  # what other names show must not change
            self._replace(place, found, flags)
        elif not found.st_size:
            self._note("size", place, 0, facts_of(found))  # in place: it may be a lock
        elif flags & os.O_TRUNC and _is_open(os.path.dirname(place)):
            self._replace(place, found, flags)
        elif flags & os.O_TRUNC or found.st_size <= _MOST_COPIED:
            self._copy(place, found)
        elif flags & os.O_APPEND:
            self._note("size", place, found.st_size, facts_of(found))
        else:
            self._note("large", place, found.st_size, found.st_mtime_ns)

    def _replace(self, place: str, found: os.stat_result, flags: int) -> None:
        """Puts a file of the run in the place of another, as who opens it may want one there."""
        kept = self._set_aside(place, os.rename)
        self._make(place)
        if flags & os.O_TRUNC:
            _make_empty(place, found)
        else:
            shutil.copy2(kept, place)

    def _copy(self, place: str, found: os.stat_result) -> None:
        """Copies a file that may be changed in place: it may be a log that others append to."""
        if _id(found) not in self._copied:
            self._copied.add(_id(found))
            kept = os.path.join(self._folder, os.urandom(8).hex())
            shutil.copy2(place, kept)
            self._note("copied", place, kept, facts_of(found))

    def _before_connect(self, database: object) -> None:
        if not isinstance(database, str | bytes | os.PathLike):
            return
        name = os.fsdecode(database)
        for each in {name, _path_of_uri(name)} - {"", ":memory:"}:
            self._before_database(os.path.realpath(each))

    def _before_database(self, place: str) -> None:
        """Sets aside what sqlite3 may write, in C, or remove: the file and those beside it."""
        found = _found(place)
        is_older = found is not None and not self._is_free(place, found)
        self._before_change(place, os.O_RDWR | os.O_CREAT)
        for beside in (place + each for each in _BESIDE_DATABASES):
            if os.path.exists(beside):
                self._before_change(beside, os.O_RDWR)
            elif is_older and not self._is_out(beside):
                self._note("absent", beside)  # it would be taken for a part of what is put back

    def _before_facts(self, path: object, *rest: Any) -> None:
        for place, found in self._older(path, rest[-1], has_folders=True):
            # Each change of a folder, as it may be closed to what is to be undone in it.
            if stat.S_ISDIR(found.st_mode) or _id(found) not in self._noted:
                self._noted.add(_id(found))
                self._note("facts", place, facts_of(found))

    def _before_attribute(self, path: object, attribute: str | bytes, *rest: object) -> None:
        name = os.fsdecode(attribute)
        for place, found in self._older(path, -1):
            if not stat.S_ISLNK(found.st_mode) and (*_id(found), name) not in self._noted:
                self._noted.add((*_id(found), name))
                value = None
                with suppress(OSError):  # it has none
                    value = os.getxattr(place, name).hex()
                self._note("attribute", place, name, value)

    def _older(
        self, path: object, folder: int, *, has_folders: bool = False
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yields what is older than the run of a link and of what it leads to: an event does not
        say which of them is meant. The run's own folders come, too, where they are asked for.
        """
        name = _place(path, folder)
        for place in sorted({name, os.path.realpath(name)}):
            found = _found(place, follows=False)
            if found is None or (isinstance(path, int) and self._is_kept(place)):
                continue  # facts of what is kept are known
            is_asked = has_folders and stat.S_ISDIR(found.st_mode)
            if not self._is_out(place) and (is_asked or not self._is_free(place, found)):
                yield place, found

    def _before_remove(self, path: object, folder: int) -> None:
        place = _place(path, folder)
        if not self._is_out(place):
            self._before_loss(place)

    def _before_loss(self, place: str) -> None:
        """Sets aside what is at a path, which another thing is about to take, or nothing."""
        found = _found(place, follows=False)
        if found is None or self._is_free(place, found) or not _is_open(os.path.dirname(place)):
            return
        if stat.S_ISLNK(found.st_mode):
            self._note("link", place, os.readlink(place), facts_of(found))
        elif stat.S_ISDIR(found.st_mode):
            self._note("folder", place, facts_of(found))
        else:
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
            if moved(kept, old, new):
                raise _refusal(f"not moved, as it has what the dry run keeps in {kept}", old)
        self._before_loss(new)
        is_folder = stat.S_ISDIR(found.st_mode)
        self._note("moved", old, new, is_folder)
        self._made.move(old, new, is_folder=is_folder)

    def _before_rmdir(self, path: object, folder: int) -> None:
        self._before_remove(path, folder)

    def _before_mkdir(self, path: object, mode: int, folder: int) -> None:
        self._before_new(_place(path, folder))

    def _before_node(self, path: object, *rest: object, dir_fd: int = -1, **more: object) -> None:
        self._before_new(_place(path, dir_fd))

    def _before_bind(self, socket: object, address: object) -> None:
        if isinstance(address, str | bytes) and os.fsencode(address)[:1] not in (b"", b"\0"):
            self._before_new(_place(address))

    def _before_symlink(self, source: object, target: object, folder: int) -> None:
        self._before_new(_place(target, folder))

    def _before_link(self, source: object, target: object, first: int, second: int) -> None:
        old, new = _place(source, first), _place(target, second)
        if self._is_out(new) or _found(new, follows=False) is not None or _is_closed(new):
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
        if not self._made.is_itself_made(place) and not _is_closed(place):
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
        if self._is_kept(place):
            raise _refusal("this is what the dry run keeps of the files before it", place)
        return place.startswith((f"{self._folder}/", *_NO_FILES))

    def _is_kept(self, place: str) -> bool:
        return any(moved(place, kept, kept) for kept in self._kept)

    def _set_aside(self, place: str, take: Callable[[str, str], None]) -> str:
        """Moves or links a file to where the script does not look; returns its path there.

        It is noted first, as the process may be killed: a file that is not there is none to put
        back.
        """
        name, found = os.urandom(8).hex(), os.lstat(place)
        for folder in self._folders(place):
            kept = os.path.join(folder, name)
            self._note("kept", place, kept, facts_of(found))
            try:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                take(place, kept)
            except OSError:
                continue
            if folder != self._folder:
                self._kept.add(folder)
            return kept
        if not stat.S_ISREG(found.st_mode):
            raise _refusal("this has no bytes to copy, and the dry run cannot set it aside", place)
        kept = os.path.join(self._folder, name)
        shutil.copy2(place, f"{kept}~")
        self._note("kept", place, kept, facts_of(found))
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
            if _is_open(each):
                yield os.path.join(each, f"{_KEPT}-{os.path.basename(self._folder)}")


def _refusal(message: str, *place: str) -> PermissionError:
    """Returns an error of the system's kind: `shutil.rmtree` writes the path into it."""
    return PermissionError(errno.EACCES, message, *place)


def _found(place: str, *, follows: bool = True) -> os.stat_result | None:
    try:
        return os.stat(place, follow_symlinks=follows)
    except (OSError, ValueError):
        return None


def _is_open(folder: str) -> bool:
    """Returns whether names can come and go in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def _is_closed(place: str) -> bool:
    """Returns whether the folder of a path does not let this process see what is in it."""
    try:
        os.lstat(place)
    except PermissionError:
        return True
    except (OSError, ValueError):
        pass
    return False


def _id(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _can_move(source: str, target: str, found: os.stat_result) -> bool:
    """Returns whether the system can do a move, as far as it can be known."""
    outers = os.path.dirname(source), os.path.dirname(target)
    if not all(_is_open(outer) for outer in outers):
        return False
    if os.stat(outers[0]).st_dev != os.stat(outers[1]).st_dev or moved(target, source, source):
        return False
    there = _found(target, follows=False)
    if there is None:
        return True
    is_folder = stat.S_ISDIR(found.st_mode)
    if is_folder != stat.S_ISDIR(there.st_mode):
        return False
    return not is_folder or not os.listdir(target)


def _place(path: Any, folder: int = -1) -> str:
    """Returns where a name is, without following what it may link to, or a descriptor's file."""
    if isinstance(path, int):
        return _path_of(path)
    name = os.fsdecode(path).rstrip("/") or "/"
    if folder != -1:
        name = os.path.join(_path_of(folder), name)
    outer, inner = os.path.split(name)
    if inner in ("", ".", ".."):
        return os.path.realpath(name)
    return os.path.join(os.path.realpath(outer), inner)


def _path_of(descriptor: int) -> str:
    path = f"/proc/self/fd/{descriptor}"
    try:
        return os.readlink(path)
    except OSError:  # it is not open
        return path


def _path_of_uri(name: str) -> str:
    """Returns the path in a database's name, where that is a URI; an event does not say so."""
    if not name.startswith("file:"):
        return ""
    from urllib.parse import unquote, urlsplit  # which few scripts need

    return unquote(urlsplit(name).path)


def _make_empty(place: str, found: os.stat_result) -> None:
    """Makes a file in the place of another, which who opens it to write may want to be there."""
    os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with suppress(OSError):  # it may have been another user's
        os.chown(place, found.st_uid, found.st_gid)
    os.chmod(place, stat.S_IMODE(found.st_mode))


def watch_files_of_run(folder: str) -> None:
    """Watches what this process does to files, for the run with this folder."""
    _watch[:] = [FilesWatch(folder)]
    _watch[0].start()


def files_of_run() -> FilesWatch | None:
    """Returns the watch of this process; None where it is none of a dry run."""
    return _watch[0] if _watch else None
