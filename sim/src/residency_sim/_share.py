"""The name under which processes share one simulated device, and the folder where they meet."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from residency._errors import InvalidArgumentError

_VARIABLE = "RESIDENCY_SIM_SHARE"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHARED_MEMORY = Path("/dev/shm")


def share_name(given: str | None) -> str | None:
    """Returns the name to use: the one given, else the environment's, else None.

    Raises:
        InvalidArgumentError: It is not 1 to 64 letters, digits, hyphens and underscores.
    """
    name, source = given, "share"
    if given is None:
        name, source = os.environ.get(_VARIABLE) or None, _VARIABLE
    if name is None or (isinstance(name, str) and _NAME.fullmatch(name)):
        return name
    raise InvalidArgumentError(
        f"{source} is {name!r}; expected 1 to 64 letters (a to z), digits, '-' or '_'."
    )


def share_folder() -> str:
    """Returns the folder for shared capacities: in memory where that can be, else temporary."""
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        return str(_SHARED_MEMORY)
    return tempfile.gettempdir()
