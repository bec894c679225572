"""The forward and backward passes through units: when their bytes are needed, and by which tensors.

In a call of its module, and from the gradient of the call's output until the backward pass ends, a
unit's parameters are views of the device's bytes; at all other times, of the host's. What autograd
saves of them in the call is a handle, and unpacking it brings the unit back. Invariant, which
``tests/frozen/test_parity.py`` tries to break: losses, gradients and outputs have the bits of a run
with everything on the device.

[Note: two ways into a unit] Neither is enough. A function that keeps a weight as an attribute of
its context unpacks nothing (bitsandbytes' 4-bit product), and transformers recomputes without a
call of the module: for these a hook of the output begins the unit. A unit within another one's
call, or a graph that is entered by a tensor that was no output, has no such hook in time: for these
there are the handles.

[Note: what torch checks] Torch compares version counters of what it saved itself, and leaves what
hooks saved to the hooks. So unpacking compares them here, with torch's own words.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from residency import _device
from residency._errors import RefusedError
from residency._frozen._homes import FrozenUnit
from residency._frozen._slots import Pass, UnitSlots
from residency._module_calls import Call
from residency._storages import storage_key

# The hooks of saved tensors, without torch's context manager: an interrupt would leave it half way.
_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - the stubs do not have it
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _OfUnit(NamedTuple):
    """A tensor over a unit's bytes, as autograd has saved it."""

    unit: FrozenUnit
    tensor: Tensor
    num_writes: int


class _Other(NamedTuple):
    """A tensor that is no unit's, as autograd has saved it without hooks of others."""

    tensor: Tensor
    num_writes: int


class _Begun:
    """A call of a unit's module that is not over."""

    __slots__ = ("is_left", "pack", "thread", "unit")

    def __init__(self, unit: FrozenUnit) -> None:
        self.unit = unit
        self.thread = threading.get_ident()
        self.pack: Callable[[Tensor], Any] | None = None
        self.is_left = False


class UnitPasses:
    """The uses of one model's units.

    Attributes:
        is_over: Whether the streaming has been stopped.
    """

    def __init__(self, units: list[FrozenUnit], slots: UnitSlots) -> None:
        self.is_over = False
        self._units = units
        self._slots = slots
        self._by_storage = {storage_key(unit.memory): unit for unit in units}
        self._begun: list[_Begun] = []
        self._tasks: set[int] = set()

    def is_under_way(self) -> bool:
        """Returns whether a unit's module is called, or a backward pass is within a unit."""
        self._finish_failed()
        return bool(self._begun or self._tasks)

    def call(self, unit: FrozenUnit, call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a unit's module with its bytes on the device."""
        begun = _Begun(unit)
        around = tuple(each.unit for each in self._begun if each.unit is not unit)
        try:
            try:
                self._enter(begun, around)
                if around:
                    self._watch((args, kwargs), around[-1], around[:-1])
                output = call(module, *args, **kwargs)
            finally:
                self._leave(begun)
        finally:
            self._leave(begun)  # an interrupt may have come within, or before, the first
        if unit.lost_write:
            self._refuse_misplaced(unit)
        self._watch(output, unit, around)
        return output

    def _finish_failed(self) -> None:
        """Waits until autograd's thread lets go of a backward pass that failed, which ends it."""
        if self._tasks and not _is_in_backward():
            _device.finish_backward(self._slots.device)

    # ---------------------------------------------------------------------------------- the module

    def _enter(self, begun: _Begun, around: tuple[FrozenUnit, ...]) -> None:
        unit = begun.unit
        if self._begun and self._begun[0].thread != begun.thread:
            raise RefusedError(
                f"{unit.name} was called in a second thread while {self._begun[0].unit.name} runs "
                "in another one. Streamed parameters serve one pass at a time: call "
                "stream.stop(), or use the model in one thread."
            )
        self._finish_failed()
        self._refuse_misplaced(unit)
        # There are no public names (torch 2.11 to 2.13) for: whether hooks may be set,
        has_hooks: bool = _autograd._saved_tensors_hooks_is_enabled()
        if torch.is_grad_enabled() and not has_hooks:
            raise RefusedError(
                f"{unit.name} was called while hooks of saved tensors are disabled, as in "
                "torch.func, and the tensors that autograd saves could not come back: call "
                "stream.stop()."
            )
        self._slots.bring(unit, _pass_of_now(), around)
        self._begun.append(begun)
        unit.calls.add(begun)
        unit.point_here()
        if has_hooks:
            # which are set,
            outer = _autograd._top_saved_tensors_default_hooks(True)
            begun.pack = partial(self._pack, outer)
            # and to set them without a context manager, which an interrupt would leave half way.
            _autograd._push_saved_tensors_default_hooks(begun.pack, self._unpack)

    def _leave(self, begun: _Begun) -> None:
        if begun.is_left:
            return
        unit = begun.unit
        if begun.pack is not None:
            # An interrupt may have come before they were set. As above.
            top = _autograd._top_saved_tensors_default_hooks(True)
            if top is not None and top[0] is begun.pack:
                _autograd._pop_saved_tensors_default_hooks()  # as above
        self._begun = [each for each in self._begun if each is not begun]
        unit.leave(unit.calls, begun)
        begun.is_left = True

    # ------------------------------------------------------------------------------------- autograd

    def _watch(self, value: Any, unit: FrozenUnit, around: tuple[FrozenUnit, ...]) -> None:
        """Begins a unit when the gradient of a tensor in an output has come."""
        for tensor in _tensors_in(value):
            self._refuse_view(unit, tensor)
            if tensor.grad_fn is not None and torch.is_grad_enabled():
                add: Any = tensor.register_hook
                add(partial(self._begin, unit, around))

    def _begin(self, unit: FrozenUnit, around: tuple[FrozenUnit, ...], gradient: Tensor) -> None:
        """Begins the backward pass through a unit; a recomputation in it calls no module."""
        self._refuse_graph_of_gradients(unit)
        self._refuse_if_over(unit)
        self._slots.bring(unit, Pass.BACKWARD, around)
        task = torch._C._current_graph_task_id()  # there is no public name (2.11 to 2.13)
        if task not in self._tasks:
            self._tasks.add(task)
            # torch's own FSDP takes it (2.11 to 2.13), and there is no public way.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(_End(self, task))
        for each in (unit, *around):
            each.tasks.add(task)
            if each.flight is not None:
                each.point_here()

    def end(self, task: int) -> None:
        """Ends a backward pass, or what is left of one that failed; again without effect."""
        self._tasks.discard(task)
        for unit in self._units:
            if task in unit.tasks:
                unit.leave(unit.tasks, task)

    def _pack(self, outer: _Hooks | None, tensor: Tensor) -> Any:
        """Returns what autograd keeps in the place of a tensor."""
        if tensor.layout is torch.strided and tensor.device == self._slots.device:
            unit = self._by_storage.get(storage_key(tensor))
            if unit is not None:
                return _OfUnit(unit, tensor.detach(), _num_writes(tensor))
        if outer is not None:
            return outer[1], outer[0](tensor)
        # Not the tensor: an output of the node would keep the node, and so itself.
        return _Other(tensor.detach(), _num_writes(tensor))

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _OfUnit):
            self._refuse_if_over(packed.unit)
            if _is_in_backward():  # and not in a look at a node by its attributes
                self._refuse_graph_of_gradients(packed.unit)
            self._slots.bring_back(packed.unit)
        elif not isinstance(packed, _Other):
            unpack, value = packed
            return cast("Tensor", unpack(value))
        saved: _OfUnit | _Other = packed
        if _num_writes(saved.tensor) != saved.num_writes:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(saved.tensor.shape)} is at version "
                f"{_num_writes(saved.tensor)}; expected version {saved.num_writes} instead."
            )
        return saved.tensor

    # ------------------------------------------------------------------------------------- refusals

    def _refuse_misplaced(self, unit: FrozenUnit) -> None:
        if unit.lost_write:
            raise RefusedError(
                f"a frozen parameter of {unit.name} was written within a pass. The host's bytes do "
                "not have that write, and later passes would not see it. Leave this module out of "
                "units=[...], or make the parameter a buffer, which stays on the device."
            )
        if (why := unit.misplaced()) is not None:
            raise RefusedError(
                f"{why} since its frozen parameters stream from the host. Call stream.stop() "
                "before such a change, and residency.stream_frozen(model) after it."
            )

    def _refuse_view(self, unit: FrozenUnit, tensor: Tensor) -> None:
        """Refuses an output over bytes that leave the device with the call."""
        is_here = tensor.layout is torch.strided and tensor.device == self._slots.device
        if is_here and not unit.calls and self._by_storage.get(storage_key(tensor)) is unit:
            raise RefusedError(
                f"{unit.name} returned a view of its own frozen parameters, whose bytes leave the "
                "device with the call. Return a copy, as clone() makes one, or leave this module "
                "out of units=[...]."
            )

    def _refuse_graph_of_gradients(self, unit: FrozenUnit) -> None:
        if torch.is_grad_enabled():
            raise RefusedError(
                f"a backward pass with create_graph=True came to {unit.name}. The graph of the "
                "gradients would keep its frozen parameters, which leave the device: call "
                "stream.stop() before a double backward."
            )

    def _refuse_if_over(self, unit: FrozenUnit) -> None:
        if self.is_over:
            raise RefusedError(
                f"a backward pass came to {unit.name}, and its forward pass was made before "
                "stream.stop(): the bytes on the device are gone. Make the forward pass anew."
            )


class _End:
    """A callback of torch's at the end of a backward pass; one that fails only drops it."""

    _is_made = False  # of one that an interrupt left half made, which ends nothing

    def __init__(self, passes: UnitPasses, task: int) -> None:
        self._passes = weakref.ref(passes)
        self._task = task
        self._is_made = True

    def __call__(self) -> None:
        if self._is_made and (passes := self._passes()) is not None:
            passes.end(self._task)

    def __del__(self) -> None:
        self()


def _is_in_backward() -> bool:
    # There is no public name (2.11 to 2.13).
    return torch._C._current_graph_task_id() != -1


def _pass_of_now() -> Pass:
    if _is_in_backward():
        return Pass.BACKWARD
    return Pass.TRAINING if torch.is_grad_enabled() else Pass.EVALUATION


def _num_writes(tensor: Tensor) -> int:
    return tensor._version  # [Note: what torch checks]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in an output, in whatever containers modules return."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name, None))
