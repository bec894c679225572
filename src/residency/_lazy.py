"""Doors of packages: names that are imported when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def door(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__``: it imports a module when a name of it is asked for.

    So the package starts without torch, and its modules may import each other's packages.

    Args:
        package: The package's ``__name__``.
        names: For each module of the package, without the package's name, what it offers.
    """
    module_of = {name: module for module, offered in names.items() for name in offered}

    def find(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    return find
