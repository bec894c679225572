"""The names in a checkpoint directory, and which saves they make.

A name alone makes nothing ours: what is removed or replaced has our mark, too (``_marks``).

[Note: replacing a save] A directory cannot be renamed over another that has files. The old save of
a step is renamed aside first, and that name counts as the step while no other has it: at every
moment one of the two is found, and each is whole. What is to be removed gets a third name first,
under which no reader looks, so that half of a save is never found under a name that counts.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from residency._checkpoint._disk._manifest import MANIFEST
from residency._checkpoint._disk._marks import is_own_folder, is_own_probe, remove_own
from residency._checkpoint._disk._system import SYSTEM, System, exists, lexists, sync_folder
from residency._errors import InvalidArgumentError, RefusedError

_logger = logging.getLogger("residency")

LOCK = ".lock"
_MOST_LOOKS = 100  # of a reader whose writer never pauses
LATEST = "latest"

_STEP = r"step-(\d{8,})"
_PUBLISHED = re.compile(_STEP)
_REPLACED = re.compile(r"\.replaced-(\d{8,})-.+")
_SAVING = re.compile(r"\.saving-(\d{8,})-.+")
_OF_RANK = re.compile(r"(\d{5,})-([0-9a-f]{16})(-failed)?")
_REMOVING = re.compile(r"\.removing-.+")
_REMOVING_SAVE = re.compile(rf"\.removing-({_STEP.replace('(', '(?:')})-[0-9a-f]+")
_LINK = re.compile(r"\.latest-.+")
_PROBE = re.compile(r"\.probe-.+")
_TOKEN = re.compile(r"[A-Za-z0-9_\-]{1,64}")


def step_name(step: int) -> str:
    """Returns the name of a published save."""
    return f"step-{step:08d}"


def saving_name(step: int, token: str) -> str:
    """Returns the name of a save under way."""
    return f".saving-{step:08d}-{token}"


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The directory of one attempt of one rank at a save.

    Attributes:
        path: Where it is.
        rank: The rank.
        attempt: What tells the rank's attempts apart.
        has_failed: Whether the rank said that it failed.
    """

    path: Path
    rank: int
    attempt: str
    has_failed: bool


def new_token() -> str:
    """Returns what no other save has."""
    return secrets.token_hex(8)


def check_token(token: str) -> None:
    """Raises InvalidArgumentError unless a token can be part of a name."""
    if not _TOKEN.fullmatch(token):
        raise InvalidArgumentError(
            f"the token is {token!r}; expected up to 64 letters, digits, '_' and '-'."
        )


def step_of(name: str) -> int | None:
    """Returns the step whose published save has this name, or None where it is no such name."""
    match = _PUBLISHED.fullmatch(name)
    return int(match[1]) if match else None


def newest_save(path: Path) -> Path | None:
    """Returns the newest published save in a directory, or None where there is none."""
    if not path.is_dir():
        return None
    published = PublishedSaves(SYSTEM, path).published()
    return path / published[max(published)] if published else None


class PublishedSaves:
    """The saves of one directory: found, replaced and removed."""

    def __init__(self, system: System, path: Path) -> None:
        self._system = system
        self.path = path
        self.is_synced = True

    def names(self) -> list[str]:
        """Returns what is in the directory; nothing, where there is none."""
        try:
            return self._system.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise RefusedError(f"{self.path} is a file; expected a directory for saves.") from error

    def published(self) -> dict[int, str]:
        """Returns the name of each published save by its step, ascending.

        Between two looks a writer may rename both a save and its successor: what was found counts
        only if the names stood still meanwhile, however often a busy writer is to be waited for.
        """
        names = self.names()
        for _ in range(_MOST_LOOKS):
            found = self._published_among(names)
            before, names = names, self.names()
            if sorted(names) == sorted(before):
                break
        return found

    def _published_among(self, names: list[str]) -> dict[int, str]:
        found: dict[int, str] = {}
        for pattern in (_REPLACED, _PUBLISHED):  # the second in the place of the first
            for name in names:
                match = pattern.fullmatch(name)
                if match and self._has_manifest(self.path / name):
                    found[int(match[1])] = name
        return dict(sorted(found.items()))

    def _has_manifest(self, folder: Path) -> bool:
        try:
            return exists(self._system, folder / MANIFEST)
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link to itself is no save
                return False
            raise

    def saving(self) -> list[Path]:
        """Returns the directories of saves that are under way, or were."""
        found = [self.path / name for name in self.names() if _SAVING.fullmatch(name)]
        return [folder for folder in found if is_own_folder(self._system, folder)]

    def of_ranks(self, step: int, token: str) -> list[RankFolder]:
        """Returns the directories of all attempts at a step by the ranks of one run."""
        begin = f"{saving_name(step, token)}-"
        found = []
        for name in self.names():
            match = _OF_RANK.fullmatch(name, len(begin)) if name.startswith(begin) else None
            if match:
                found.append(RankFolder(self.path / name, int(match[1]), match[2], bool(match[3])))
        return found

    def publish(self, folder: Path, step: int) -> Path | None:
        """Makes a whole save the one of its step; returns what is to be removed in its place.

        From the rename on the save is published, and nothing is an error any more.
        [Note: replacing a save]
        """
        target = self.path / step_name(step)
        aside: Path | None = None
        is_own = True
        if lexists(self._system, target):
            is_own = is_own_folder(self._system, target)
            name = f".replaced-{step:08d}-" if is_own else f"{target.name}.not-a-save-"
            aside = self.path / f"{name}{new_token()}"
            self._system.rename(target, aside)
            try:
                sync_folder(self._system, self.path)
                self._system.rename(folder, target)
            except BaseException:
                self._system.rename(aside, target)
                raise
        else:
            self._system.rename(folder, target)
        try:
            sync_folder(self._system, self.path)
        except OSError as error:
            self.is_synced = False
            _logger.warning(
                "%s is published, and the system did not say that its name is on the disk: %s. "
                "Older saves stay until it does.",
                target,
                str(error),
            )
        if aside is not None and not is_own:
            _logger.warning("%s was no save; it is now %s, as it was.", target, aside)
            return None
        return aside if self.is_synced else None

    def sync(self) -> None:
        """Returns when the names of the saves are on the disk, which removing older ones needs."""
        if not self.is_synced:
            sync_folder(self._system, self.path)
            self.is_synced = True

    def remove(self, folder: Path) -> bool:
        """Removes what is ours of a directory, which no longer counts from the first moment on.

        Returns:
            Whether nothing of it is left. What is not ours stays where it is, in a directory that
            is no save any more.
        """
        if not is_own_folder(self._system, folder):
            return False
        doomed = self.path / f".removing-{folder.name.lstrip('.')}-{new_token()}"
        self._system.rename(folder, doomed)
        return self._end_removal(doomed)

    def _end_removal(self, doomed: Path) -> bool:
        if remove_own(self._system, doomed):
            return True
        match = _REMOVING_SAVE.fullmatch(doomed.name)
        if match and not lexists(self._system, self.path / match[1]):
            self._system.rename(doomed, self.path / match[1])
        return False

    def repair(self) -> None:
        """Ends what a dead writer had begun with whole saves; needs the directory's lock.

        What cannot be ended is left to another time: old things do not decide over new ones.
        """
        for name in self.names():
            try:
                self._repair(name)
            except OSError as error:
                _logger.warning("%s could not be tidied up: %s", self.path / name, str(error))

    def _repair(self, name: str) -> None:
        path = self.path / name
        if match := _REPLACED.fullmatch(name):
            target = self.path / step_name(int(match[1]))
            if lexists(self._system, target):
                sync_folder(self._system, self.path)  # its name is on the disk before this one goes
                self.remove(path)
            elif is_own_folder(self._system, path):
                self._system.rename(path, target)
                sync_folder(self._system, self.path)
        elif _REMOVING.fullmatch(name):
            self._end_removal(path)
        elif _LINK.fullmatch(name):
            if self._is_own_link(path):
                self._system.unlink(path)
        elif _PROBE.fullmatch(name) and is_own_probe(self._system, path):
            with suppress(FileNotFoundError):  # a probe lives for a moment, without a lock
                self._system.unlink(path)

    def _is_own_link(self, path: Path) -> bool:
        try:
            target = self._system.readlink(path)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # it is no link
                return False
            raise
        return step_of(target) is not None or _REPLACED.fullmatch(target) is not None

    def point_latest(self) -> None:
        """Lets ``latest`` name the newest save, by renaming a link into its place.

        What has that name and is no link of ours stays as it is.
        """
        latest = self.path / LATEST
        if lexists(self._system, latest) and not self._is_own_link(latest):
            return
        newest = list(self.published().values())[-1]
        link = self.path / f".latest-{new_token()}"
        self._system.symlink(newest, link)
        try:
            self._system.rename(link, latest)
        except BaseException:
            with suppress(OSError):
                self._system.unlink(link)
            raise
        sync_folder(self._system, self.path)
