"""The optimizer's step in which memory ran out, and what it was still to take.

An optimizer makes its state in its first step, one parameter after the other, and `foreach`, which
is torch's default on an accelerator, takes a list of temporaries of the parameters' size besides.
What is there when the step fails says little of what it needs.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from residency._memory import _objects
from residency._memory._segments import taken_by
from residency._transfer import ELEMENT_WISE, fitting_bucket, owned_optimizers
from residency._units import MIB, spell_bytes

_optim = torch.optim
_REFUSED = (_optim.LBFGS, _optim.SparseAdam)
# Tensors of the parameter's size that a class makes for each in its first step.
_STATES = {_optim.Adam: 2, _optim.AdamW: 2, _optim.NAdam: 2, _optim.RAdam: 2, _optim.Adamax: 2}
_SLOTS = 3  # both copies of an offloaded step and its arithmetic overlap
_BUCKETS_OF_A_STEP = _SLOTS + 1  # with the temporaries of the bucket that is computed with
_LEAST_BUCKET = MIB // 16  # a step in smaller parts is one of many waits


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that an error left.

    Attributes:
        optimizer: Whose.
        trained_bytes: The parameters that it has gradients for.
        state_bytes: Its state on the device, as far as it was made.
        all_state_bytes: That, with what it was still to make; None where the class does not say.
        temporary_bytes: What it takes besides while it computes.
        is_offloaded: Whether it is that of a bucket, whose state is on the host between steps.
    """

    optimizer: Optimizer
    trained_bytes: int
    state_bytes: int
    all_state_bytes: int | None
    temporary_bytes: int
    is_offloaded: bool = False

    def missing_bytes(self, room: int) -> int:
        """Returns the bytes that it lacks to come to its end, in so much room."""
        rest = (self.all_state_bytes or self.state_bytes) - self.state_bytes
        return max(0, rest + self.temporary_bytes - room)


@dataclass(frozen=True, slots=True)
class OffloadOffer:
    """An offload that a step would have had room with.

    Attributes:
        num_bytes: What it keeps off the device in a step.
        text: The call.
    """

    num_bytes: int
    text: str


def failed_step(error: BaseException) -> FailedStep | None:
    """Returns the optimizer's step that an error left; None for an error of another place."""
    optimizer, is_offloaded = None, False
    trace = error.__traceback__
    while trace is not None and optimizer is None:
        frame, trace = trace.tb_frame, trace.tb_next
        module = str(frame.f_globals.get("__name__"))
        is_offloaded |= module.startswith("residency._optim.")
        if frame.f_code.co_name == "step" and not module.startswith("residency."):
            # Not by its locals, which Python would keep a copy of. [Note: locals]
            referred = gc.get_referents(frame)
            optimizer = next((e for e in referred if _objects.is_a(e, Optimizer)), None)
    if optimizer is None or id(optimizer) in set(map(id, owned_optimizers())):
        return None
    groups = (_objects.attributes(optimizer) or {}).get("param_groups")
    return _describe(optimizer, groups if type(groups) is list else [], is_offloaded)


def _describe(optimizer: Any, groups: list[Any], is_offloaded: bool) -> FailedStep:
    state = (_objects.attributes(optimizer) or {}).get("state")
    values = {id(key): value for key, value in _objects.items(state)}
    trained = state_bytes = temporary = most = 0
    has_unmade = False
    for group in groups:
        options = dict(_objects.items(group))
        is_foreach = options.get("foreach") is not False and not options.get("fused")
        for param in options.get("params", ()):
            if _objects.slot(param, "grad") is None:
                continue
            size = _nbytes(param)
            made = sum(
                _nbytes(each)
                for _, each in _objects.items(values.get(id(param)))
                if _objects.is_a(each, torch.Tensor)
                and _objects.slot(each, "device") == _objects.slot(param, "device")
            )
            trained, state_bytes = trained + size, state_bytes + made
            temporary += size * is_foreach
            most = max(most, round(made / size) if size else 0)
            has_unmade |= size > 0 and made < size
    known = next((n for cls, n in _STATES.items() if isinstance(optimizer, cls)), 0)
    each = max(most, known)
    is_told = known > 0 or not has_unmade or (most > 0 and len(values) > 1)
    total = max(state_bytes, each * trained) if is_told else None
    return FailedStep(optimizer, trained, state_bytes, total, temporary, is_offloaded)


def offload_of_step(step: FailedStep, room: int) -> OffloadOffer | None:
    """Returns the offload with which a step would have had room; None where there is none.

    Args:
        step: The step that failed.
        room: The bytes that it could still have had, its state left alone.
    """
    whole = step.all_state_bytes or 2 * step.trained_bytes
    left = room + step.state_bytes
    bucket = fitting_bucket(whole, _SLOTS)
    if type(step.optimizer) not in ELEMENT_WISE or isinstance(step.optimizer, _REFUSED):
        return None  # it moves whole parameters, or is not moved at all
    while bucket >= _LEAST_BUCKET and taken_by(bucket, _BUCKETS_OF_A_STEP) > left:
        bucket //= 2
    if bucket < _LEAST_BUCKET:
        return None
    call = _smaller(bucket) if step.is_offloaded else _call(bucket)
    return OffloadOffer(whole - _SLOTS * bucket, call)


def offload_of_states(sizes: dict[str, int]) -> OffloadOffer | None:
    """Returns what an offload of all optimizers gives: the state less the buckets of a step.

    The bucket that it names is the largest of which three take a quarter of the state at most.
    Where a class moves whole parameters, a slot has the largest of their states, if that is more.

    Args:
        sizes: The bytes of state on the device, by parameter.
    """
    state_bytes = sum(sizes.values())
    slot_bytes = bucket_bytes = fitting_bucket(state_bytes, _SLOTS)
    classes = _stepping_classes() if bucket_bytes else set()
    if not bucket_bytes or any(issubclass(cls, _REFUSED) for cls in classes):
        return None
    if not classes <= ELEMENT_WISE:
        slot_bytes = max(bucket_bytes, *sizes.values())
    num_bytes = state_bytes - _SLOTS * slot_bytes
    call = _call(bucket_bytes) if classes or not owned_optimizers() else _smaller(bucket_bytes)
    return OffloadOffer(num_bytes, call) if num_bytes > 0 else None


def _call(bucket_bytes: int) -> str:
    return (
        "of optimizer state: residency.offload_optimizer(optimizer, "
        f'bucket="{spell_bytes(bucket_bytes)}", slots={_SLOTS}) keeps it on the host'
    )


def _smaller(bucket_bytes: int) -> str:
    return (
        "of optimizer state on the device, of an optimizer that is offloaded: offload it with "
        f'bucket="{spell_bytes(bucket_bytes)}", slots={_SLOTS} and resident="0B"'
    )


def _nbytes(tensor: object) -> int:
    return int(_objects.slot(tensor, "nbytes") or 0)


def _stepping_classes() -> set[type]:
    """Returns the classes of all optimizers with a state, but of those that are offloaded."""
    offloaded = set(map(id, owned_optimizers()))
    found = [thing for thing in gc.get_objects() if _objects.is_a(thing, Optimizer)]
    return {
        type(thing)
        for thing in found
        if id(thing) not in offloaded
        and _objects.items((_objects.attributes(thing) or {}).get("state"))
    }
