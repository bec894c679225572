"""Tells when a module has been imported, for patches that must not import it themselves.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_log = logging.getLogger("residency")


class ImportWatch(MetaPathFinder):
    """A watch that calls a function with each of some modules as soon as it has been imported."""

    def __init__(self, calls: Mapping[str, Callable[[ModuleType], None]]) -> None:
        """Takes the functions by the modules' names; nothing happens until `start`."""
        self._calls = dict(calls)

    def start(self) -> None:
        """Calls for the modules that are there, and watches for the others.

        One that is being executed, as it has imported what starts this, follows when that is done.
        """
        sys.meta_path.insert(0, self)
        for name in [name for name in self._calls if name in sys.modules]:
            module = sys.modules[name]
            if getattr(module.__spec__, "_initializing", False):
                _tell_when_done(module, self._tell)
            else:
                self._tell(module)

    def stop(self) -> None:
        """Watches no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a watched module as Python would, with a loader that tells when it is done."""
        if name not in self._calls or self not in sys.meta_path:
            return None
        # Of those that Python would ask next: no flag can stay behind an interrupt.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader, self._tell)
        return spec

    def _tell(self, module: ModuleType) -> None:
        call = self._calls.pop(module.__name__, None)
        if call is None or self not in sys.meta_path:
            return
        try:
            call(module)
        except Exception:
            _log.exception("residency leaves %s as it is", module.__name__)


class _TellingSpec(ModuleSpec):
    """The spec of a module that is being executed, for as long as that takes."""

    _tells: list[Callable[[], None]]

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            tells = self.__dict__.pop("_tells")
            spec: Any = self
            spec.__class__ = ModuleSpec
            for tell in tells if self.name in sys.modules else ():
                tell()


def _tell_when_done(module: ModuleType, tell: Callable[[ModuleType], None]) -> None:
    spec: Any = module.__spec__
    if not isinstance(spec, _TellingSpec):
        spec._tells = []
        # Python sets a flag of the spec when a module is done, or has failed: nothing else says so.
        spec.__class__ = _TellingSpec
    spec._tells.append(lambda: tell(module))


class _TellingLoader(Loader):
    def __init__(self, loader: Loader, tell: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._tell = tell

    def __getattr__(self, name: str) -> object:
        # `python -m` asks a loader for more than an import does.
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if its import had not been watched.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        spec: Any = module.__spec__
        if spec is not None:
            spec._initializing = False  # as Python will: those who are called take it for done
        self._tell(module)
