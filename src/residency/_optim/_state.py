"""The mappings that users see as the state of an offloaded optimizer, over the homes on the host.

``optimizer.state`` stays a ``defaultdict`` of dicts. Whatever is assigned to a key is copied to its
home on the host, and every read first waits for copies home that are still under way. Invariant: a
tensor that a caller can reach through these mappings has its final bytes.

[Note: who may reach a home] Inside the package, ``dict.get`` and its like bypass the wait on
purpose: the step only hands tensors on to streams that wait for one another on the device.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, ItemsView, Iterator, ValuesView
from typing import Any

import torch
from torch import Tensor

from residency._errors import RefusedError
from residency._optim._homes import Home, Homes
from residency._optim._sharding import layout_of
from residency._transfer import local_of, moved


class ParameterState(dict[str, Any]):
    """Is the state of one parameter: a dict whose device tensors live at home.

    Attributes:
        homes_by_key: The homes of the values that live on the host between steps.
        is_resident: Whether the values stay on the device instead.
        written: The event after the newest copy home, None when nothing is under way.
        made_for: The layout of the parameter that the values belong to.
        master_versions: Those of the parameter when its master was last written to it.
        reserved: Homes for values that are not there yet.
        template: Versions of the zeros that ``prime`` put here, by key, until a value is placed.
    """

    __slots__ = (
        "_homes",
        "homes_by_key",
        "is_resident",
        "made_for",
        "master_versions",
        "reserved",
        "template",
        "written",
    )

    def __init__(
        self, homes: Homes, *, is_resident: bool, reserved: dict[str, Home] | None = None
    ) -> None:
        super().__init__()
        self._homes = homes
        self.homes_by_key: dict[str, Home] = {}
        self.is_resident = is_resident
        self.written: torch.Event | None = None
        self.made_for: Hashable = None
        self.master_versions: tuple[int, int] | None = None
        self.reserved = {} if reserved is None else reserved
        self.template: dict[str, int] | None = None

    def check_parameter(self, parameter: Tensor) -> None:
        """Takes note of a parameter's layout, for which values are made from now on.

        Raises:
            RefusedError: There are values, which were made for another layout.
        """
        now = layout_of(parameter)
        if self and self.made_for not in (None, now):
            raise RefusedError(
                f"a parameter has the shape, dtype and shard {now} now, and its state was made for "
                f"{self.made_for}. Nothing was stepped: put the parameter's data back, or delete "
                "its entry in optimizer.state, or load a state for it."
            )
        self.made_for = now

    def is_template(self) -> bool:
        """Says whether the values are still the zeros that ``prime`` put here.

        A load may write into them in place (``dcp.load`` does), with or without a new version.
        """
        tensors = {k: local_of(v) for k, v in dict.items(self) if isinstance(v, Tensor)}
        return self.template is not None and all(
            key in tensors and tensors[key]._version == version and not tensors[key].count_nonzero()
            for key, version in self.template.items()
        )

    def fence(self) -> None:
        """Blocks the host until no copy home is under way."""
        if self.written is not None:
            self.written.synchronize()
            self.written = None

    def place(self, key: str, value: Any, *, on_device: bool | None = None) -> None:
        """Puts a value where it belongs.

        Args:
            key: The state's name.
            value: A tensor is copied to its home; anything else is kept as it is.
            on_device: Whether steps need the value on the device; None finds out: a device tensor
                does, a host tensor and a scalar do what the value before it did, and a fresh host
                scalar stays on the host, as torch keeps ``step``.
        """
        self.fence()
        self.template = None
        if not isinstance(value, Tensor):
            self.keep(key, value)
            return
        if on_device is None:
            on_device = self._belongs_on_device(key, value)
        if not on_device:
            self.keep(key, value.cpu())
        elif self.is_resident:
            dict.__setitem__(self, key, moved(value, self._homes.device))
        else:
            home = self.homes_by_key.get(key) or self.reserved.get(key)
            self.settle(key, self._homes.fill(home, value))

    def settle(self, key: str, home: Home) -> None:
        """Makes ``home`` the place of ``key``."""
        self.reserved.pop(key, None)
        if self.homes_by_key.get(key) is not home:
            self._homes.version += 1
        self.homes_by_key[key] = home
        dict.__setitem__(self, key, home.value)

    def keep(self, key: str, value: Any) -> None:
        """Keeps a value as it is, without a home."""
        self._leave_home(key)
        dict.__setitem__(self, key, value)

    def forget(self, key: str) -> None:
        """Removes a key without waiting."""
        self._leave_home(key)
        dict.pop(self, key, None)

    def _leave_home(self, key: str) -> None:
        if self.homes_by_key.pop(key, None) is not None:
            self._homes.version += 1

    def reorder(self, keys: list[str]) -> None:
        """Puts the keys into the order in which the optimizer makes them; cuts make homes first."""
        if list(dict.keys(self)) != keys:
            values = [dict.__getitem__(self, key) for key in keys]
            dict.clear(self)
            dict.update(self, zip(keys, values, strict=True))

    def is_on_device(self, key: str) -> bool:
        """Says whether steps see this key's value on the device."""
        value = dict.get(self, key)
        return key in self.homes_by_key or (isinstance(value, Tensor) and not value.is_cpu)

    def _belongs_on_device(self, key: str, value: Tensor) -> bool:
        before = dict.get(self, key)
        # Loops that move a whole state to the device and back move the host's scalars, too. Those
        # go home as the others do: where a scalar lives decides in which arithmetic it advances.
        are_scalars = isinstance(before, Tensor) and before.dim() == value.dim() == 0
        if isinstance(before, Tensor) and (value.is_cpu or are_scalars):
            return self.is_on_device(key)
        return not value.is_cpu or value.dim() > 0

    def __setitem__(self, key: str, value: Any) -> None:
        self.place(key, value)

    def __getitem__(self, key: str) -> Any:
        self.fence()
        return dict.__getitem__(self, key)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self.pop(key)

    # Overriding this also takes `dict(state)` and `{**state}` off CPython's path around
    # `__getitem__`.
    def __iter__(self) -> Iterator[str]:
        self.fence()
        return dict.__iter__(self)

    def __reversed__(self) -> Iterator[str]:
        self.fence()
        return dict.__reversed__(self)

    def __repr__(self) -> str:
        self.fence()
        return dict.__repr__(self)

    def __eq__(self, other: object) -> bool:
        self.fence()
        return dict.__eq__(self, other)

    __hash__ = None  # as dict

    def get(self, key: str, default: Any = None) -> Any:
        self.fence()
        return dict.get(self, key, default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # dict_items is not nameable
        self.fence()
        return dict.items(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]  # dict_values is not nameable
        self.fence()
        return dict.values(self)

    def pop(self, key: str, *default: Any) -> Any:
        self.fence()
        value = dict.pop(self, key, *default)
        self.forget(key)
        return value

    def popitem(self) -> tuple[str, Any]:
        if not self:
            raise KeyError("popitem(): dictionary is empty")  # in dict's words
        key = next(dict.__reversed__(self))
        return key, self.pop(key)

    def clear(self) -> None:
        self.fence()
        for key in list(dict.keys(self)):
            self.forget(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self.place(key, default)
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self.place(key, value)

    def __ior__(self, other: Any) -> ParameterState:  # type: ignore[override]  # as update
        self.update(other)
        return self

    # A union is a plain dict with the values that the homes have now.
    def __or__(self, other: Any) -> Any:
        return dict(self) | other if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return other | dict(self) if isinstance(other, dict) else NotImplemented

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)


class State(defaultdict[Any, Any]):
    """Is ``optimizer.state``: a mapping from a parameter to its ``ParameterState``."""

    def __init__(self, homes: Homes, resident: set[Tensor]) -> None:
        super().__init__(None)
        self._homes = homes
        self._resident = resident

    def peek(self, parameter: Tensor) -> ParameterState | None:
        """Returns the state of a parameter where there is one, without waiting."""
        inner = dict.get(self, parameter)
        return inner if isinstance(inner, ParameterState) else None

    def of(self, parameter: Tensor) -> ParameterState:
        """Returns the state of a parameter, made empty where there is none, without waiting."""
        inner = self.peek(parameter)
        if inner is None:
            inner = ParameterState(
                self._homes,
                is_resident=parameter in self._resident,
                reserved=self._homes.reserved.setdefault(parameter, {}),
            )
            if isinstance(parameter, Tensor):
                inner.made_for = layout_of(parameter)
            dict.__setitem__(self, parameter, inner)
        return inner

    def fence(self) -> None:
        """Blocks the host until no copy home is under way."""
        for inner in dict.values(self):
            if isinstance(inner, ParameterState):
                inner.fence()

    def __missing__(self, key: Any) -> Any:
        return self.of(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not (isinstance(key, Tensor) and isinstance(value, dict)):
            dict.__setitem__(self, key, value)
            return
        inner = self.of(key)
        if value is inner:
            return
        values = dict(value)
        for stale in [k for k in dict.keys(inner) if k not in values]:
            inner.forget(stale)
        inner.update(values)
        inner.made_for = layout_of(key)

    # Whatever removes a parameter's state makes plans stale: their copies name homes that went.
    def __delitem__(self, key: Any) -> None:
        dict.__delitem__(self, key)
        self._homes.version += 1

    def pop(self, key: Any, *default: Any) -> Any:
        self._homes.version += 1
        return dict.pop(self, key, *default)

    def popitem(self) -> tuple[Any, Any]:
        self._homes.version += 1
        return dict.popitem(self)

    def clear(self) -> None:
        self._homes.version += 1
        dict.clear(self)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    # A copy is a plain mapping with the same inner dicts: homes have one owner.
    def copy(self) -> Any:
        return defaultdict(dict, dict(self))

    def __copy__(self) -> Any:
        return self.copy()

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> State:
        self.update(other)
        return self

    def __or__(self, other: Any) -> Any:
        return self.copy() | other if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return other | self.copy() if isinstance(other, dict) else NotImplemented

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        return copy.deepcopy(defaultdict(dict, dict(self)), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))
