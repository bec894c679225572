"""Ends Python processes of a command that do not hear of the dry run, and would really train.

A process of the script's hands the dry run on to those that it starts (``_children``); a shell that
sets ``PYTHONPATH`` anew, or starts ``python -I``, does not. Such a process is known by Linux'
``/proc`` once it has loaded torch, which takes longer than the time between two looks.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from residency._dryrun._children import not_isolated
from residency._errors import InvalidArgumentError

_PROC = Path("/proc")
_TORCH = b"libtorch_cpu"


def end_strays(parent: int, site: Path) -> None:
    """Kills such a process, if there is one, below a process.

    Args:
        parent: The number of the process that runs the command.
        site: The folder that Python has on its path where it takes part.

    Raises:
        InvalidArgumentError: There was one. The caller, which started the command, ends the rest.
    """
    for process in _below(parent):
        with suppress(OSError):  # it has ended meanwhile
            if _is_stray(_PROC / str(process), os.fsencode(site)):
                os.kill(process, signal.SIGKILL)
                raise InvalidArgumentError(
                    "a Python process of the command does not take part in the dry run, because "
                    "its PYTHONPATH was set anew, or it began with -I, -E or -S: it was ended "
                    "before it trains. Set the variable before residency dry-run instead, or keep "
                    "its value: PYTHONPATH=.:$PYTHONPATH"
                )


def _is_stray(folder: Path, site: bytes) -> bool:
    words = (folder / "cmdline").read_bytes().split(b"\0")[:-1]
    path = b""
    for each in (folder / "environ").read_bytes().split(b"\0"):
        if each.startswith(b"PYTHONPATH="):
            path = each.partition(b"=")[2]
    is_isolated = not_isolated(words) != words
    takes_part = site in path.split(os.fsencode(os.pathsep)) and not is_isolated
    return not takes_part and _TORCH in (folder / "maps").read_bytes()


def _below(parent: int) -> list[int]:
    """Returns a process and those that it started, and they; none where there is no ``/proc``."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            children[int(words[1])].append(int(folder.name))
    found = [parent]
    for each in found:
        found += children[each]
    return found
