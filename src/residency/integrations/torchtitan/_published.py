"""Finds what the parts hook into in the torchtitan that is installed.

Torchtitan is no dependency, so its names are looked up when a part is imported. Invariant, which
``tests/integrations/test_torchtitan.py`` tries to break: a torchtitan without one of them is named
with its version and the name, before anything is changed.

Source: torchtitan 0.3.0 and pytorch/torchtitan b5bcd76c (2026-08-21): ``config/override.py``,
``components/optimizer``, ``components/checkpointer``, and their use in ``trainer.py``.
"""

from __future__ import annotations

import importlib
from typing import Any

from residency.integrations._common._framework import hook_in, load_framework, missing_in

_INSTALL = "pip install 'torchtitan>=0.3.0'"
_NEWER = f"install torchtitan 0.3.0 or newer: {_INSTALL}"


def published(module: str, name: str) -> Any:
    """Returns what a module of torchtitan has under a name.

    Raises:
        ImportError: Torchtitan is not installed; the message gives the line that installs it.
        RefusedError: This version has no such module, or it has no such name.
    """
    load_framework("torchtitan", install=_INSTALL)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it needs is not
        raise missing_in("torchtitan", module, _NEWER) from error
    return hook_in(found, name, distribution="torchtitan", remedy=_NEWER)


def check_methods(owner: type, *names: str) -> None:
    """Raises ``RefusedError`` where a class of torchtitan has no such method."""
    for name in names:
        if not callable(getattr(owner, name, None)):
            raise missing_in("torchtitan", f"{owner.__qualname__}.{name}", _NEWER)
