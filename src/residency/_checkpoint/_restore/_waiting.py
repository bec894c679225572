"""The restored state of a plain optimizer until its first step: on the host, and then not.

A resumed run's first forward and backward, which compile and allocate for the first time, so have
the room that a fresh run's have. Invariant: ``optimizer.state`` holds ordinary tensors at every
moment, and the first step finds each where the step needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._checkpoint._restore._fill import Staging, fill
from residency._checkpoint._restore._plan import Assignment, target_of
from residency._checkpoint._sources._stored import Stored
from residency._errors import RefusedError
from residency._transfer import Incoming, local_of, owner_of, wrapped_like

# States that the element-wise classes of torch.optim make in the parameter's shape.
_LIKE_PARAMETER = {
    *("acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"),
    *("momentum_buffer", "prev", "square_avg", "step_size", "sum"),
}
_MASTER = "master_weight"
_BUCKETS = 4  # rings in a bucket: the ring turns round, and host memory goes as the bytes do


@dataclass(slots=True)
class PlainReception:
    """Is the place for the state of an optimizer that keeps it itself; see ``Reception``.

    Attributes:
        waiting: What is on the host and is needed on the device, by parameter and key.
    """

    optimizer: Optimizer
    states: Mapping[Tensor, Mapping[str, Incoming | None]]
    staging_bytes: int
    targets: dict[tuple[Tensor, str], Tensor] = field(default_factory=dict)
    waiting: dict[tuple[Tensor, str], Tensor] = field(default_factory=dict)

    def finish(self, values: Mapping[tuple[Tensor, str], Any], loose: Mapping[Any, Any]) -> None:
        """Makes what was filled the optimizer's state; see ``Reception``."""
        state: Any = self.optimizer.state
        for stale in [key for key in state if key not in self.states]:
            del state[stale]
        for parameter, entries in self.states.items():
            found = {key: self.targets.get((parameter, key)) for key in entries}
            state[parameter] = {
                key: values[parameter, key] if value is None else value
                for key, value in found.items()
            }
        state.update(loose)
        if self.waiting:
            _move_at_first_step(self.optimizer, self.waiting, self.staging_bytes)


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
        eager: Whether device memory is taken at once, and not by the first step.
        staging_bytes: The ring of the first step's copies.

    Raises:
        RefusedError: A state has another shape than its parameter, or there are master weights.

    Memory:
        None for what fits the state there is; the host's for the rest, or the device's if eager.
    """
    made = PlainReception(optimizer, states, staging_bytes)
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for parameter, entries in states.items():
        for key, incoming in entries.items():
            if incoming is None:
                continue
            _check(parameter, key, incoming)
            there = dict.get(optimizer.state, parameter, {}).get(key)
            on_device = _needs_device(
                optimizer, group_of[parameter], parameter, key, incoming, there
            )
            device = parameter.device if on_device else torch.device("cpu")
            target = there if _fits(there, parameter, incoming, device) else None
            if target is None:
                place = device if eager else torch.device("cpu")
                target = _empty(parameter, incoming, place)
                if on_device and place.type == "cpu":  # a parked parameter's too
                    made.waiting[parameter, key] = target
            made.targets[parameter, key] = target
    return made


def _check(parameter: Tensor, key: str, incoming: Incoming) -> None:
    if key == _MASTER:
        raise RefusedError(
            "the saved optimizer has float32 master weights, which a plain one has no place for: "
            "it would go on from rounded parameters. Nothing was changed: offload it with "
            "master_weights=True before the restore."
        )
    if key in _LIKE_PARAMETER and incoming.shape != tuple(parameter.shape):
        raise RefusedError(
            f"the saved state {key!r} has the shape {incoming.shape}, and its parameter's is "
            f"{tuple(parameter.shape)} here. Nothing was changed."
        )


def _needs_device(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    key: str,
    incoming: Incoming,
    there: Any,
) -> bool:
    """Says where a step needs a state.

    Where a scalar lives decides in which arithmetic it advances, so it goes where the class keeps
    it, not where torch's own loading puts it.

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


def _fits(there: Any, parameter: Tensor, incoming: Incoming, device: torch.device) -> bool:
    return (
        isinstance(there, Tensor)
        and there.device == device
        and there.dtype == incoming.dtype
        and tuple(there.shape) == incoming.shape
        and type(there) is type(_empty(parameter, incoming, torch.device("meta")))
    )


def _empty(parameter: Tensor, incoming: Incoming, device: torch.device) -> Tensor:
    """Makes an unfilled state: the shard that its parameter is, where it has the same shape."""
    if incoming.shape != tuple(parameter.shape) or not incoming.shape:
        return torch.empty(incoming.shape, dtype=incoming.dtype, device=device)
    local = torch.empty_like(
        local_of(parameter).detach(),
        dtype=incoming.dtype,
        device=device,
        memory_format=torch.preserve_format,
    )
    return wrapped_like(local, parameter)


_Entry = tuple[tuple[Tensor, str], Tensor]


def _move_at_first_step(
    optimizer: Optimizer, waiting: Mapping[tuple[Tensor, str], Tensor], staging_bytes: int
) -> None:
    """Moves the state onto the device when the first step begins, which a closure's own forward
    and backward follow.
    """
    # By the tensors themselves: somebody may have put others into the state by then.
    places = [(weakref.ref(p), key, weakref.ref(value)) for (p, key), value in waiting.items()]

    def move(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        handle.remove()
        if owner_of(stepped) is not None:
            return  # offloaded since: the state has its home
        found: list[_Entry] = []
        for parameter_ref, key, value_ref in places:
            parameter, value = parameter_ref(), value_ref()
            if parameter is None or value is None or parameter.is_cpu:
                continue
            if dict.get(stepped.state, parameter, {}).get(key) is value:
                found.append(((parameter, key), value))
        places.clear()
        _move(stepped, found, staging_bytes)

    handle = optimizer.register_step_pre_hook(move)


def _move(optimizer: Optimizer, entries: list[_Entry], staging_bytes: int) -> None:
    ring = Staging(staging_bytes, pin=True) if entries else None
    entries.reverse()
    for bucket in _buckets(entries, _BUCKETS * staging_bytes):
        moved: list[tuple[Tensor, str, Tensor]] = []
        assignments = []
        for (parameter, key), value in bucket:
            local = local_of(value)
            made = torch.empty_like(
                local, device=parameter.device, memory_format=torch.preserve_format
            )
            whole = wrapped_like(made, value)
            moved.append((parameter, key, whole))
            assignments.append(Assignment(target_of(key, made), [_stored(key, local)]))
        fill(assignments, checksums={}, staging_bytes=staging_bytes, ring=ring)
        for parameter, key, whole in moved:
            optimizer.state[parameter][key] = whole
        bucket.clear()


def _buckets(entries: list[_Entry], most_bytes: int) -> Iterator[list[_Entry]]:
    """Yields entries from the end of a list, which then holds them no more."""
    while entries:
        bucket: list[_Entry] = []
        num_bytes = 0
        while entries and (not bucket or num_bytes < most_bytes):
            bucket.append(entries.pop())
            num_bytes += local_of(bucket[-1][1]).nbytes
        yield bucket


def _stored(name: str, local: Tensor) -> Stored:
    shape = tuple(local.shape)
    return Stored(name, local.dtype, shape, shape, (0,) * len(shape), tensor=local)
