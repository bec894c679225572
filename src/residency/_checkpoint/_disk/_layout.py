"""The names in a checkpoint directory, and which saves they make.

[Note: replacing a save] A directory cannot be renamed over another that has files. The old save of
a step is renamed aside first, and that name counts as the step while no other has it: at every
moment one of the two is found, and each is whole. What is to be removed gets a third name first,
which nobody looks at, so that half of a save is never found under a name that counts.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from pathlib import Path

from residency._checkpoint._disk._manifest import MANIFEST
from residency._checkpoint._disk._system import System, exists, remove_folder, sync_folder
from residency._errors import InvalidArgumentError, RefusedError

LOCK = ".lock"
WRITERS = ".writers"
LATEST = "latest"

_PUBLISHED = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.replaced-(\d{8,})-.+")
_SAVING = re.compile(r"\.saving-(\d{8,})-.+")
_REMOVING = re.compile(r"\.removing-.+")
_PASSING = re.compile(r"\.(latest|probe)-.+")
_TOKEN = re.compile(r"[A-Za-z0-9_\-]{1,64}")


def step_name(step: int) -> str:
    """Returns the name of a published save."""
    return f"step-{step:08d}"


def saving_name(step: int, token: str) -> str:
    """Returns the name of a save under way."""
    return f".saving-{step:08d}-{token}"


def new_token() -> str:
    """Returns what no other save has."""
    return secrets.token_hex(8)


def check_token(token: str) -> None:
    """Raises InvalidArgumentError unless a token can be part of a name."""
    if not _TOKEN.fullmatch(token):
        raise InvalidArgumentError(
            f"the token is {token!r}; expected up to 64 letters, digits, '_' and '-'."
        )


class Layout:
    """Finds, replaces and removes the saves of one directory."""

    def __init__(self, system: System, path: Path) -> None:
        self._system = system
        self.path = path

    def names(self) -> list[str]:
        """Returns what is in the directory; nothing, where there is none."""
        try:
            return self._system.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise RefusedError(f"{self.path} is a file; expected a directory for saves.") from error

    def published(self) -> dict[int, str]:
        """Returns the name of each published save by its step, ascending."""
        found: dict[int, str] = {}
        for pattern in (_REPLACED, _PUBLISHED):  # the second in the place of the first
            for name in self.names():
                match = pattern.fullmatch(name)
                if match and exists(self._system, self.path / name / MANIFEST):
                    found[int(match[1])] = name
        return dict(sorted(found.items()))

    def saving(self) -> list[Path]:
        """Returns the directories of saves that are under way, or were."""
        return [self.path / name for name in self.names() if _SAVING.fullmatch(name)]

    def publish(self, folder: Path, step: int) -> Path | None:
        """Makes a whole save the one of its step; returns what is to be removed in its place.

        [Note: replacing a save]
        """
        target = self.path / step_name(step)
        aside: Path | None = None
        if exists(self._system, target):
            aside = self.path / f".replaced-{step:08d}-{new_token()}"
            self._system.rename(target, aside)
            try:
                sync_folder(self._system, self.path)
                self._system.rename(folder, target)
            except BaseException:
                self._system.rename(aside, target)
                raise
        else:
            self._system.rename(folder, target)
        sync_folder(self._system, self.path)
        return aside

    def remove(self, folder: Path) -> None:
        """Removes a directory, which no longer counts from the first moment on."""
        doomed = self.path / f".removing-{new_token()}"
        self._system.rename(folder, doomed)
        remove_folder(self._system, doomed)

    def repair(self) -> None:
        """Ends what a dead writer had begun with whole saves; needs the directory's lock."""
        names = self.names()
        for name in names:
            match = _REPLACED.fullmatch(name)
            if match is None:
                continue
            target = self.path / step_name(int(match[1]))
            if exists(self._system, target):
                self.remove(self.path / name)
            else:
                self._system.rename(self.path / name, target)
                sync_folder(self._system, self.path)
        for name in names:
            if _REMOVING.fullmatch(name):
                remove_folder(self._system, self.path / name)
            elif _PASSING.fullmatch(name):
                with suppress(FileNotFoundError):  # a probe lives for a moment, without a lock
                    self._system.unlink(self.path / name)

    def point_latest(self) -> None:
        """Lets ``latest`` name the newest save, by renaming a link into its place."""
        newest = list(self.published().values())[-1]
        link = self.path / f".latest-{new_token()}"
        self._system.symlink(newest, link)
        self._system.rename(link, self.path / LATEST)
        sync_folder(self._system, self.path)
