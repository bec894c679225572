"""The meaning of a path to the system, and what this process may do there.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import os
import stat
from typing import Any
from urllib.parse import unquote, urlsplit

from residency._dryrun._made import moved

_MOST_LINKS = 40  # that the system follows one after another


def found_at(place: str, *, follows: bool = True) -> os.stat_result | None:
    """Returns what is at a path, or what that leads to; None for nothing that can be seen."""
    try:
        return os.stat(place, follow_symlinks=follows)
    except (OSError, ValueError):
        return None


def id_of(found: os.stat_result) -> tuple[int, int]:
    """Returns what tells a thing from all others: its device, and its number there."""
    return found.st_dev, found.st_ino


def has_id(place: str, identity: tuple[int, int]) -> bool:
    """Returns whether a thing is at a path, by this name of it."""
    found = found_at(place, follows=False)
    return found is not None and id_of(found) == identity


def is_open(folder: str) -> bool:
    """Returns whether names can come and go in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def is_closed(place: str) -> bool:
    """Returns whether the folder of a path does not let this process see what is in it."""
    try:
        os.lstat(place)
    except PermissionError:
        return True
    except (OSError, ValueError):
        pass
    return False


def can_move(source: str, target: str, found: os.stat_result) -> bool:
    """Returns whether the system can do a move, as far as it can be known."""
    outers = os.path.dirname(source), os.path.dirname(target)
    if not all(is_open(outer) for outer in outers):
        return False
    if os.stat(outers[0]).st_dev != os.stat(outers[1]).st_dev or moved(target, source, source):
        return False
    there = found_at(target, follows=False)
    if there is None:
        return True
    is_folder = stat.S_ISDIR(found.st_mode)
    if is_folder != stat.S_ISDIR(there.st_mode):
        return False
    return not is_folder or not os.listdir(target)


def place_of(path: Any, folder: int | None = -1) -> str:
    """Returns where a name is, without following what it may link to.

    Args:
        path: The name.
        folder: A descriptor of the folder that it is in; -1 or None for the current one.
    """
    name = os.fsdecode(path).rstrip("/") or "/"
    if folder is not None and folder != -1:
        name = os.path.join(os.path.realpath(f"/proc/self/fd/{folder}"), name)
    outer, inner = os.path.split(name)
    if inner in ("", ".", ".."):
        return os.path.realpath(name)
    return os.path.join(os.path.realpath(outer), inner)


def descriptor_at(path: Any, folder: int | None = -1) -> str:
    """Returns the link of the system's by which a path leads to what a process has open.

    What is behind it is that very file, wherever it is by now, and not what has its name.

    Returns:
        A path below /proc; nothing for what is reached by names.
    """
    if isinstance(path, int):
        return f"/proc/self/fd/{path}"
    name = place_of(path, folder)
    for _ in range(_MOST_LINKS):
        if not os.path.islink(name):
            return ""
        if name.startswith("/proc/"):
            return name
        name = place_of(os.path.join(os.path.dirname(name), os.readlink(name)))
    return ""


def path_of_uri(name: str) -> str:
    """Returns the path in a database's name, where that is a URI; an event does not say so."""
    if not name.startswith("file:"):
        return ""
    return unquote(urlsplit(name).path)
