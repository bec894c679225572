"""Keeps Python processes that a process of the script starts within the dry run.

They hear of it by the environment, which a launcher may make anew, and ``python -I`` leaves alone:
one that did not would really train, and write over real files.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_VARIABLE = "RESIDENCY_DRY_RUN"
_PATH = "PYTHONPATH"
_PYTHON = re.compile(r"python[\d.]*(?:\.exe)?")
_ISOLATING = re.compile("[EIS]")
_TAKES_A_WORD = ("-W", "-X", "--check-hash-based-pycs")
_RUNS = re.compile("[cm]")  # the letters of an option after which the program's own words come


def not_isolated(words: Sequence[Any]) -> list[Any]:
    """Returns the words of a command without what makes a Python of it ignore its environment."""
    found = list(words)
    if not found or not _PYTHON.fullmatch(os.path.basename(os.fsdecode(found[0]))):
        return found
    at = 1
    while at < len(found):
        word = os.fsdecode(found[at])
        if word in _TAKES_A_WORD:
            at += 2
            continue
        if not word.startswith("-") or word in ("-", "--"):
            break
        runs = _RUNS.search(word)
        end = runs.start() if runs else len(word)
        if not word.startswith(("--", *_TAKES_A_WORD)):
            left = _ISOLATING.sub("", word[:end]) + word[end:]
            if left != word:  # what stays as it is stays of its type
                found[at : at + 1] = [left] if left != "-" else []
            at += left != "-"
        else:
            at += 1
        if runs and not word.startswith("--"):
            break
    return found


def follow_children() -> None:
    """Makes whatever this process starts by Python's functions a part of the dry run."""
    import _posixsubprocess

    own = _Own(os.environ)
    posix: Any = _posixsubprocess
    posix.fork_exec = _before(posix.fork_exec, own, 0, 5)
    if "subprocess" in sys.modules:  # which has taken it by name
        vars(sys.modules["subprocess"])["_fork_exec"] = posix.fork_exec
    for name in ("posix_spawn", "posix_spawnp", "execve"):
        setattr(os, name, _before(getattr(os, name), own, 1, 2))


class _Own:
    """The variables of this dry run."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._settings = environment[_VARIABLE]
        self._site = environment.get(_PATH, "").split(os.pathsep)[0]

    def added_to(self, environment: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns an environment that has them."""
        found = {os.fsdecode(key): os.fsdecode(value) for key, value in environment.items()}
        found.setdefault(_VARIABLE, self._settings)
        path = found.get(_PATH, "")
        if self._site not in path.split(os.pathsep):
            found[_PATH] = os.pathsep.join(filter(None, [self._site, path]))
        return found


def _before(does: Callable[..., Any], own: _Own, words: int, environment: int) -> Any:
    """Returns a function that starts a program, and has it take part; at two of its places are the
    program's words and its environment: a mapping, a list of both as bytes, or none for this one's.
    """

    def starts(*args: Any, **options: Any) -> Any:
        given = list(args)
        if len(given) > environment:
            given[words] = type(given[words])(not_isolated(given[words]))
            there = given[environment]
            if isinstance(there, Mapping):
                given[environment] = own.added_to(there)
            else:
                pairs = os.environ if there is None else dict(e.split(b"=", 1) for e in there)
                listed = own.added_to(pairs).items()
                given[environment] = [os.fsencode(f"{key}={value}") for key, value in listed]
        return does(*given, **options)

    return starts
