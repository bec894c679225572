"""The restored state of a plain optimizer until it is first used: on the host, and then not.

A resumed run's first forward and backward, which compile and allocate for the first time, so have
the room that a fresh run's have. What a use is stands in ``_transfer/_waiting.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._checkpoint._restore._fill import Staging, fill, ring_bytes_of
from residency._checkpoint._restore._plan import target_of
from residency._checkpoint._sources._source import StoredTensor
from residency._dtensor import local_of, wrapped_like
from residency._errors import RefusedError
from residency._modes import callers_modes_off
from residency._transfer import (
    ELEMENT_WISE,
    Incoming,
    Waiting,
    can_wait,
    let_wait,
    state_stays,
    waiting_of,
)

# States that the element-wise classes of torch.optim make in the parameter's shape.
_LIKE_PARAMETER = {
    *("acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"),
    *("momentum_buffer", "prev", "square_avg", "step_size", "sum"),
}
_MASTER = "master_weight"
_BUCKETS = 4  # rings in a bucket: the ring turns round, and host memory goes as the bytes do


@dataclass(slots=True)
class PlainReception:
    """The place for the state of an optimizer that keeps it itself; see ``Reception``.

    Attributes:
        eager: Whether the state goes to the device at once.
        waiting: What is on the host and is needed on the device, by parameter and key.
        nested: The same of tensors within values that are none, such as lists.
    """

    optimizer: Optimizer
    states: Mapping[Tensor, Mapping[str, Incoming | None]]
    eager: bool
    staging_bytes: int
    targets: dict[tuple[Tensor, str], Tensor] = field(default_factory=dict)
    waiting: dict[tuple[Tensor, str], Tensor] = field(default_factory=dict)
    nested: dict[tuple[Tensor, str], list[Tensor]] = field(default_factory=dict)

    def finish(
        self, values: Mapping[tuple[Tensor, str], Any], by_other_key: Mapping[Any, Any]
    ) -> None:
        """Makes what was filled the optimizer's state; see ``Reception``."""
        with state_stays():
            state: Any = self.optimizer.state
        for stale in [key for key in state if key not in self.states]:
            del state[stale]
        for parameter, entries in self.states.items():
            found = {key: self.targets.get((parameter, key)) for key in entries}
            state[parameter] = {
                key: values[parameter, key] if value is None else value
                for key, value in found.items()
            }
        state.update(by_other_key)
        direct = [(parameter, key, None) for parameter, key in self.waiting]
        within = [(*entry, each) for entry, values in self.nested.items() for each in values]
        move = partial(_move, self.staging_bytes)
        let_wait(self.optimizer, [*direct, *within], move)


def receive_plain(
    optimizer: Optimizer,
    states: Mapping[Tensor, Mapping[str, Incoming | None]],
    *,
    eager: bool,
    staging_bytes: int,
) -> PlainReception:
    """Makes room for the state of an optimizer that keeps it itself.

    Args:
        optimizer: Is not changed.
        states: By parameter and key, in the saved order; None stands for what is no tensor.
        eager: Whether device memory is taken at once, and not by the first use; it is where the
            class could use its state without a read of ``optimizer.state``.
        staging_bytes: The ring of the first step's copies.

    Raises:
        RefusedError: A state has another shape than its parameter, or there are master weights.

    Memory:
        None for what fits the state there is; the host's for the rest, or the device's if eager.
    """
    eager = eager or not can_wait(optimizer)
    made = PlainReception(optimizer, states, eager, staging_bytes)
    with state_stays():
        state = optimizer.state
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    still_waiting = {id(each.tensor) for each in waiting_of(optimizer)}
    for parameter, entries in states.items():
        for key, incoming in entries.items():
            if incoming is None:
                continue
            _check(optimizer, parameter, key, incoming)
            there = dict.get(state, parameter, {}).get(key)
            is_waiting = id(there) in still_waiting  # of a restore before, without a step since
            on_device = is_waiting or _needs_device(
                optimizer, group_of[parameter], parameter, key, incoming, there
            )
            device = parameter.device if on_device else torch.device("cpu")
            place = device if eager else torch.device("cpu")
            home = place if is_waiting else device
            is_fit = _fits(there, parameter, incoming, home)
            target = there if is_fit else incoming.like(parameter, place)
            if on_device and local_of(target).is_cpu and (is_waiting or not is_fit):
                made.waiting[parameter, key] = target  # a parked parameter's, too
            made.targets[parameter, key] = target
    return made


def _check(optimizer: Optimizer, parameter: Tensor, key: str, incoming: Incoming) -> None:
    if key == _MASTER:
        raise RefusedError(
            "the saved optimizer has float32 master weights, which a plain one has no place for: "
            "it would go on from rounded parameters. Nothing was changed: offload it with "
            "master_weights=True before the restore."
        )
    is_like = key in _LIKE_PARAMETER and isinstance(optimizer, tuple(ELEMENT_WISE))
    if is_like and incoming.shape != tuple(parameter.shape):
        raise RefusedError(
            f"the saved state {key!r} has the shape {incoming.shape}, and its parameter's is "
            f"{tuple(parameter.shape)} here. Nothing was changed; restore into the "
            "model that was saved."
        )


def _needs_device(
    optimizer: Optimizer,
    group: Mapping[str, object],
    parameter: Tensor,
    key: str,
    incoming: Incoming,
    there: object,
) -> bool:
    """Says where a step needs a state.

    Where a scalar lives decides in which arithmetic it advances, so it goes where the class keeps
    it, not where torch's own loading puts it. Without a schema, it cannot ask ``needs_device``:
    ``tests/optim/test_where_states_live.py`` compares them.

    Source: ``_init_group`` of each class of torch.optim.
    """
    if isinstance(there, Tensor):
        return not there.is_cpu
    if incoming.shape:
        return True
    if group.get("capturable") or type(optimizer) is torch.optim.ASGD:
        return True
    if key == "step":
        return bool(group.get("fused"))
    # A scalar parameter's moments are scalars, too, and are never kept on the host.
    return not incoming.is_host or (parameter.dim() == 0 and key in _LIKE_PARAMETER)


def _fits(there: object, parameter: Tensor, incoming: Incoming, device: torch.device) -> bool:
    return (
        isinstance(there, Tensor)
        and there.device == device
        and there.dtype == incoming.dtype
        and tuple(there.shape) == incoming.shape
        and type(there) is type(incoming.like(parameter, torch.device("meta")))
    )


def _move(
    staging_bytes: int, waiting: list[Waiting], put: Callable[[Waiting, Tensor], None]
) -> None:
    """Brings waiting tensors to the device; see ``let_wait``."""
    num_bytes = sum(local_of(each.tensor).nbytes for each in waiting)
    devices = {each.parameter.device for each in waiting}
    ring = Staging(ring_bytes_of(num_bytes, staging_bytes), pin=True)
    waiting.reverse()
    try:
        for bucket in _buckets(waiting, _BUCKETS * staging_bytes):
            locals_ = [local_of(each.tensor) for each in bucket]
            with callers_modes_off():
                made = [
                    torch.empty_like(
                        local, device=each.parameter.device, memory_format=torch.preserve_format
                    )
                    for each, local in zip(bucket, locals_, strict=True)
                ]
            targets = [
                target_of(each.key, target, [_stored(each.key, local)])
                for each, target, local in zip(bucket, made, locals_, strict=True)
            ]
            fill(targets, checksums={}, staging_bytes=staging_bytes, ring=ring)
            for each, target in zip(bucket, made, strict=True):
                put(each, wrapped_like(target, each.tensor))
            del locals_, targets  # with the bucket goes the host's memory
            bucket.clear()
    finally:
        ring.release(devices)


def _buckets(waiting: list[Waiting], most_bytes: int) -> Iterator[list[Waiting]]:
    """Yields tensors from the end of a list, which then holds them no more."""
    while waiting:
        bucket: list[Waiting] = []
        num_bytes = 0
        while waiting and (not bucket or num_bytes < most_bytes):
            bucket.append(waiting.pop())
            num_bytes += local_of(bucket[-1].tensor).nbytes
        yield bucket


def _stored(name: str, local: Tensor) -> StoredTensor:
    shape = tuple(local.shape)
    return StoredTensor(name, local.dtype, shape, shape, (0,) * len(shape), tensor=local)
