"""The folders in which a dry run keeps older files, out of the script's way.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress

from residency._dryrun._facts import facts_of
from residency._dryrun._found import found_at, has_id, id_of, is_open
from residency._dryrun._made import moved

_KEPT = ".residency-dry-run-kept"  # how the name of a folder begins that things are set aside in


class Aside:
    """The folders in which files are set aside: that of the run, and others on their disks."""

    def __init__(self, folder: str, note: Callable[..., None]) -> None:
        """Takes the folder of the run, and what writes into its journal."""
        self._folder = folder
        self._note = note
        self._kept: set[str] = set()  # folders

    def take_in(self, place: str, take: Callable[[str, str], None]) -> str:
        """Moves or links a file to where the script does not look; returns its path there.

        It is noted first, as the process may be killed: a file that is not there is none to put
        back.
        """
        name, found = os.urandom(8).hex(), os.lstat(place)
        for folder in self.folders(place):
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
            raise refusal("this has no bytes to copy, and the dry run cannot set it aside", place)
        kept = os.path.join(self._folder, name)
        shutil.copy2(place, f"{kept}~")
        self._note("kept", place, kept, facts_of(found))
        os.rename(f"{kept}~", kept)
        if take is os.rename:
            os.unlink(place)
        return kept

    def folders(self, place: str) -> Iterator[str]:
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
            if is_open(each):
                yield os.path.join(each, f"{_KEPT}-{os.path.basename(self._folder)}")

    def has(self, place: str) -> bool:
        """Returns whether a path is in one of these folders."""
        return place.startswith(f"{self._folder}/") or self.has_elsewhere(place)

    def behind(self, link: str) -> str:
        """Returns where the file is that a process has open, and that may have been set aside.

        Returns:
            Its path; nothing where it has no name that this watch knows.
        """
        found = found_at(link)
        if found is None or not os.path.islink(link):
            return ""
        name = os.readlink(link)
        if has_id(name, id_of(found)) or not stat.S_ISREG(found.st_mode):
            return name
        with suppress(OSError):  # its folder is gone
            for folder in filter(os.path.isdir, self.folders(name)):
                for each in os.listdir(folder):
                    if has_id(os.path.join(folder, each), id_of(found)):
                        return os.path.join(folder, each)
        return ""

    def has_elsewhere(self, place: str) -> bool:
        """Returns whether a path is in one that a script may come across."""
        return any(moved(place, kept, kept) for kept in self._kept)

    def look_at_move(self, source: str, target: str) -> None:
        """Raises for the move of a folder in which there is one of these."""
        for kept in self._kept:
            if moved(kept, source, target):
                raise refusal(f"not moved, as the dry run keeps files of it in {kept}", source)


def refusal(message: str, *place: str) -> PermissionError:
    """Returns an error of the system's kind: `shutil.rmtree` writes the path into it."""
    return PermissionError(errno.EACCES, message, *place)
