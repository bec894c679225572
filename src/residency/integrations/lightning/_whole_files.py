"""Files of checkpoints that get their names when they are whole and on the disk.

A file is written into a directory of its own beside its place, which its writer keeps locked. So
what a dead writer left can be distinguished from what is being written; it goes with
the next write.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from residency._checkpoint._disk import (
    SYSTEM,
    WRITERS,
    FileLock,
    SaveFolder,
    make_folders,
    new_token,
    sync_folder,
)

_BEGIN = ".residency-saving-"
_NAME = re.compile(re.escape(_BEGIN) + "[0-9a-f]{16}")

_log = logging.getLogger("residency")


def local_path(path: object) -> Path | None:
    """Returns where a checkpoint lies on a local file system; None where it lies elsewhere."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    text = str(text).removeprefix("file://")
    return None if "://" in text else Path(os.path.abspath(text))


@contextmanager
def named_when_whole(final: Path) -> Iterator[Path]:
    """Yields where to write a file; it gets its name at the end of the block, unless that raises.

    What else is written beside it in the block gets its name, too, before it does.

    Args:
        final: What it will be called, in the place of a file of that name.

    Raises:
        OSError: It could not be made, brought to the disk or renamed. What has the name is as it
            was.
    """
    make_folders(SYSTEM, final.parent)
    _clear(final.parent)
    folder = SaveFolder(SYSTEM, final.parent / f"{_BEGIN}{new_token()}")
    try:
        folder.join()
        yield folder.path / final.name
        names = set(SYSTEM.listdir(folder.path)) - {WRITERS}
        in_order = sorted(names, key=lambda name: (name == final.name, name))
        for name in in_order:
            sync_folder(SYSTEM, folder.path / name)
        for name in in_order:
            SYSTEM.rename(folder.path / name, final.parent / name)
    finally:
        with suppress(OSError):
            _remove(folder.path)
        folder.leave()
    try:
        sync_folder(SYSTEM, final.parent)
    except OSError as error:  # it has its name: an error here would say that it has not
        _log.warning("the name of %s may not be on the disk yet: %s", final, str(error))


def _clear(parent: Path) -> None:
    """Removes what dead writers left in a directory; what a living one writes is left alone."""
    for name in filter(_NAME.fullmatch, SYSTEM.listdir(parent)):
        folder = parent / name
        names = _names_in(folder)
        if not names:  # one whose writer comes this moment makes it again
            with suppress(OSError):
                SYSTEM.rmdir(folder)
        if WRITERS not in names:  # no directory of ours
            continue
        lock = FileLock(SYSTEM, folder / WRITERS)
        try:
            if lock.take(shared=False) and lock.is_enforced:
                _remove(folder)
        except OSError as error:
            _log.warning("%s could not be removed: %s", folder, str(error))
        finally:
            lock.give_back()


def _names_in(folder: Path) -> list[str]:
    try:
        return SYSTEM.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove(folder: Path) -> None:
    """Removes a directory of ours with the files in it, the mark last."""
    for name in sorted(_names_in(folder), key=lambda name: name == WRITERS):
        if stat.S_ISREG(SYSTEM.lstat(folder / name).st_mode):
            SYSTEM.unlink(folder / name)
    SYSTEM.rmdir(folder)
