"""The writers that pass the gate without knowing of it: every optimizer's step, and what a caller
names.

A step of any ``torch.optim.Optimizer`` waits, on the device, for the copies of its own parameters
and states that are still under way; one with a closure waits after the closure's forward and
backward. Code that writes otherwise says so with ``mutating``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from residency._dtensor import local_of
from residency._errors import InvalidArgumentError, RefusedError
from residency._registries import WeakRegistry
from residency._transfer._gate import gates
from residency._transfer._lending import lending
from residency._transfer._owner import owner_of
from residency._transfer._waiting import state_stays

_stepped: WeakRegistry[Optimizer] = WeakRegistry()


def before_write(tensors: Iterable[Tensor]) -> None:
    """Orders a write behind the copies that still read these tensors.

    Args:
        tensors: On a device, the current stream waits; of host memory that is lent to a save, the
            host does, until it is given back.

    Raises:
        RefusedError: A snapshot has borrowed one of them, for as long as it is kept.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(local_of(tensor))
    for device, each in by_device.items():
        if device.type == "cpu":
            if any(map(lending.is_lasting, each)):
                raise RefusedError(
                    "A snapshot has borrowed this state of an offloaded optimizer, for as long as "
                    "it likes. Nothing was written; assign a new tensor to the state "
                    "(optimizer.state[p][key] = ...), which leaves the snapshot whole."
                )
            lending.wait_for(each)  # a save still reads what is to be written
        elif device in gates:
            gates[device].before_write(each)


@contextmanager
def mutating(*tensors: Tensor) -> Iterator[None]:
    """Names tensors that the body writes without an optimizer's step: a moving average, a kernel of
    one's own, the replay of a captured graph, ``load_state_dict``.

    A snapshot reads a tensor on a stream of its own while training goes on. Code in this body runs
    after such reads: the current stream waits for them. The host does not wait, except for state of
    an offloaded optimizer that a save reads. A snapshot or a save that the body itself makes is not
    covered: begin another block after it.

    Args:
        tensors: Parameters, buffers or states that the body writes, each by itself.

    Raises:
        InvalidArgumentError: One of them is no tensor.
        RefusedError: A snapshot keeps the bytes of one of them: assign to the state instead.
    """
    for each in tensors:
        if not isinstance(each, Tensor):
            raise InvalidArgumentError(
                f"mutating takes tensors, each by itself, and this is a {type(each).__name__}. "
                "Write mutating(*model.parameters()), or mutating(*tensors)."
            )
    before_write(tensors)
    yield


@functools.cache
def watch_optimizers() -> None:
    """Makes the steps of all optimizers pass the gate, from the first call on."""
    register_optimizer_step_pre_hook(_before_step)


def written_by_steps() -> Iterator[Tensor]:
    """Yields the tensors that steps write behind the gate, of the optimizers that have stepped
    since ``watch_optimizers``; states that live on the host are not among them.
    """
    for optimizer in _stepped:
        if owner_of(optimizer) is None:
            yield from _written_by(optimizer)
        else:  # asking for its states would wait for them
            yield from (p for group in optimizer.param_groups for p in group["params"])


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    _stepped.add(optimizer)
    if not any(gates.values()) or owner_of(optimizer) is not None:
        return None  # an owner's step passes the gate part by part
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        before_write(_written_by(optimizer))
        return None
    waiting = _waiting_after(closure, optimizer)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": waiting}
    return (optimizer, waiting, *args[2:]), kwargs


def _waiting_after(closure: Callable[[], object], optimizer: Optimizer) -> Callable[[], object]:
    @functools.wraps(closure)
    def evaluate() -> object:
        loss = closure()
        before_write(_written_by(optimizer))
        return loss

    return evaluate


def _written_by(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    with state_stays():  # what waits on the host is not behind the gate
        state = optimizer.state
    for values in state.values():
        if isinstance(values, dict):
            yield from (v for v in values.values() if isinstance(v, Tensor) and not v.is_cpu)
