"""The mappings that users see as the state of an offloaded optimizer, over the homes on the host.

``optimizer.state`` stays a ``defaultdict`` of dicts. Whatever is assigned to a key is copied to its
home on the host, and every read first waits for copies home that are still under way. Invariant,
which ``tests/optim/test_state.py`` tries to break: a tensor that a caller can reach through these
mappings has its final bytes.

[Note: who may reach a home] Inside the package, ``dict.get`` and its like bypass the wait on
purpose: the step only hands tensors on to streams that wait for one another on the device. They
find the library's own tensors, not those that callers are shown.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from residency._dtensor import local_of, moved, write_count
from residency._errors import RefusedError
from residency._optim._homes import Home, Homes
from residency._optim._places import Residents, StatePlace, needs_device
from residency._transfer import is_away

if TYPE_CHECKING:  # in whose eyes a dict is a MutableMapping, and has its methods
    _MutableDict = dict[str, Any]
else:

    class _MutableDict(MutableMapping, dict):
        __slots__ = ()


class ParameterState(_MutableDict):
    """The state of one parameter: a dict whose device tensors live at home.

    Attributes:
        homes: Those of the optimizer.
        homes_by_key: The homes of the values that live on the host between steps.
        written: The event after the newest copy home of these values.
        made_for: The layout of the parameter that the values belong to.
        is_bound_again: Whether a caller has put it under another parameter, as its state.
        reserved: Homes for values that are not there yet.
        template: Versions of the zeros that ``prime`` put here, by key, until a value is placed.
    """

    homes: Homes
    _owner: int
    _residents: Residents
    homes_by_key: dict[str, Home]
    is_bound_again: bool
    made_for: Hashable
    reserved: dict[str, Home]
    template: dict[str, int] | None
    written: torch.Event | None
    __slots__ = (
        "__weakref__",
        "_owner",
        "_residents",
        "homes",
        "homes_by_key",
        "is_bound_again",
        "made_for",
        "reserved",
        "template",
        "written",
    )

    # Code that goes through collections calls a mapping's type to make a copy: a plain dict.
    def __new__(  # type: ignore[misc]  # it makes none of the class, which `over` does
        cls, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        return dict(*args, **kwargs)

    @classmethod
    def over(
        cls, homes: Homes, residents: Residents, owner: int, reserved: dict[str, Home]
    ) -> ParameterState:
        """Makes the empty state of the parameter with the ``id`` ``owner``."""
        made: ParameterState = dict.__new__(cls)
        made.homes = homes
        made._residents = residents
        made._owner = owner
        made.homes_by_key = {}
        made.is_bound_again = False
        made.written = None
        made.made_for = None
        made.reserved = reserved
        made.template = None
        return made

    @property
    def is_resident(self) -> bool:
        """Whether the values stay on the device, instead of in homes."""
        return self._residents.has(self._owner)

    def leave_residents(self) -> None:
        """Gives up the right to stay on the device: the optimizer has this state no more."""
        self._residents.revoke(self._owner)
        self.homes.version += 1

    def check_layout(self, now: Hashable) -> None:
        """Takes note of the parameter's layout, for which values are made from now on.

        Raises:
            RefusedError: There are values, which were made for another layout.
        """
        if self and self.made_for not in (None, now):
            raise RefusedError(
                f"a parameter has the shape, dtype and shard {now} now, and its state was made for "
                f"{self.made_for}. Nothing was stepped: put the parameter's data back, or delete "
                "its entry in optimizer.state, or load a state for it."
            )
        self.made_for = now

    def is_template(self) -> bool:
        """Returns whether the values are still the zeros that ``prime`` put here.

        A load may write into them in place (``dcp.load`` does), with or without a new version.
        """
        found = {k: local_of(v) for k, v in dict.items(self) if isinstance(v, Tensor)}
        if any(map(self.homes.is_written, self.homes_by_key.values())):
            return False
        return self.template is not None and all(
            key in found and write_count(found[key]) == version and not found[key].count_nonzero()
            for key, version in self.template.items()
        )

    def forget_template(self) -> None:
        """Makes a primed state what it was before, unless a load has written into it."""
        if self.is_template():
            homes = dict(self.homes_by_key)
            self.clear()
            self.reserved.update(homes)
            self.homes.version += 1
        self.template = None

    def fence(self) -> None:
        """Blocks the host until the values are home."""
        self.homes.bring_home()
        if self.written is not None:
            self.written.synchronize()  # the caller reads homes, or writes into them
            self.written = None

    def require_in_place(self) -> None:
        """Requires that callers have left the tensors that they were shown where they were.

        Raises:
            RefusedError: One was put over other memory.
        """
        self.homes.require_in_place(self.homes_by_key)

    def place(self, key: str, value: Any, *, is_streamed: bool = False) -> None:
        """Puts a value where it belongs; the entry shares its bytes with no other.

        Args:
            key: The state's name.
            value: A tensor is copied; anything else is kept as it is.
            is_streamed: Whether it has a home, which is known already.
        """
        self.fence()
        self.template = None
        if isinstance(value, Tensor):
            place = StatePlace.HOME if is_streamed else self._place_of(key, value)
            self.put(key, value, place, copy=value is not dict.get(self, key))
        else:
            self.put_as_is(key, value)

    def put(self, key: str, value: Tensor, place: StatePlace, *, copy: bool) -> None:
        """Puts a tensor into its place; one that is there without a home is copied if asked."""
        if place is StatePlace.HOME:
            self.settle(key, self.homes.fill(self.home_for(key), value))
            return
        device = torch.device("cpu") if place is StatePlace.HOST else self.homes.device
        self.put_as_is(key, moved(value, device, copy=copy))

    def home_for(self, key: str) -> Home | None:
        """Returns the home that a value has, or that is reserved for it."""
        return self.homes_by_key.get(key) or self.reserved.get(key)

    def move_to(self, owner: int, reserved: dict[str, Home]) -> None:
        """Becomes the state of the parameter with this ``id``; what stayed on the device streams
        from now on, as the budget was for another.
        """
        self.leave_device()
        self._owner, self.reserved = owner, reserved
        self.is_bound_again = True

    def _place_of(self, key: str, value: Tensor) -> StatePlace:
        """Returns the place of a value that is assigned; without room for one more on the device,
        all that stay there go home.
        """
        if not (self.homes.has(value) or needs_device(key, value, self.seen(key))):
            return StatePlace.HOST
        if self.is_resident:
            others = [each for name, each in self.staying().items() if name != key]
            if self._residents.allow(self._owner, [*others, value]):
                return StatePlace.DEVICE
            self.leave_device()
        return StatePlace.HOME

    def staying(self) -> dict[str, Tensor]:
        """Returns the values that stay on the device; those that are parked come back to it."""
        return {
            key: value
            for key, value in dict.items(self)
            if isinstance(value, Tensor) and key not in self.homes_by_key
            if not value.is_cpu or is_away(value)
        }

    def leave_device(self) -> None:
        """Sends the values that stay on the device home; from now on they stream."""
        leaving = self.staying()
        homes = [self.homes.fill(self.home_for(key), value) for key, value in leaving.items()]
        self.leave_residents()
        for key, home in zip(leaving, homes, strict=True):
            self.settle(key, home)

    def settle(self, key: str, home: Home) -> None:
        """Makes ``home`` the place of ``key``."""
        self.reserved.pop(key, None)
        before = self.homes_by_key.get(key)
        if before is not home:
            self.homes.enter(home)
            if before is not None:
                self.homes.leave(before)
        self.homes_by_key[key] = home
        dict.__setitem__(self, key, home.value)

    def put_as_is(self, key: str, value: Any) -> None:
        """Keeps a value as it is, without a home."""
        self._leave_home(key)
        dict.__setitem__(self, key, value)

    def forget(self, key: str) -> None:
        """Removes a key without waiting."""
        self._leave_home(key)
        dict.pop(self, key, None)

    def _leave_home(self, key: str) -> None:
        home = self.homes_by_key.pop(key, None)
        if home is not None:
            self.homes.leave(home)

    def reorder(self, keys: list[str]) -> None:
        """Puts the keys into the order in which the optimizer makes them; cuts make homes first."""
        if list(dict.keys(self)) != keys:
            values = [dict.__getitem__(self, key) for key in keys]
            dict.clear(self)
            dict.update(self, zip(keys, values, strict=True))

    def seen(self, key: str) -> tuple[int, bool] | None:
        """Returns a tensor's dimensions, and whether steps see it on the device."""
        value = dict.get(self, key)
        if not isinstance(value, Tensor):
            return None
        return value.dim(), key in self.homes_by_key or not value.is_cpu

    def __setitem__(self, key: str, value: object) -> None:
        self.place(key, value)

    def __getitem__(self, key: str) -> Any:
        self.fence()
        self.require_in_place()
        return self._shown(key, dict.__getitem__(self, key))

    def _shown(self, key: str, value: object) -> object:
        """Returns what callers see of a value."""
        home = self.homes_by_key.get(key)
        if home is None:
            return value
        apart = self.homes.apart_from_snapshots(home)
        if apart is not home:
            self.settle(key, apart)
        return self.homes.show(apart)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self.fence()
        self.forget(key)

    def __len__(self) -> int:
        return dict.__len__(self)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key)

    # Overriding this also takes `dict(state)` and `{**state}` off CPython's path around
    # `__getitem__`.
    def __iter__(self) -> Iterator[str]:
        self.fence()
        return dict.__iter__(self)

    def __reversed__(self) -> Iterator[str]:
        self.fence()
        return dict.__reversed__(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def popitem(self) -> tuple[str, Any]:
        if not self:
            raise KeyError("popitem(): dictionary is empty")  # in dict's words
        key = next(dict.__reversed__(self))  # a MutableMapping takes the first
        return key, self.pop(key)

    def clear(self) -> None:
        self.fence()
        for key in list(dict.keys(self)):
            self.forget(key)

    # A MutableMapping returns the default, which is not the state.
    def setdefault(self, key: str, default: object = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: object) -> ParameterState:  # type: ignore[override]  # as update
        values: Any = other
        self.update(values)
        return self

    # A plain dict with the values that the homes have now.
    def __or__(self, other: object) -> Any:
        return dict(self) | other if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: object) -> Any:
        return other | dict(self) if isinstance(other, dict) else NotImplemented

    def copy(self) -> dict[str, Any]:
        return dict(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    # `torch.load` makes no `dict` by its name, and one of these.
    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(dict(self).items())
