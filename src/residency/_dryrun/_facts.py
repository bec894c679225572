"""What a file, a link or a folder has besides its bytes: its mode, its owner and its times.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence


def facts_of(found: os.stat_result) -> list[int]:
    """Returns the facts of what was found, for the journal."""
    mode = stat.S_IMODE(found.st_mode)
    return [mode, found.st_uid, found.st_gid, found.st_atime_ns, found.st_mtime_ns]


def put_facts(place: str, facts: Sequence[int]) -> None:
    """Gives facts to what is at a path: to a link itself, and not to what it leads to.

    Raises:
        OSError: They are another user's to change.
    """
    mode, user, group, accessed, changed = facts
    found = os.lstat(place)
    if (found.st_uid, found.st_gid) != (user, group):
        os.chown(place, user, group, follow_symlinks=False)
    # After the owner, as a change of that takes bits of the mode away.
    if not stat.S_ISLNK(found.st_mode) and stat.S_IMODE(os.lstat(place).st_mode) != mode:
        os.chmod(place, mode)
    if (found.st_atime_ns, found.st_mtime_ns) != (accessed, changed):
        os.utime(place, ns=(accessed, changed), follow_symlinks=False)
