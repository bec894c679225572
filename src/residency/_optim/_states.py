"""The mapping from parameters to their states that users see, and how trees go through it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree  # there is no public way to register a class

from residency._dtensor import layout_of
from residency._optim._apart import require_own_mappings
from residency._optim._homes import Homes
from residency._optim._places import Residents
from residency._optim._state import ParameterState


class State(defaultdict[Any, Any]):
    """The ``optimizer.state``: a mapping from a parameter to its ``ParameterState``."""

    _homes: Homes
    _residents: Residents

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # a copy
        return defaultdict(*args, **kwargs)

    @classmethod
    def over(cls, homes: Homes, residents: Residents) -> State:
        """Makes an empty state."""
        made: State = defaultdict.__new__(cls)
        made._homes = homes
        made._residents = residents
        return made

    @property
    def residents(self) -> Residents:
        """The parameters whose state stays on the device."""
        return self._residents

    def peek(self, parameter: Tensor) -> ParameterState | None:
        """Returns the state of a parameter where there is one, without waiting."""
        inner = dict.get(self, parameter)
        return inner if isinstance(inner, ParameterState) else None

    def peek_each(self, parameters: Sequence[Tensor]) -> list[ParameterState | None]:
        """Returns ``peek`` of each parameter; asked of all at every step."""
        is_same = list(map(id, self)) == list(map(id, parameters))
        found = dict.values(self) if is_same else [dict.get(self, p) for p in parameters]
        return [inner if isinstance(inner, ParameterState) else None for inner in found]

    def of(self, parameter: Tensor) -> ParameterState:
        """Returns the state of a parameter, made empty where there is none, without waiting."""
        inner = self.peek(parameter)
        if inner is None:
            reserved = self._homes.reserved_for(parameter)
            inner = ParameterState.over(self._homes, self._residents, id(parameter), reserved)
            if isinstance(parameter, Tensor):
                inner.made_for = layout_of(parameter)
            dict.__setitem__(self, parameter, inner)
        return inner

    def require_own_mappings(self, consequence: str) -> None:
        """Requires that each parameter has a mapping of its own; see ``_apart``."""
        states = [each for each in dict.values(self) if isinstance(each, ParameterState)]
        require_own_mappings(states, consequence)

    def __missing__(self, key: Any) -> Any:
        return self.of(key)

    def __setitem__(self, key: object, value: object) -> None:
        if not (isinstance(key, Tensor) and isinstance(value, dict)):
            dict.__setitem__(self, key, value)
            return
        if isinstance(value, ParameterState) and value.homes is self._homes:
            self._bind(key, value)
            return
        inner = self.own(key)
        values = dict(value)
        for stale in [k for k in dict.keys(inner) if k not in values]:
            inner.forget(stale)
        inner.update(values)
        inner.reorder(list(values))
        inner.made_for = layout_of(key)

    def own(self, parameter: Tensor) -> ParameterState:
        """Returns ``of``, but never one that is the state of another parameter, too."""
        inner = self.peek(parameter)
        is_others = inner is not None and inner.is_bound_again
        if is_others and sum(each is inner for each in dict.values(self)) > 1:
            dict.__delitem__(self, parameter)
            self._homes.version += 1
        return self.of(parameter)

    def _bind(self, key: Tensor, inner: ParameterState) -> None:
        """Makes a mapping that has been a parameter's state the state of ``key``, as it is."""
        if self.peek(key) is inner:
            return
        self._residents.revoke(id(key))
        inner.move_to(id(key), self._homes.reserved_for(key))
        inner.made_for = layout_of(key)
        dict.__setitem__(self, key, inner)
        self._homes.version += 1

    # Whatever removes a parameter's state makes plans stale: their copies name homes that went.
    def __delitem__(self, key: object) -> None:
        self._forget(dict.pop(self, key))

    def pop(self, key: object, *default: object) -> Any:
        return self._forget(dict.pop(self, key, *default))

    def popitem(self) -> tuple[Any, Any]:
        key, value = dict.popitem(self)
        return key, self._forget(value)

    def clear(self) -> None:
        for key in list(dict.keys(self)):
            del self[key]

    def _forget(self, value: object) -> object:
        self._homes.version += 1
        if isinstance(value, ParameterState):
            value.leave_residents()
        return value

    def setdefault(self, key: object, default: object = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    # A plain mapping with the same inner dicts: homes have one owner.
    def copy(self) -> Any:
        return defaultdict(dict, dict(self))

    __copy__ = copy

    def update(self, *args: object, **kwargs: object) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: object) -> State:
        self.update(other)
        return self

    def __or__(self, other: object) -> Any:
        return self.copy() | other if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: object) -> Any:
        return other | self.copy() if isinstance(other, dict) else NotImplemented

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        return copy.deepcopy(defaultdict(dict, dict(self)), memo)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        plain: dict[int, Any] = {}  # one mapping stays one
        for value in self.values():
            plain.setdefault(id(value), dict(value) if isinstance(value, dict) else value)
        return defaultdict, (dict, {key: plain[id(value)] for key, value in self.items()})


def _keys_and_values(mapping: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    keys = list(mapping)
    return [mapping[key] for key in keys], keys


def _with_paths(mapping: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    values, keys = _keys_and_values(mapping)
    return list(zip(map(_pytree.MappingKey, keys), values, strict=True)), keys


def _register(kind: type, plain: Callable[[Any], object]) -> None:
    """Makes torch's functions over trees go into a mapping, and make a plain one of the leaves.

    They take one of a class that they do not know for a leaf. There is no public way to tell them.
    """

    def unflatten(values: Iterable[Any], keys: list[Any]) -> object:
        return plain(zip(keys, values, strict=True))

    _pytree.register_pytree_node(
        kind, _keys_and_values, unflatten, flatten_with_keys_fn=_with_paths
    )


_register(ParameterState, dict)
_register(State, partial(defaultdict, dict))
