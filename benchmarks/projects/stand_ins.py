"""Stands in for packages that are not installed, and keeps the names of those asked for.

What is installed is taken: this finder is asked last. A stand-in is good for an import, a base
class, a decorator and an annotation; whatever a run needs of it beyond these fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Kind(type):
    """The class of stand-ins: each of their attributes is another one."""

    def __getattr__(cls, name: str) -> Any:
        return _stand_in(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "is_stand_in" not in vars(cls):
            return super().__call__(*args, **kwargs)  # a subclass, which has an `__init__`
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]  # what it decorates
        return super().__call__()


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kind(name, (_Instance,), {"is_stand_in": True})


class _Instance:
    def __getattr__(self, name: str) -> Any:
        return _stand_in(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self)(*args, **kwargs)  # a decorator with arguments

    def __class_getitem__(cls, item: object) -> Any:
        return cls


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        found = _stand_in(name)
        setattr(self, name, found)
        return found


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of packages that are not there.

    Args:
        packages: Their names, without dots, with spaces between them.

    Attributes:
        used: Those that something imported.
    """

    def __init__(self, packages: str) -> None:
        self._packages = frozenset(packages.split())
        self.used: set[str] = set()

    def install(self) -> None:
        """Puts it behind all other finders."""
        sys.meta_path.append(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        self.used.add(spec.name.partition(".")[0])
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass  # its attributes are made when they are asked for
