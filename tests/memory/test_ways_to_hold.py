"""Every way in which Python code can keep a tensor is named."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from holding import NUM_ELEMENTS, Make, only

import residency

pytestmark = pytest.mark.sim_device(schedule="late")  # it asks the device for nothing but figures


kept_globally: Any = None


class Slotted:
    __slots__ = ("value",)


@dataclasses.dataclass
class Data:
    value: Any


class Pair(NamedTuple):
    left: Any
    right: Any


class Cache:
    entries: Any = None


class Weak:
    pass


def _slotted(tensor: Any) -> Slotted:
    thing = Slotted()
    thing.value = tensor
    return thing


def _cached_attribute(tensor: Any) -> Weak:
    thing = Weak()
    thing.__dict__["a name"] = tensor
    return thing


def _closure(tensor: Any) -> Any:
    def hook() -> Any:
        return tensor

    return hook


def _nested_closure(tensor: Any) -> Any:
    inside = {"w": [tensor]}
    return lambda: inside


def _default(tensor: Any) -> Any:
    def hook(other: int = 1, value: Any = tensor, *, key: Any = None) -> Any:
        return other, value, key

    return hook


def _keyword_default(tensor: Any) -> Any:
    def hook(*, value: Any = tensor) -> Any:
        return value

    return hook


def _generator(tensor: Any) -> Iterator[int]:
    def steps(kept: Any) -> Iterator[int]:
        yield 1
        del kept

    generator = steps([tensor])
    next(generator)
    return generator


def _coroutine(tensor: Any) -> Any:
    class Wait:
        def __await__(self) -> Iterator[None]:
            yield

    async def load(kept: Any) -> None:
        await Wait()
        del kept

    coroutine = load(tensor)
    coroutine.send(None)
    return coroutine


def _error(tensor: Any) -> BaseException:
    def fail(batch: Any) -> None:
        raise ValueError(len(batch))

    try:
        fail([tensor])
    except ValueError as error:
        kept: BaseException = error.with_traceback(error.__traceback__.tb_next)  # type: ignore
    del tensor
    return kept


def _cause(tensor: Any) -> BaseException:
    error = RuntimeError("outer")
    error.__cause__ = ValueError(tensor)
    return error


class Method:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def call(self) -> None:
        pass


def _weak_keys(tensor: Any) -> Any:
    return weakref.WeakKeyDictionary({Cache: tensor})


WAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dict": (lambda t: {"a": {1: t}}, "['a'][1]"),
    "key_tuple": (lambda t: {("a", 2): t}, "[('a', 2)]"),
    "long_key_tuple": (lambda t: {(1, 2, 3, 4, 5): t}, "[(1, 2, 3, 4, ...)]"),
    "default_dict": (lambda t: collections.defaultdict(list, {"a": [t]}), "['a'][0]"),
    "ordered_dict": (lambda t: collections.OrderedDict(a=t), "['a']"),
    "list": (lambda t: [None, [t]], "[1][0]"),
    "tuple": (lambda t: (t,), "[0]"),
    "named_tuple": (lambda t: Pair(1, [t]), ".right[0]"),
    "deque": (lambda t: collections.deque([0, t]), "[1]"),
    "set": (lambda t: {t}, " (in a set)"),
    "key": (lambda t: {t: 1}, " (a key)"),
    "instance": (Data, ".value"),
    "slots": (_slotted, ".value"),
    "attribute_dict": (_cached_attribute, ".a name"),
    "closure": (_closure, " closure 'tensor'"),
    "nested_closure": (_nested_closure, " closure 'inside' ['w'][0]"),
    "default": (_default, " default 'value'"),
    "keyword_default": (_keyword_default, " default 'value'"),
    "partial": (lambda t: functools.partial(print, 1, t), ".args[1]"),
    "partial_keyword": (lambda t: functools.partial(print, end=t), ".keywords['end']"),
    "bound_method": (lambda t: Method(t).call, ".__self__.tensor"),
    "generator": (_generator, " -> _generator.<locals>.steps() local 'kept' [0]"),
    "coroutine": (_coroutine, " -> _coroutine.<locals>.load() local 'kept'"),
    "exception": (_error, " traceback -> _error.<locals>.fail() local 'batch' [0]"),
    "cause": (_cause, ".__cause__.args[0]"),
    "subclass_attribute": (lambda t: [setattr(s := Stack(), "top", t), s][1], ".top"),
    "weak_keys": (_weak_keys, ".data[<ReferenceType>]"),
    "storage": (lambda t: t.untyped_storage(), ""),
    "gradient": (lambda t: _with_gradient(t), ".grad"),
}


class Stack(list[Any]):
    pass


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    small = torch.ones(NUM_ELEMENTS, requires_grad=True, device=tensor.device)
    small.grad = tensor
    return small


@pytest.mark.alone  # another test fills the device
def test_every_way_to_keep_a_tensor_is_named(make: Make) -> None:
    kept = {way: keep(make()) for way, (keep, _) in WAYS.items()}
    here = "test_every_way_to_keep_a_tensor_is_named() local 'kept'"
    wanted = {f"{here} [{way!r}]{trail}" for way, (_, trail) in WAYS.items()}
    wanted.add(f"{here} ['gradient']")  # the tensor that has the gradient
    assert {holder.path for holder in residency.holders()} == wanted
    kept["coroutine"].close()


@pytest.mark.whole
def test_globals_classes_and_context_variables_are_named(make: Make) -> None:
    global kept_globally
    module = __name__
    kept_globally = [make()]
    try:
        assert only().path == f"{module}.kept_globally[0]"
    finally:
        kept_globally = None
    Cache.entries = {"x": make()}
    try:
        assert only().path == f"{module}.Cache.entries['x']"
    finally:
        Cache.entries = None
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("batch")
    context = contextvars.copy_context()
    context.run(variable.set, make())
    assert context.run(only).path == "context variable 'batch'"


def test_a_reference_cycle_is_named_by_its_object(make: Make) -> None:
    gc.disable()
    try:
        thing = Data(make())
        thing.itself = thing  # type: ignore[attr-defined]
        del thing
        assert only().path == "reference cycle: Data.value"
    finally:
        gc.enable()
    gc.collect()


@pytest.mark.whole
def test_a_search_keeps_nothing_alive(make: Make) -> None:
    gc.disable()
    try:
        thing = Data(make())
        generator = _generator(make())
        references = [weakref.ref(thing), weakref.ref(thing.value)]
        assert len(residency.holders()) == 2
        del thing
        assert [reference() for reference in references] == [None, None]
        assert len(residency.holders()) == 1
        next(generator, None)  # it lets go of what it had
        del generator
        assert residency.holders(0) == []
    finally:
        gc.enable()
