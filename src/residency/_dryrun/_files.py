"""The watch over what processes of a dry run do to files: it is noted first, and can be undone.

Python says of every file that it is about to be opened, renamed or removed: its audit events. What
was there before the run is set aside then, on its own file system, and the journal says where; so
what the script reads and writes in the run is as always. ``_undo`` reads the journal at the end.
A change that cannot be undone is not made: `tests/dryrun/test_files.py` tries to lose a file.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from residency._dryrun._aside import Aside, refusal
from residency._dryrun._facts import facts_of
from residency._dryrun._found import (
    can_move,
    descriptor_at,
    found_at,
    has_id,
    id_of,
    is_closed,
    is_open,
    path_of_uri,
    place_of,
)
from residency._dryrun._hearing import Preceded, Silence
from residency._dryrun._made import MadePaths

JOURNAL = "files.journal"
SEEN_BY = "audit events"  # where the watch hears of changes; the answer says so
# Up to here what is opened to be changed in place is copied: data sets are mapped so, too.
_MOST_COPIED = 64 << 20
_CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
BESIDE_DATABASES = ("-journal", "-shm", "-wal")  # files that sqlite3 makes, and may leave
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_watch: list[FilesWatch] = []


class FilesWatch:
    """The watch over what this process does to files.

    Attributes:
        has_guessed: Whether the script has read what is not computed, so that what it makes from
            then on may have it.
    """

    def __init__(self, folder: str) -> None:
        """Takes the folder of the run, for the journal and for what can be set aside there."""
        self.has_guessed = self._has_saved = False
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
        self._aside = Aside(self._folder, self._note)
        self._streams: set[tuple[int, int]] = set()  # where its output goes: not the script's file
        self._local = threading.local()
        self._handlers: dict[str, Callable[..., None]] = {
            "http.client.send": self._before_send,
            "open": self._before_open,
            "os.chmod": self._before_facts,
            "os.chown": self._before_facts,
            "os.mkdir": self._before_mkdir,
            "os.remove": self._before_remove,
            "os.removexattr": self._before_attribute,
            "os.rename": self._before_hidden_rename,
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
        for stream in (1, 2):
            with suppress(OSError):  # it has none
                self._streams.add(id_of(os.fstat(stream)))
        # Python's events leave out the folder of the first, whether the next three are done and
        # what a link is followed to, and there are none of the last two.
        system: Any = os
        before: dict[str, Callable[..., Callable[[], None] | None]] = {
            "open": self._before_open_in,
            "link": self._before_link,
            "rename": self._before_rename,
            "replace": self._before_rename,
            "mkfifo": self._before_node,
            "mknod": self._before_node,
        }
        for name, hear in before.items():
            does = getattr(os, name)
            told = Preceded(does, hear, self._local)
            setattr(system, name, told)
            for known in (system.supports_dir_fd, system.supports_follow_symlinks):
                known.update({told} if does in known else ())

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
                self._before_writing(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self._has_saved = True
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
        found = found_at(path)
        if found is not None:
            self._mapped.add(id_of(found))

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
        if isinstance(path, int) or not flags & _CHANGING or flags & (os.O_PATH | os.O_DIRECTORY):
            return  # what has a descriptor was heard of when it was opened
        if not flags & os.O_NOFOLLOW or not os.path.islink(place_of(path, folder)):
            self._before_writing(path, flags, folder)

    def _before_open_in(
        self, path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> None:
        self._before_open(path, None, flags, -1 if dir_fd is None else dir_fd)

    def _before_truncate(self, path: object, length: int) -> None:
        self._before_writing(path, os.O_WRONLY)

    def _before_writing(self, path: object, flags: int, folder: int = -1) -> None:
        link = descriptor_at(path, folder)
        if link:
            self._before_writing_again(link, flags)
            return
        place = os.path.realpath(place_of(path, folder))
        if not os.path.exists(place) or os.access(place, os.W_OK):
            self._before_change(place, flags)

    def _before_writing_again(self, link: str, flags: int) -> None:
        """Keeps the bytes of a file that a process has open: no other can take its place."""
        place, found = self._aside.behind(link), found_at(link)
        if not place or found is None or not stat.S_ISREG(found.st_mode):
            return
        if id_of(found) in self._streams or not os.access(link, os.W_OK):
            return
        if self._aside.has(place) or not (self._is_out(place) or self._is_free(place, found)):
            self._keep_bytes(place, found, flags)

    def _before_change(self, place: str, flags: int) -> None:
        if not self._is_out(place):
            self._before_write(place, flags)

    def _before_write(self, place: str, flags: int) -> None:
        found = found_at(place)
        if found is None:
            if flags & os.O_CREAT:
                self._make(place)
        elif not stat.S_ISREG(found.st_mode):
            return
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            return  # which fails
        elif self._is_free(place, found):
            if flags & os.O_TRUNC and id_of(found) in self._mapped and os.access(place, os.W_OK):
                os.unlink(place)
                _make_empty(place, found)
        elif found.st_nlink > 1 or (  # what other names show must not change
            found.st_size and flags & os.O_TRUNC and is_open(os.path.dirname(place))
        ):
            self._replace(place, found, flags)
        else:
            self._keep_bytes(place, found, flags)

    def _keep_bytes(self, place: str, found: os.stat_result, flags: int) -> None:
        """Keeps what is lost of a file that is changed in place."""
        if not found.st_size:
            self._note("size", place, 0, facts_of(found))  # in place: it may be a lock
        elif flags & os.O_TRUNC or found.st_size <= _MOST_COPIED:
            self._copy(place, found)
        elif flags & os.O_APPEND:
            self._note("size", place, found.st_size, facts_of(found))
        else:
            self._note("large", place, found.st_size, found.st_mtime_ns)

    def _replace(self, place: str, found: os.stat_result, flags: int) -> None:
        """Puts a file of the run in the place of another, as who opens it may want one there."""
        kept = self._aside.take_in(place, os.rename)
        self._make(place)
        if flags & os.O_TRUNC:
            _make_empty(place, found)
        else:
            shutil.copy2(kept, place)

    def _copy(self, place: str, found: os.stat_result) -> None:
        """Copies a file that may be changed in place: it may be a log that others append to."""
        if id_of(found) not in self._copied:
            self._copied.add(id_of(found))
            kept = os.path.join(self._folder, os.urandom(8).hex())
            shutil.copy2(place, kept)
            self._note("copied", place, kept, facts_of(found))

    def _before_connect(self, database: object) -> None:
        if not isinstance(database, str | bytes | os.PathLike):
            return
        name = os.fsdecode(database)
        for each in {name, path_of_uri(name)} - {"", ":memory:"}:
            self._before_database(os.path.realpath(each))

    def _before_database(self, place: str) -> None:
        """Sets aside what sqlite3 may write, in C, or remove: the file and those beside it."""
        for name in (place + each for each in ("", *BESIDE_DATABASES)):
            if os.path.islink(name):
                self._before_loss(name)
            self._before_change(os.path.realpath(name), os.O_RDWR | os.O_CREAT)

    def _before_send(self, connection: object, data: object) -> None:
        if self.has_guessed and isinstance(data, bytes | bytearray) and data.startswith(b"PUT "):
            raise refusal("a dry run sends nothing: its weights are not computed")

    def _before_facts(self, path: object, *rest: Any) -> None:
        for place, found in self._older(path, rest[-1], has_folders=True):
            # Each change of a folder, as it may be closed to what is to be undone in it.
            if stat.S_ISDIR(found.st_mode) or id_of(found) not in self._noted:
                self._noted.add(id_of(found))
                self._note("facts", place, facts_of(found))

    def _before_attribute(self, path: object, attribute: str | bytes, *rest: object) -> None:
        name = os.fsdecode(attribute)
        for place, found in self._older(path, -1):
            if not stat.S_ISLNK(found.st_mode) and (*id_of(found), name) not in self._noted:
                self._noted.add((*id_of(found), name))
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
        link = descriptor_at(path, folder)
        name = "" if isinstance(path, int) else place_of(path, folder)
        leads_to = self._aside.behind(link) if link else os.path.realpath(name)
        for place in sorted({name, leads_to} - {""}):
            found = found_at(place, follows=False)
            if found is None:
                continue
            is_asked = has_folders and stat.S_ISDIR(found.st_mode)
            is_old = is_asked or not self._is_free(place, found)
            if (link and self._aside.has(place)) or (is_old and not self._is_out(place)):
                yield place, found

    def _before_remove(self, path: object, folder: int) -> None:
        place = place_of(path, folder)
        if not self._is_out(place):
            self._before_loss(place)

    def _before_loss(self, place: str) -> None:
        """Sets aside what is at a path, which another thing is about to take, or nothing."""
        found = found_at(place, follows=False)
        if found is None or self._is_free(place, found) or not is_open(os.path.dirname(place)):
            return
        if stat.S_ISLNK(found.st_mode):
            self._note("link", place, os.readlink(place), facts_of(found))
        elif stat.S_ISDIR(found.st_mode):
            self._note("folder", place, facts_of(found))
        else:
            self._linked[place] = id_of(found)
            self._aside.take_in(place, os.link)

    def _is_free(self, place: str, found: os.stat_result) -> bool:
        """Returns whether the script may do as it likes with a thing, as the run has made it."""
        # What was linked, and was not replaced after all, has its bytes in both places.
        is_same = self._linked.get(place) == id_of(found)
        return (place in self._made and not is_same) or place in self._left

    def _before_rename(
        self,
        src: object,
        dst: object,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> Callable[[], None] | None:
        move = self._move_of(place_of(src, src_dir_fd), place_of(dst, dst_dir_fd))
        return None if move is None else functools.partial(self._after_rename, *move)

    def _move_of(self, old: str, new: str) -> tuple[str, str, bool, tuple[int, int]] | None:
        """Notes a move that may be about to be made; returns what to look for after it.

        Whether it is done is noted then: the undo looks, where the process is killed between.
        """
        if old == new or self._is_out(old) or self._is_out(new):
            return None
        found = found_at(old, follows=False)
        if found is None or not can_move(old, new, found):
            return None
        self._aside.look_at_move(old, new)
        self._before_loss(new)
        is_folder, identity = stat.S_ISDIR(found.st_mode), id_of(found)
        self._note("moving", old, new, is_folder, identity)
        return old, new, is_folder, identity

    def _after_rename(self, old: str, new: str, is_folder: bool, identity: tuple[int, int]) -> None:
        if has_id(new, identity) and not has_id(old, identity):
            self._follow_move(old, new, is_folder)
        else:
            self._note("unmoved", old, new)

    def _follow_move(self, old: str, new: str, is_folder: bool) -> None:
        self._note("moved", old, new, is_folder)
        self._made.move(old, new, is_folder=is_folder)

    def _before_hidden_rename(self, old: object, new: object, first: int, second: int) -> None:
        """Hears of one that Python itself makes, of a compiled module: it is taken as done."""
        move = self._move_of(place_of(old, first), place_of(new, second))
        if move is not None:
            self._follow_move(*move[:3])

    def _before_rmdir(self, path: object, folder: int) -> None:
        self._before_remove(path, folder)

    def _before_mkdir(self, path: object, mode: int, folder: int) -> None:
        self._before_new(place_of(path, folder))

    def _before_node(self, path: object, *rest: object, dir_fd: int = -1, **more: object) -> None:
        self._before_new(place_of(path, dir_fd))

    def _before_bind(self, socket: object, address: object) -> None:
        if isinstance(address, str | bytes) and os.fsencode(address)[:1] not in (b"", b"\0"):
            self._before_new(place_of(address))

    def _before_symlink(self, source: object, target: object, folder: int) -> None:
        self._before_new(place_of(target, folder))

    def _before_link(
        self,
        src: object,
        dst: object,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> Callable[[], None] | None:
        old, new = place_of(src, src_dir_fd), place_of(dst, dst_dir_fd)
        if self._is_out(new) or found_at(new, follows=False) is not None or is_closed(new):
            return None
        return functools.partial(self._after_link, old, new)

    def _after_link(self, old: str, new: str) -> None:
        """Notes a name by what it is a name of: the call may have followed a link to that."""
        found = found_at(new, follows=False)
        if found is None:
            return  # it was refused
        if not has_id(old, id_of(found)):
            link = descriptor_at(old)
            old = self._aside.behind(link) if link else os.path.realpath(old)
        # What had no name before it has this one is the run's.
        if not old or old in self._made:
            self._make(new)
        else:  # another name of what is older: its bytes are not the run's
            self._note("name", new)
            self._made.put_back(new)
        self._follow_save(old, new)

    def _before_copy(self, source: object, target: object) -> None:
        if isinstance(source, str | os.PathLike) and isinstance(target, str | os.PathLike):
            self._follow_save(os.path.realpath(source), os.path.realpath(target))

    def _before_new(self, place: str) -> None:
        if not self._is_out(place) and found_at(place, follows=False) is None:
            self._make(place)

    def _follow_save(self, source: str, copy: str) -> None:
        if source in self._made.saves:
            self._note("save", copy)
            self._made.saves.add(copy)

    # ------------------------------------------------------------------------------ what is noted

    def _make(self, place: str) -> None:
        if not self._made.is_itself_made(place) and not is_closed(place):
            kind = "guessed" if self.has_guessed else "new"
            self._note("follows" if self._has_saved else kind, place)
            self._made.add(place)

    def _note(self, *entry: object) -> None:
        if not os.path.exists(self._path):
            # A process that its launcher has left behind: what it does now is not undone.
            raise refusal("the dry run has ended, and this process changes no file any more")
        os.write(self._journal, json.dumps(entry).encode() + b"\n")

    def _is_out(self, place: str) -> bool:
        """Returns whether a path is none of the script's files.

        Raises:
            PermissionError: It is one that the dry run keeps.
        """
        if self._aside.has_elsewhere(place):
            raise refusal("here the dry run keeps the files from before it", place)
        return place.startswith((f"{self._folder}/", *_NO_FILES))


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
