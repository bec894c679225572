"""Puts back what a dry run has changed of files, and removes what it has saved.

It is done by a process of its own, which waits for the end of the command line's: however that and
the script end, by a signal that no process can catch, too, the files are put back.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residency._dryrun._facts import facts_of, put_facts
from residency._dryrun._files import BESIDE_DATABASES, JOURNAL
from residency._dryrun._found import has_id
from residency._dryrun._made import MadePaths, moved

_DONE, _ALL_GOES = b".", b"*"
# Folders of caches, which a later run would have to fill again.
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "XDG_CACHE_HOME")
_DOWNLOADS = ("/hub/", "/xet/")  # what is fetched there is as it was published
_BEGIN = 256  # bytes of a file, which show what it is
_SQLITE = b"SQLite format 3\0"


@dataclass
class EndOfRun:
    """The end of a run, as its keeper learns of it.

    Attributes:
        descriptor: For the run's process to have: nothing is put back while it is open somewhere,
            unless the context has ended.
        leaves_new: Whether new files stay that are none of its saves.
    """

    descriptor: int
    leaves_new: bool = True


@contextmanager
def files_put_back(folder: str, *, has_saves: bool) -> Iterator[EndOfRun]:
    """Puts files back when the context ends, or the process does.

    Args:
        folder: Of the run; it is removed where all could be put back.
        has_saves: Whether what the run has saved stays.
    """
    reader, writer = os.pipe()
    words = [sys.executable, "-m", __name__, folder, *["--saves"] * has_saves]
    # A session of its own: what ends the others by the terminal, as Ctrl-C, does not end it.
    keeper = subprocess.Popen(words, stdin=reader, start_new_session=True)
    os.close(reader)
    end = EndOfRun(writer)
    try:
        yield end
    finally:
        with suppress(BrokenPipeError):
            os.write(writer, _DONE if end.leaves_new else _ALL_GOES)
        os.close(writer)
        if _wait(keeper) == 0:
            shutil.rmtree(folder)


def _wait(keeper: subprocess.Popen[bytes]) -> int:
    """Waits until the files are back, whatever the person at the terminal types."""
    while True:
        try:
            return keeper.wait()
        except KeyboardInterrupt:
            continue


class _Undoing:
    """The changes that a journal has, and their undoing."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._made = MadePaths()
        self._results: set[str] = set()
        self._guessed: set[str] = set()  # made after a read of what is not computed
        self._following: set[str] = set()  # made after a save, whose name they may have
        self._names: set[str] = set()  # that the run has given to older files
        self._steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._kept: set[str] = set()  # folders
        # Moves of which it is not said that they were done: of which things, from where to where.
        self._moving: dict[tuple[str, str], tuple[bool, tuple[int, int]]] = {}
        self._folders: dict[str, Sequence[int]] = {}  # that are to have these facts at the end

    def read(self, kind: str, place: str, *rest: Any) -> None:
        """Follows one entry."""
        if kind in ("new", "guessed", "follows"):
            self._made.add(place)
            self._guessed |= {place} if kind != "new" else set()
            self._following |= {place} if kind == "follows" else set()
        elif kind == "save":
            self._made.saves.add(place)
        elif kind == "name":
            self._made.put_back(place)
            self._names.add(place)
        elif kind == "result":
            self._results.add(place)
        elif kind == "moving":
            self._moving[place, rest[0]] = rest[1], (rest[2][0], rest[2][1])
        elif kind == "unmoved":
            self._moving.pop((place, rest[0]), None)
        elif kind == "moved":
            self._moving.pop((place, rest[0]), None)
            is_made = self._made.move(place, rest[0], is_folder=rest[1])
            for paths in (self._guessed, self._following):
                paths |= {moved(each, place, rest[0]) for each in paths} - {""}
            if not is_made or self._made.has_older_in(rest[0]):
                self._steps.append((self._move_back, (place, *rest)))
        elif kind == "kept":
            self._read_kept(place, *rest)
        elif kind == "facts" and place in self._made:
            self._steps.append((self._open_own_folder, (place,)))
        elif place not in self._made:
            ways: dict[str, Callable[..., None]] = {
                "attribute": _put_attribute,
                "copied": _copy_back,
                "facts": self._put_facts,
                "folder": self._make_folder,
                "large": self._look_at_large,
                "link": self._link,
                "size": self._cut,
            }
            self._steps.append((ways[kind], (place, *rest)))

    def _read_kept(self, place: str, kept: str, facts: Sequence[int]) -> None:
        self._kept.add(os.path.dirname(kept))
        if not os.path.lexists(kept):
            return  # another place was found, or the process was killed before
        if place in self._made:  # by another process of the run
            os.unlink(kept)
            self._made.add(kept)
            return
        self._steps.append((self._put_back, (place, kept, facts)))

    def look_at_moves(self) -> None:
        """Looks which moves were done of those in whose midst a process was killed."""
        for (source, target), (is_folder, identity) in list(self._moving.items()):
            if has_id(target, identity) and not has_id(source, identity):
                self.read("moved", source, target, is_folder)

    def undo(self) -> None:
        """Undoes all, the last first."""
        for undo, arguments in reversed(self._steps):
            try:
                undo(*arguments)
            except OSError as error:
                kept = f"; it is {arguments[1]} now" if undo == self._put_back else ""
                self.failures.append(f"{arguments[0]} cannot be put back: {error.strerror}{kept}")
        for folder in self._kept:
            with suppress(OSError):
                os.rmdir(folder)

    def remove_beside_older(self) -> None:
        """Removes logs and journals of the run beside older databases, which would take them in."""
        for place in {*self._made.all(), *self._names}:
            ends = (each for each in BESIDE_DATABASES if place.endswith(each))
            database = place.removesuffix(next(ends, ""))
            is_older = database != place and database not in self._made
            is_file = os.path.islink(place) or os.path.isfile(place)
            if is_older and is_file and _begin(database).startswith(_SQLITE):
                self._remove(place)

    def remove_saves(self) -> None:
        """Removes the saves, and folders that were made for them with all that is in them."""
        folders = set()
        saves = self._made.saves.union(filter(_is_save, self._made.all()))
        for place in sorted(saves - self._results):
            # Not by way of a link to a folder that others have.
            if place in self._made and os.path.isfile(place) and os.path.realpath(place) == place:
                self._remove(place)
                folders.add(os.path.dirname(place))
        for folder in sorted(folders, reverse=True):
            if self._made.is_itself_made(folder):
                self._empty(folder)
            while folder in self._made:
                with suppress(OSError):  # it has other things
                    os.rmdir(folder)
                folder = os.path.dirname(folder)
        for place in self._made.all():
            if os.path.islink(place) and not os.path.exists(place):
                self._remove(place)

    def remove_new(self, *, are_guessed: bool) -> None:
        """Removes what else the run has made, but for what it has put into caches, and for names
        that it has given to older files.

        Args:
            are_guessed: Whether only what may have values in it that were not computed goes, or
                the name of a save: what was made after a save, or is no text and was made after
                the script had read such values.
        """
        made = self._guessed.intersection(self._made.all()) if are_guessed else self._made.all()
        lost: set[str] = set()  # folders of the run whose rest makes no sense without what went
        caches = [os.path.realpath(os.environ[name]) for name in _CACHES if os.environ.get(name)]
        # The inner ones first.
        for place in sorted(set(made) - self._results, reverse=True):
            is_cached = "/." in place or any(moved(place, each, each) for each in caches)
            if place in self._guessed and not any(each in place for each in _DOWNLOADS):
                is_cached = False  # a later run would take what is not computed for its own
            outer = os.path.dirname(place)
            is_here = os.path.realpath(outer) == outer  # and not by way of a link to others'
            if is_cached or not is_here or not self._made.is_itself_made(place):
                continue
            if os.path.isdir(place) and not os.path.islink(place):
                if not are_guessed or place in lost:
                    self._empty(place)
                    lost.add(outer)
                with suppress(OSError):  # it has other things
                    os.rmdir(place)
            elif os.path.lexists(place) and not (are_guessed and self._is_note(place)):
                lost.add(outer)
                self._remove(place)

    def _is_note(self, place: str) -> bool:
        return place not in self._following and _is_text(place)

    def finish_folders(self) -> None:
        """Gives folders their modes and times: nothing is made in them any more."""
        for place, facts in self._folders.items():
            try:
                if os.path.isdir(place) and not os.path.islink(place):
                    put_facts(place, facts)
            except OSError as error:
                self.failures.append(f"{place} cannot be put back: {error.strerror}")

    def _remove(self, place: str) -> None:
        try:
            os.unlink(place)
        except OSError as error:
            self.failures.append(f"{place} is the run's, and cannot be removed: {error.strerror}")

    def _empty(self, folder: str) -> None:
        for outer, folders, files in os.walk(folder, topdown=False):
            links = [name for name in folders if os.path.islink(os.path.join(outer, name))]
            for name in files + links:
                place = os.path.join(outer, name)
                if place in self._made and place not in self._results:
                    self._remove(place)
            with suppress(OSError):  # it has a result
                os.rmdir(outer)

    def _put_back(self, place: str, kept: str, facts: Sequence[int]) -> None:
        _clear(place)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            os.replace(kept, place)
        except OSError:  # from another file system
            shutil.copy2(kept, f"{place}~")
            os.replace(f"{place}~", place)
        with suppress(FileNotFoundError):
            os.unlink(kept)  # two names of one file
        self._made.put_back(place)
        put_facts(place, facts)

    def _make_folder(self, place: str, facts: Sequence[int]) -> None:
        if os.path.islink(place) or not os.path.isdir(place):
            _clear(place)
        os.makedirs(place, exist_ok=True)
        self._made.put_back(place)
        self._put_facts(place, facts)

    def _link(self, place: str, target: str, facts: Sequence[int]) -> None:
        _clear(place)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.symlink(target, place)
        self._made.put_back(place)
        put_facts(place, facts)

    def _put_facts(self, place: str, facts: Sequence[int]) -> None:
        if os.path.islink(place) or not os.path.isdir(place):
            if os.path.lexists(place):
                put_facts(place, facts)
            return
        self._folders[place] = facts
        _give(place, stat.S_IRWXU)  # things are to be put back in it

    def _open_own_folder(self, place: str) -> None:
        """Opens a folder of the run, in which there may be older things, until the end."""
        if os.path.isdir(place) and not os.path.islink(place):
            self._folders.setdefault(place, facts_of(os.stat(place)))
            _give(place, stat.S_IRWXU)

    def _look_at_large(self, place: str, num_bytes: int, changed: int) -> None:
        found = os.stat(place)
        if (found.st_size, found.st_mtime_ns) != (num_bytes, changed):
            self.failures.append(f"{place} was changed in place, and was too large to be copied")

    def _cut(self, place: str, num_bytes: int, facts: Sequence[int]) -> None:
        _give(place, stat.S_IRUSR | stat.S_IWUSR)
        if os.path.getsize(place) > num_bytes:
            os.truncate(place, num_bytes)
        elif os.path.getsize(place) < num_bytes:
            self.failures.append(f"{place} was made shorter, and was too large to be copied")
        put_facts(place, facts)

    def _move_back(self, source: str, target: str, is_folder: bool) -> None:
        is_ours = source in self._made or source in self._names
        if not os.path.lexists(target) or (os.path.lexists(source) and not is_ours):
            return  # it was not moved
        _clear(source)
        os.makedirs(os.path.dirname(source), exist_ok=True)
        os.rename(target, source)
        self._folders = {
            moved(each, target, source) or each: facts
            for each, facts in self._folders.items()
            if not moved(each, source, source)
        }
        self._made.forget(source)
        self._made.move(target, source, is_folder=is_folder)
        self._made.forget(target)


def _is_save(place: str) -> bool:
    """Returns whether a file is one of torch.save, which may have come by way of a buffer."""
    begin = b"" if os.path.islink(place) else _begin(place)
    return begin.startswith(b"PK\x03\x04") and b"/data.pkl" in begin


def _is_text(place: str) -> bool:
    """Returns whether a file begins as text does, as logs and figures do; an empty one, too."""
    begin = _begin(place)
    try:
        begin.decode()
    except UnicodeDecodeError as error:
        if error.start < len(begin) - 3:  # no character that is cut
            return False
    return b"\0" not in begin


def _begin(place: str) -> bytes:
    if os.path.isfile(place):
        with suppress(OSError), open(place, "rb") as file:  # another's, perhaps
            return file.read(_BEGIN)
    return b""


def _clear(place: str) -> None:
    """Removes what the run has made in the place of another thing."""
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    elif os.path.lexists(place):
        os.unlink(place)


def _copy_back(place: str, kept: str, facts: Sequence[int]) -> None:
    if os.path.exists(place):
        _give(place, stat.S_IRUSR | stat.S_IWUSR)
    if not os.path.exists(place) or not filecmp.cmp(kept, place, shallow=False):
        shutil.copyfile(kept, place)  # in place: others may have the file open, as a lock
    put_facts(place, facts)


def _give(place: str, rights: int) -> None:
    """Gives the owner rights, which the script may have taken away."""
    mode = stat.S_IMODE(os.stat(place).st_mode)
    if mode & rights != rights:
        os.chmod(place, mode | rights)


def _put_attribute(place: str, name: str, value: str | None) -> None:
    before = stat.S_IMODE(os.stat(place).st_mode)
    _give(place, stat.S_IRUSR | stat.S_IWUSR)
    if value is not None:
        os.setxattr(place, name, bytes.fromhex(value))
    elif name in os.listxattr(place):
        os.removexattr(place, name)
    if stat.S_IMODE(os.stat(place).st_mode) != before:
        os.chmod(place, before)


def undo(folder: str, *, has_saves: bool, leaves_new: bool = True) -> list[str]:
    """Undoes what the journal of a run says; returns what could not be undone."""
    journal = Path(folder, JOURNAL)
    if not journal.exists():
        return []
    undoing = _Undoing()
    # From here on no process that is left changes anything.
    journal = journal.rename(journal.with_suffix(".undone"))
    for line in journal.read_bytes().splitlines():
        undoing.read(*json.loads(line))
    undoing.look_at_moves()
    undoing.undo()
    undoing.remove_beside_older()
    if not has_saves:
        undoing.remove_saves()
        undoing.remove_new(are_guessed=leaves_new)
    undoing.finish_folders()
    return undoing.failures


def main(folder: str, *options: str) -> int:
    """Waits for the end of the run, undoes it and returns the exit status."""
    said = os.read(sys.stdin.fileno(), 1)
    has_saves, leaves_new = "--saves" in options, said != _ALL_GOES
    failures = undo(folder, has_saves=has_saves, leaves_new=leaves_new)
    for failure in failures:
        print(f"residency: {failure}", file=sys.stderr)
    if failures:
        print(f"residency: the files from before their changes are in {folder}", file=sys.stderr)
    elif not said:  # no other process is left to do it
        shutil.rmtree(folder)
    return len(failures) > 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
