"""The restored state of a plain optimizer until its first step: on the host, and then not.

A resumed run's first forward and backward, which compile and allocate for the first time, so have
the room that a fresh run's have. Invariant, which ``tests/checkpoint/restore/test_document.py``
tries to break: ``optimizer.state`` holds ordinary tensors at every moment, and the first step finds
each where the step needs it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from residency._checkpoint._restore._fill import Staging, fill
from residency._checkpoint._restore._plan import Assignment, target_of
from residency._checkpoint._sources._source import StoredTensor
from residency._dtensor import local_of, wrapped_like
from residency._errors import RefusedError
from residency._modes import callers_modes_off
from residency._transfer import Incoming, owner_of

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
        waiting: What is on the host and is needed on the device, by parameter and key.
        nested: The same of tensors within values that are none, such as lists.
    """

    optimizer: Optimizer
    states: Mapping[Tensor, Mapping[str, Incoming | None]]
    staging_bytes: int
    targets: dict[tuple[Tensor, str], Tensor] = field(default_factory=dict)
    waiting: dict[tuple[Tensor, str], Tensor] = field(default_factory=dict)
    nested: dict[tuple[Tensor, str], list[Tensor]] = field(default_factory=dict)

    def finish(
        self, values: Mapping[tuple[Tensor, str], Any], by_other_key: Mapping[Any, Any]
    ) -> None:
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
        state.update(by_other_key)
        _drop_first_steps(self.optimizer)
        waiting = [*self.waiting.items()]
        waiting += [(entry, each) for entry, values in self.nested.items() for each in values]
        if waiting:
            hook = _FirstStep(waiting, self.staging_bytes)
            hook.handle = self.optimizer.register_step_pre_hook(hook)


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
    still_waiting = {id(v) for each in _first_steps(optimizer) for v in each.waiting()}
    for parameter, entries in states.items():
        for key, incoming in entries.items():
            if incoming is None:
                continue
            _check(optimizer, parameter, key, incoming)
            there = dict.get(optimizer.state, parameter, {}).get(key)
            is_waiting = id(there) in still_waiting  # of a restore before, without a step since
            on_device = is_waiting or _needs_device(
                optimizer, group_of[parameter], parameter, key, incoming, there
            )
            device = parameter.device if on_device else torch.device("cpu")
            place = device if eager else torch.device("cpu")
            home = place if is_waiting else device
            is_fit = _fits(there, parameter, incoming, home)
            target = there if is_fit else _empty(parameter, incoming, place)
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
    # Another class may keep a state of any shape under such a name.
    is_like = key in _LIKE_PARAMETER and _is_of_torch(optimizer)
    if is_like and incoming.shape != tuple(parameter.shape):
        raise RefusedError(
            f"the saved state {key!r} has the shape {incoming.shape}, and its parameter's is "
            f"{tuple(parameter.shape)} here. Nothing was changed; restore into the "
            "model that was saved."
        )


def _is_of_torch(optimizer: Optimizer) -> bool:
    known = vars(torch.optim)
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer]
    return any(known.get(kind.__name__) is kind for kind in kinds)


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
    it, not where torch's own loading puts it. Without a schema, it cannot ask ``device_rule``:
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


_Key = tuple[Tensor, str]
_Entry = tuple[_Key, Tensor]


class _FirstStep:
    """The hook that moves the state onto the device when the first step begins; a closure's own
    forward and backward follow.

    A move that ends midway goes on at the next step, with what is on the host still.
    """

    handle: RemovableHandle

    def __init__(self, waiting: Iterable[_Entry], staging_bytes: int) -> None:
        # By the tensors themselves: a caller may have put others into the state by then.
        self._entries = [(weakref.ref(p), key, weakref.ref(v)) for (p, key), v in waiting]
        self._staging_bytes = staging_bytes

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if owner_of(optimizer) is None:  # else it was offloaded since: the state has its home
            _move(optimizer, self._still_there(optimizer), self._staging_bytes)
        self._entries.clear()
        # Torch is going through its hooks: only the last one may go. Another one does nothing
        # from now on, and goes at the next restore.
        hooks: Any = optimizer._optimizer_step_pre_hooks  # torch shows it in no other way
        if next(reversed(hooks), None) == self.handle.id:
            self.handle.remove()

    def waiting(self) -> Iterator[Tensor]:
        """Yields what is still to be moved."""
        yield from (value for _, _, ref in self._entries if (value := ref()) is not None)

    def _still_there(self, optimizer: Optimizer) -> list[_Entry]:
        found: list[_Entry] = []
        for parameter_ref, key, value_ref in self._entries:
            parameter, value = parameter_ref(), value_ref()
            if parameter is None or value is None or parameter.is_cpu:
                continue
            there = dict.get(optimizer.state, parameter, {}).get(key)
            if any(each is value for each in tensors_in(there)):
                found.append(((parameter, key), value))
        return found


def _drop_first_steps(optimizer: Optimizer) -> None:
    """Removes what an earlier restore left to do at the first step, and what has been done."""
    for hook in _first_steps(optimizer):
        hook.handle.remove()


def _first_steps(optimizer: Optimizer) -> list[_FirstStep]:
    hooks: Any = optimizer._optimizer_step_pre_hooks  # torch shows it in no other way
    return [each for each in hooks.values() if isinstance(each, _FirstStep)]


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


def _move(optimizer: Optimizer, entries: list[_Entry], staging_bytes: int) -> None:
    ring = Staging(staging_bytes, pin=True) if entries else None
    entries.reverse()
    for bucket in _buckets(entries, _BUCKETS * staging_bytes):
        moved: dict[_Key, dict[int, Tensor]] = {}
        assignments = []
        for entry, value in bucket:
            local = local_of(value)
            with callers_modes_off():
                made = torch.empty_like(
                    local, device=entry[0].device, memory_format=torch.preserve_format
                )
            moved.setdefault(entry, {})[id(value)] = wrapped_like(made, value)
            assignments.append(Assignment(target_of(entry[1], made), [_stored(entry[1], local)]))
        fill(assignments, checksums={}, staging_bytes=staging_bytes, ring=ring)
        for (parameter, key), others in moved.items():
            inner = optimizer.state[parameter]
            inner[key] = replaced(inner[key], others)
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


def _stored(name: str, local: Tensor) -> StoredTensor:
    shape = tuple(local.shape)
    return StoredTensor(name, local.dtype, shape, shape, (0,) * len(shape), tensor=local)
