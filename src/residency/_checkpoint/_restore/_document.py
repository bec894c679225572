"""Goes through the user's state and a save's document side by side, and plans for each value what
is restored into it, or notes why nothing can be.

What is in the state stays the object that it is and is filled in place, plain mappings and lists
too; what cannot be changed in place (numbers, tuples) is put into its parent. Lists and mappings
take what was saved: a longer list, more keys. Invariant, which
``tests/checkpoint/restore/test_document.py`` tries to break: nothing changes before the plan's
``after``.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from residency import _device
from residency._checkpoint._capture._own_pairs import is_whole_object
from residency._checkpoint._capture._walk import class_name, parameters_of
from residency._checkpoint._capture._wrappers import plain_module, plain_optimizer
from residency._checkpoint._document._decode import pairs_if_alike
from residency._checkpoint._document._encode import joined
from residency._checkpoint._document._kinds import kind_for
from residency._checkpoint._document._nodes import (
    BYTEARRAY,
    COUNTER,
    DEFAULTDICT,
    MAPPING,
    MAPPINGS,
    MODULE,
    NDARRAY,
    OPTIMIZER,
    PLAIN,
    SCALER,
    STATEFUL,
    TENSOR,
    TUPLE,
    Node,
    is_plain_dict,
    kind_of,
    pairs_of,
)
from residency._checkpoint._document._state_dicts import scaler_state
from residency._checkpoint._restore._arrays import fill_memory, is_array
from residency._checkpoint._restore._modules import SavedModule, plan_module
from residency._checkpoint._restore._optimizers import plan_optimizer
from residency._checkpoint._restore._overlaps import is_same_stored
from residency._checkpoint._restore._plan import MetObject, RestorePlan
from residency._checkpoint._restore._values import SavedValue, settled_value, understood
from residency._errors import RefusedError
from residency._transfer import refuse_hidden_state

_OWN_CLASSES: dict[str | None, type] = {COUNTER: Counter, DEFAULTDICT: defaultdict}
_OBJECTS: dict[str, tuple[str, type | None]] = {
    MODULE: ("a module", nn.Module),
    OPTIMIZER: ("an optimizer", Optimizer),
    SCALER: ("a GradScaler", torch.amp.GradScaler),
    STATEFUL: ("an object with state_dict", None),
    MAPPING: ("a mapping", Mapping),
}
_MISSING = object()
_IN_ORDER = (dict, OrderedDict, defaultdict, Counter)  # whose order is a part of the value


class DocumentPlan:
    """The plan of a state's restore from a save of this library."""

    def __init__(self, plan: RestorePlan, state: Any, *, eager: bool) -> None:
        self._plan = plan
        self._names = parameters_of(state)
        self._eager = eager

    def add(self, state: Mapping[str, object]) -> None:
        """Plans to fill what the state names; what else the save has is left alone.

        Raises:
            RefusedError: The state is a mapping that takes no values.
        """
        if not isinstance(state, MutableMapping):
            raise RefusedError(
                f"the state is a {type(state).__name__}, into which no value can be put. Nothing "
                "was changed; give dict(it)."
            )
        parts = {}
        for name, value in state.items():
            node = self._plan.source.values.get(name, _MISSING)
            if node is _MISSING:
                self._plan.missing.append(name)
                continue
            parts[name] = self.visit(name, node, value)
        self._plan.after.append(partial(_put_mapping, state, parts, None))

    def visit(self, path: str, node: Node, value: Any) -> object:
        """Plans to fill a value from its node; returns what is to stand in its place: itself, or a
        ``SavedValue``, which is called for it.

        An object that was met under another name is planned once, and both names get it.
        """
        kind = kind_of(node)
        if not _is_fit(kind, node, value):
            expected = _OBJECTS[kind][0] if kind in _OBJECTS else "a plain value or a container"
            self._plan.differing.append(f"{path}: saved {expected}, here a {type(value).__name__}")
            return value
        one = plain_optimizer(plain_module(value) if isinstance(value, nn.Module) else value)
        if not _has_identity(kind, one):
            return self._visit(path, node, value)
        first = self._plan.seen.get(id(one))
        if first is not None:
            self._compare(first, path, node)
            return value if kind in _OBJECTS else first.result
        seen = self._plan.seen[id(one)] = MetObject(path, node, one)
        seen.result = self._visit(path, node, value)
        return seen.result

    def _compare(self, seen: MetObject, path: str, node: Node) -> None:
        """Notes where one object that is here has two names, and something else was saved under
        each: no order of filling would be right.
        """
        pairs = pairs_if_alike(seen.node, node)
        plan = self._plan
        other = next((p for p in pairs or () if not is_same_stored(plan, *p)), None)
        if pairs is not None and other is None:
            return
        where = "" if other is None else f" ({other[0]} and {other[1]})"
        plan.differing.append(
            f"{seen.path} and {path}: they are one {type(seen.here).__name__} here, and their "
            f"saved values differ{where}"
        )

    def _visit(self, path: str, node: Node, value: Any) -> object:
        kind = kind_of(node)
        if kind == MODULE:
            return self._module(path, node, value)
        if kind == OPTIMIZER:
            inner = plain_optimizer(value)
            plan_optimizer(self._plan, path, node, inner, names=self._names, eager=self._eager)
            return value
        if kind == SCALER:
            return self._scaler(path, node, value)
        if kind == STATEFUL:
            return self._stateful(path, node, value)
        if kind == TENSOR and isinstance(value, Tensor):
            self._plan.fill(path, value, node["name"])
            return value
        if isinstance(value, MutableMapping) and _is_filled(node, value):
            return self._mapping(path, node, value)
        if isinstance(node, list) and type(value) is list:
            return self._list(path, node, value)
        if kind == TUPLE and type(value) is tuple:
            return self._tuple(path, node, value)
        if kind == NDARRAY and _is_read_only(node, value):
            self._plan.differing.append(f"{path}: the array that is here is read-only")
            return value
        if kind in (NDARRAY, BYTEARRAY) and fill_memory(self._plan, path, node, value):
            return value
        made = self._new(path, node)
        if made is not None and kind_for(value) is not None:
            self._plan.after.append(partial(_put_in_place, value, made))
        return made

    def _new(self, path: str, node: object) -> SavedValue | None:
        """Plans a value for which there is nothing yet."""
        objects = [label for kind, (label, _) in _OBJECTS.items() if _contains(node, kind)]
        if objects:
            self._plan.unexpected.append(f"{path} ({objects[0]}, which must exist to be filled)")
            return None
        return self._plan.value(node, path)

    def _module(self, path: str, node: Any, module: nn.Module) -> nn.Module:
        plan, metadata = self._plan, None
        if "metadata" in node:
            metadata = plan.value(node["metadata"], f"{path}._metadata", _check_versions)
        saved = SavedModule(
            dict(zip(node["keys"], node["names"], strict=True)),
            values={n: plan.value(each, joined(path, n)) for n, each in node["extra"].items()},
            metadata=metadata,
        )
        plan_module(plan, module, saved, prefix=f"{path}.")
        return module

    def _scaler(self, path: str, node: Any, scaler: torch.amp.GradScaler) -> object:
        if scaler.is_enabled() and not node["state"]:
            self._plan.differing.append(f"{path}: saved a disabled GradScaler, here an enabled one")
        elif scaler.is_enabled():  # else it keeps nothing, as in torch
            state = self._plan.value(node["state"], path, scaler_state)
            self._plan.after.append(partial(_load_scaler, scaler, state))
        return scaler

    def _stateful(self, path: str, node: Any, value: Any) -> object:
        inner = plain_optimizer(value)
        if isinstance(inner, Optimizer) and self._names:
            refuse_hidden_state(
                inner,
                "restore its model first, then make the optimizer and restore it by another call",
            )
        saved, here = node["class"].rpartition(".")[2], type(inner).__qualname__.rpartition(".")[2]
        if saved != here:
            self._plan.differing.append(f"{path}: saved a {node['class']}, here a {here}")
            return value
        state = self._plan.value(node["state"], path)
        self._plan.after.append(partial(_load_stateful, inner, state))
        return value

    def _mapping(self, path: str, node: Node, value: MutableMapping[Any, object]) -> object:
        pairs = pairs_of(node)
        has_metadata = "metadata" in node and kind_of(node)
        metadata = self._plan.value(node["metadata"], f"{path}._metadata") if has_metadata else None
        parts: dict[Any, object] = {}
        for key_node, each in pairs:
            key = understood(path, key_node, check=hash) if kind_of(node) else key_node
            # Not `get`, of which a class may make something else, as ConfigParser does.
            there = value[key] if key in value else _MISSING  # noqa: SIM401
            below = joined(path, key)
            is_new = there is _MISSING
            parts[key] = self._new(below, each) if is_new else self.visit(below, each, there)
        self._plan.missing += [joined(path, key) for key in value if key not in parts]
        self._plan.after.append(partial(_put_mapping, value, parts, metadata))
        return value

    def _list(self, path: str, node: list[object], value: list[object]) -> object:
        # A plain value takes the place of whatever plain value is there.
        parts = {
            i: self.visit(joined(path, i), each, value[i])
            if i < len(value)
            else self._new(joined(path, i), each)
            for i, each in enumerate(node)
            if type(each) not in PLAIN or (i < len(value) and type(value[i]) not in PLAIN)
        }
        self._plan.after.append(partial(_put_list, value, node, parts))
        return value

    def _tuple(self, path: str, node: Node, value: tuple[object, ...]) -> object:
        items = node["items"]
        if len(items) != len(value):
            return self._new(path, node)
        pairs = enumerate(zip(items, value, strict=True))
        parts = [self.visit(joined(path, i), each, there) for i, (each, there) in pairs]
        made = SavedValue(path, node)
        self._plan.after.append(partial(_make_tuple, made, value, parts))
        return made


def _put_mapping(
    value: MutableMapping[Any, object], parts: Mapping[Any, object], metadata: SavedValue | None
) -> None:
    results = {key: settled_value(each) for key, each in parts.items()}
    if metadata is not None and type(value) is OrderedDict:
        value.__dict__["_metadata"] = metadata()
    for key, result in results.items():
        if key not in value or value[key] is not result:
            value[key] = result
    is_ordered = type(value) in _IN_ORDER
    if is_ordered and list(results) != [key for key in value if key in results]:
        for key in results:
            value[key] = value.pop(key)


def _put_list(value: list[object], node: list[object], parts: Mapping[int, object]) -> None:
    value[:] = [settled_value(parts[i]) if i in parts else each for i, each in enumerate(node)]


def _make_tuple(made: SavedValue, value: tuple[object, ...], parts: Sequence[object]) -> None:
    results = tuple(map(settled_value, parts))
    is_same = all(a is b for a, b in zip(results, value, strict=True))
    made.value = value if is_same else results


def _put_in_place(value: object, made: SavedValue) -> None:
    """Puts what was saved into the object that is there, where it can; that then is the value."""
    kind = kind_for(value)
    if kind is not None and type(value) is type(made.value) and kind.put(value, made.value):
        made.value = value


def _load_scaler(scaler: torch.amp.GradScaler, state: SavedValue) -> None:
    scaler.load_state_dict(scaler_state(state()))


def _load_stateful(value: Any, state: SavedValue) -> None:
    value.load_state_dict(state(_device.accelerator()))


def _check_versions(found: Any) -> None:
    """Raises unless a value is what a module's parts say of their versions."""
    if not all(isinstance(each, Mapping) for each in OrderedDict(found).values()):
        raise TypeError("the versions of a module's parts are mappings")


def _is_filled(node: Any, value: MutableMapping[Any, object]) -> bool:
    """Returns whether a mapping that is here takes what was saved, or another one its place."""
    kind = kind_of(node)
    if kind is None:
        return is_plain_dict(node)
    return kind in MAPPINGS and type(value) is _OWN_CLASSES.get(kind, type(value))


def _has_identity(kind: str | None, value: object) -> bool:
    """Returns whether a value is an object that is changed where it is, so that it matters whether
    two names have one; a tensor's memory tells of itself.
    """
    is_filled = isinstance(value, MutableMapping | list | set | deque | bytearray)
    return kind in _OBJECTS or is_filled or is_array(value)


def _is_fit(kind: str | None, node: Any, value: Any) -> bool:
    """Returns whether objects meet nodes of objects of their kind, and values those of values."""
    if kind == MAPPING:
        return isinstance(value, Mapping) and class_name(value) == node["class"]
    if kind in _OBJECTS:
        expected = _OBJECTS[kind][1]
        is_pair = isinstance(value, Optimizer | torch.amp.GradScaler)
        is_object = is_pair and not is_whole_object(value)
        if expected is None:
            is_filled = is_object or isinstance(value, nn.Module)
            return not is_filled and callable(getattr(value, "load_state_dict", None))
        return isinstance(value, expected) and is_object == is_pair
    is_loaded = callable(getattr(value, "load_state_dict", None))
    return isinstance(value, Mapping | Tensor) or not is_loaded


def _is_read_only(node: Any, value: Any) -> bool:
    """Returns whether a saved array is one that is here, into which no code may write."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.flags.writeable:
        return False
    return (list(value.shape), value.dtype.str) == (node["shape"], node["dtype"])


def _contains(node: object, kind: str) -> bool:
    if isinstance(node, list):
        return any(_contains(each, kind) for each in node)
    if not isinstance(node, dict):
        return False
    return kind_of(node) == kind or any(_contains(each, kind) for each in node.values())
