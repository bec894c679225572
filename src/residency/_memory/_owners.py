"""Which model, gradient or optimizer state a tensor is: the name that its owner has for it.

A parameter is ``model.layers.0.weight`` rather than ``optimizer.param_groups[0]['params'][3]``, and
a state goes by its parameter's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from residency._memory import _objects
from residency._memory._holders._paths import Paths
from residency._memory._holders._walk import Walk

_DEEPEST_STATE = 4


class Owners:
    """The names of the tensors of the modules and optimizers that a search reached."""

    def __init__(self, walk: Walk, paths: Paths) -> None:
        """Goes through all modules and optimizers."""
        self._walk = walk
        self._paths = paths
        self._names: dict[int, tuple[str, str, str]] = {}
        self._short: dict[int, str] = {}  # parameters, without their model's own path
        self._name_modules()
        self._paths.key_names = self._short
        self._name_states()

    def name(self, tensor: object) -> tuple[str, str, str] | None:
        """Returns what kind of thing a tensor is, its path, and that of its owner; None for one
        without an owner.
        """
        return self._names.get(id(tensor))

    def _name_modules(self) -> None:
        modules = [self._walk.objects[position] for position in self._walk.modules]
        children = {
            id(child)
            for module in modules
            for _, child in _table(module, "_modules")
            if child is not None
        }
        gradients = []
        for position in self._walk.modules:
            root = self._walk.objects[position]
            if id(root) in children:
                continue
            for kind, name, tensor in _tensors(root):
                owner = self._paths.path(position)
                self._note(kind, f"{owner}.{name}", owner, tensor)
                self._short.setdefault(id(tensor), name)
                gradients.append((tensor, f"{owner}.{name}.grad", owner))
        for tensor, name, owner in gradients:  # after all parameters: one may be another's gradient
            self._note("gradient", name, owner, gradient_of(tensor))

    def _note(self, kind: str, path: str, owner: str, tensor: object) -> None:
        for part, trail in _parts(tensor):
            self._names.setdefault(id(part), (kind, path + trail, owner))

    def _name_states(self) -> None:
        for position in self._walk.optimizers:
            table = _objects.attributes(self._walk.objects[position]) or {}
            state = table.get("state")
            params = _paths_in_groups(table.get("param_groups"))
            unnamed = {id(param): path for param, path in params}
            owner = None
            for param, path in params:
                if id(param) not in self._names:  # of no module, or of one that is gone
                    owner = owner or self._paths.path(position)
                    self._note("parameter", f"{owner}.{path}", owner, param)
                    self._note("gradient", f"{owner}.{path}.grad", owner, gradient_of(param))
            for key, value in _objects.items(state):
                if key is None:
                    continue
                owner = owner or self._paths.path(position)
                name = self._short.get(id(key))
                where = f"[{unnamed.get(id(key))}]" if name is None else f"[{name!r}]"
                if name is None and id(key) not in unnamed:
                    where = f"[{self._paths.describe_key(key)}]"
                for tensor, trail in _leaves(value, 0):
                    self._note("optimizer state", f"{owner}.state{where}{trail}", owner, tensor)


def gradient_of(tensor: object) -> Any:
    """Returns a tensor's gradient, without the warning that asking others than leaves gives."""
    if not _objects.is_a(tensor, torch.Tensor):
        return None
    if _objects.slot(tensor, "is_leaf") or _objects.slot(tensor, "retains_grad"):
        return _objects.slot(tensor, "grad")
    return None


def _table(module: object, name: str) -> list[tuple[object, object]]:
    return _objects.items((_objects.attributes(module) or {}).get(name))


def _tensors(root: object) -> Iterator[tuple[str, str, object]]:
    """Yields kind, name and tensor of all that a module and its children have."""
    pending, seen = [("", root)], set()
    while pending:
        prefix, module = pending.pop()
        if id(module) in seen or not _objects.is_a(module, torch.nn.Module):
            continue
        seen.add(id(module))
        for kind, table in (("parameter", "_parameters"), ("buffer", "_buffers")):
            for name, tensor in _table(module, table):
                if tensor is not None and type(name) is str:
                    yield kind, prefix + name, tensor
        children = [
            (f"{prefix}{name}.", child)
            for name, child in _table(module, "_modules")
            if type(name) is str
        ]
        pending += reversed(children)


def _parts(tensor: object) -> Iterator[tuple[object, str]]:
    """Yields a tensor, and those that it is made of: a DTensor has its local one."""
    if tensor is None or not _objects.is_a(tensor, torch.Tensor):
        return
    yield tensor, ""
    own = (_objects.attributes(tensor) or {}).items()
    for name, value in [*own, *_objects.slots(tensor)]:  # DTensor has its own in a slot
        if type(name) is str and _objects.is_a(value, torch.Tensor):
            yield value, f".{name}"


def _leaves(value: Any, depth: int) -> Iterator[tuple[Any, str]]:
    """Yields the tensors of a parameter's state, with what follows its key."""
    if _objects.is_a(value, torch.Tensor):
        yield value, ""
    elif depth < _DEEPEST_STATE:
        inner: list[tuple[str, Any]] = []
        if _objects.is_a(value, dict):
            inner = [(_objects.describe_key(key), part) for key, part in _objects.items(value)]
        elif type(value) in (list, tuple):
            inner = [(str(index), part) for index, part in enumerate(value)]
        for key, part in inner:
            for tensor, trail in _leaves(part, depth + 1):
                yield tensor, f"[{key}]{trail}"


def _paths_in_groups(groups: object) -> list[tuple[object, str]]:
    """Returns an optimizer's parameters, with where it has each."""
    found = []
    for number, group in enumerate(groups if type(groups) is list else ()):
        for key, params in _objects.items(group):
            if type(key) is str and key == "params" and type(params) is list:
                for index, param in enumerate(params):
                    found.append((param, f"param_groups[{number}]['params'][{index}]"))
    return found
