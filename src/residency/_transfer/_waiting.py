"""State of an optimizer that waits on the host for its first use.

A use of a state reads ``optimizer.state``: a step does, compiled or not, ``copy.deepcopy`` and
``pickle`` do (by torch's own ``__getstate__``), ``state_dict``, a class in its ``train`` and
``eval``, and code that assigns a key or hands the mapping to another optimizer. That read brings
the state to its parameters' device, by where a tensor lies and not by which tensor it is.
Invariant, which ``tests/checkpoint/restore/test_waiting.py`` tries to break: no read of
``optimizer.state`` finds a state on the host whose parameter is on a device and that its class
keeps there.

[Note: no hook in the optimizer] A hook is lost in some copies, stays behind in others, and is
traced by a compiler. So a descriptor stands at ``torch.optim.Optimizer.state`` while anything
waits, which no copy takes along; ``vars(optimizer)["state"]`` is the mapping, as ever. The
library's own looks, which are to move nothing, are taken inside ``state_stays``.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import local_of
from residency._transfer._owner import owner_of
from residency._units import format_bytes

# What a class may override to make copies of itself without a read of `state`.
_COPYING = ("__copy__", "__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")
_READING = ("__getattribute__", *_COPYING)


class Waiting(NamedTuple):
    """A tensor on the host that its parameter's device needs.

    Attributes:
        key: Of the value in the parameter's state that is the tensor, or contains it.
    """

    parameter: Tensor
    key: str
    tensor: Tensor


_Put = Callable[[Waiting, Tensor], None]
_Move = Callable[[list[Waiting], _Put], None]


class _WaitingValue(NamedTuple):
    """A value that is to go to its parameter's device; of a container, one tensor within."""

    parameter: weakref.ref[Tensor]
    key: str
    nested: weakref.ref[Tensor] | None

    def found(self, state: dict[Any, Any]) -> Waiting | None:
        """Returns what of this entry lies on the host."""
        parameter = self.parameter()
        values = None if parameter is None else dict.get(state, parameter)
        value = values.get(self.key) if isinstance(values, dict) else None
        if self.nested is not None:
            nested = self.nested()
            value = next((each for each in tensors_in(value) if each is nested), None)
        if parameter is None or not isinstance(value, Tensor) or not local_of(value).is_cpu:
            return None
        return Waiting(parameter, self.key, value)


class _WaitingState(NamedTuple):
    entries: list[_WaitingValue]
    move: _Move


_records: weakref.WeakKeyDictionary[Optimizer, _WaitingState] = weakref.WeakKeyDictionary()
_away: list[Callable[[Tensor], bool]] = []
_any_away: list[Callable[[], bool]] = []
_lock = threading.RLock()  # reentrant: whatever Python collects may read a state
_looks = threading.local()


class _StateOfWaiting:
    """The descriptor at ``Optimizer.state`` while anything waits."""

    def __get__(self, optimizer: Optimizer | None, owner: type | None = None) -> Any:
        return self if optimizer is None else _read(optimizer)

    def __set__(self, optimizer: Optimizer, value: object) -> None:
        optimizer.__dict__["state"] = value

    def __delete__(self, optimizer: Optimizer) -> None:
        del optimizer.__dict__["state"]


def can_wait(optimizer: Optimizer) -> bool:
    """Returns whether every use of an optimizer's state is a read of its ``state``.

    A class that keeps ``state`` elsewhere, or copies itself in a way of its own, is asked nothing.
    """
    kind = type(optimizer)
    is_torchs = all(getattr(kind, n, None) is getattr(Optimizer, n, None) for n in _READING)
    at_class = inspect.getattr_static(kind, "state", None)
    is_free = at_class is None or isinstance(at_class, _StateOfWaiting)
    return is_torchs and is_free and "state" in vars(optimizer)


def let_wait(
    optimizer: Optimizer, entries: Iterable[tuple[Tensor, str, Tensor | None]], move: _Move
) -> None:
    """Lets values of an optimizer's state wait on the host for the first use; no others wait then.

    Args:
        optimizer: One that ``can_wait``.
        entries: By parameter and key; of a value that is a container, each tensor within it that
            waits, else None.
        move: Brings tensors to their parameters' devices; it takes them out of the list that it is
            given, and puts each by the function that it is given. What it has put when an exception
            ends it stays so, and the rest waits on.
    """
    made = [
        _WaitingValue(weakref.ref(p), key, None if nested is None else weakref.ref(nested))
        for p, key, nested in entries
    ]
    with _lock:
        _records.pop(optimizer, None)
        if made:
            _records[optimizer] = _WaitingState(made, move)
        _put_or_take()


def register_away(is_away: Callable[[Tensor], bool], is_any: Callable[[], bool]) -> None:
    """Makes ``is_away`` say which parameters are on the host for a while only: what waits for one
    waits until it is back. ``is_any`` says whether any is.
    """
    _away[:] = [is_away]
    _any_away[:] = [is_any]


def is_any_away() -> bool:
    """Returns whether ``is_away`` may be true of anything."""
    return any(says() for says in _any_away)


def is_away(parameter: Tensor) -> bool:
    """Returns whether a parameter is on the host for a while only."""
    return local_of(parameter).is_cpu and any(says(parameter) for says in _away)


def waiting_of(optimizer: Optimizer) -> list[Waiting]:
    """Returns what of an optimizer's state waits on the host."""
    record = _records.get(optimizer)
    state = vars(optimizer).get("state", {})
    found = [] if record is None else [entry.found(state) for entry in record.entries]
    return [each for each in found if each is not None]


@contextmanager
def state_stays() -> Iterator[None]:
    """Leaves what waits where it is, whatever this thread reads inside. Also a decorator."""
    before = getattr(_looks, "depth", 0)
    _looks.depth = before + 1
    try:
        yield
    finally:
        _looks.depth = before


def is_looked_at() -> bool:
    """Returns whether this thread is inside ``state_stays``."""
    return bool(getattr(_looks, "depth", 0))


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yields the tensors of a state's value, which may be one or a container of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple | deque):
        for each in value:
            yield from tensors_in(each)


def replaced(value: object, others: Mapping[int, Tensor]) -> Any:
    """Returns a value with other tensors in the place of some, in the containers that it has.

    Args:
        value: A state's value.
        others: What takes a tensor's place, by that tensor's ``id``.
    """
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = replaced(value[key], others)
    elif isinstance(value, list | deque):
        for index in range(len(value)):
            value[index] = replaced(value[index], others)
    elif type(value) is tuple:
        return tuple(replaced(each, others) for each in value)
    return value


@torch._disable_dynamo  # type: ignore[attr-defined]  # what torch.optim itself uses
def _read(optimizer: Optimizer) -> Any:
    try:
        state: dict[Any, Any] = optimizer.__dict__["state"]
    except KeyError:
        text = f"{type(optimizer).__name__!r} object has no attribute 'state'"
        raise AttributeError(text, name="state", obj=optimizer) from None
    if not is_looked_at():
        with _lock:
            # Another optimizer may have been given the same mapping before it was filled.
            for waiting in list(_records):
                mapping: Any = waiting.__dict__.get("state")
                if mapping is state:
                    _bring(waiting, state)
            _put_or_take()
    return state


def _bring(optimizer: Optimizer, state: dict[Any, Any]) -> None:
    """Brings what waits to the device; what is of a parked parameter waits on."""
    record = _records[optimizer]
    found = waiting_of(optimizer)
    if owner_of(optimizer) is not None:  # it was offloaded since: the state has its home
        found = []
    # Of a sharded parameter: its own device is that of the mesh, wherever its shard is.
    going = [each for each in found if not local_of(each.parameter).is_cpu]
    staying = {(id(each.parameter), each.key) for each in found if is_away(each.parameter)}
    num_bytes = sum(local_of(each.tensor).nbytes for each in going)
    if going:
        found.clear()  # the move lets host memory go as it goes on
        try:
            record.move(going, partial(_put, state))
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"{format_bytes(num_bytes)} of restored state of this {type(optimizer).__name__} "
                "came to the device at their first use. The rest of it is whole on the host: "
                "make room and go on, or restore with eager=True, which takes the room at once."
            )
            raise
    record.entries[:] = [
        entry for entry in record.entries if (id(entry.parameter()), entry.key) in staying
    ]
    if not record.entries:
        _records.pop(optimizer, None)


def _put(state: dict[Any, Any], waiting: Waiting, value: Tensor) -> None:
    values = state[waiting.parameter]
    values[waiting.key] = replaced(values[waiting.key], {id(waiting.tensor): value})


def _put_or_take() -> None:
    """Puts the descriptor where reads come by, or takes it away where nothing waits."""
    kind: Any = Optimizer
    stands = isinstance(vars(kind).get("state"), _StateOfWaiting)
    if len(_records) and not stands:
        kind.state = _StateOfWaiting()
    elif stands and not len(_records):
        del kind.state
