"""Explains an out-of-memory error while what filled the device is still there.

The error's traceback keeps the locals of the functions that it left, so that their tensors are
still held, and can be named, where the error is caught. The explanation is a note on the error: the
memory's classes, who holds the most, and the cheapest thing that would have made room.

It allocates nothing on the device, waits for nothing, ends within seconds, and never fails: the
error that a caller gets is the one that was raised.
"""

from __future__ import annotations

import collections
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch.optim import Optimizer

from residency import _device
from residency._memory import _objects, _state
from residency._memory._framework_calls import integration_lines
from residency._memory._groups import grouped, holder_lines
from residency._memory._holders._holders import Holder, find_holders
from residency._memory._messages import asked_bytes, held_bytes, room_below_limit
from residency._memory._state import MemoryState
from residency._transfer import ELEMENT_WISE, fitting_bucket, owned_optimizers
from residency._units import MIB, format_bytes, spell_bytes

_HEADING = "residency: the device's memory when this failed"
_RETURNABLE = "cached here and free: torch.accelerator.empty_cache() returns it"
_OUTSIDE = "used outside of this process's torch: other processes, contexts"
_BEYOND_LIMIT = "free on the device, but not allowed: raise torch's set_per_process_memory_fraction"
_LEAST_TOLD = MIB  # messages round sizes
_SEARCH_SECONDS = 3.0
_SHARE_OF_A_HOLDER = 2000  # smaller ones than this part of what is held are not looked for
_KINDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer state": "optimizer states",
    "autograd": "saved for backward",
    "tensor": "other tensors",
    "c++": "held by C++",
}
_REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)
_SLOTS = 3  # both copies of an offloaded step and its arithmetic overlap
_log = logging.getLogger("residency")


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that would have made room: ``text``, with the bytes that it gives."""

    num_bytes: int
    text: str


def explain(error: BaseException, *, phase: str | None = None) -> None:
    """Adds to an out-of-memory error a note that explains it; leaves every other error alone.

    At most one note is added, however many blocks the error passes through.

    Args:
        error: Any exception, still with its traceback.
        phase: The path of the phase in which it was raised.
    """
    if not isinstance(error, torch.OutOfMemoryError) or _is_explained(error):
        return
    try:
        note = "\n".join(_lines(error, phase))
    except Exception as problem:  # a second error would hide the first
        _log.warning("residency could not explain an out-of-memory error", exc_info=True)
        note = f"{_HEADING} could not be written: {type(problem).__name__}: {problem}"
    error.add_note(note)


def explain_uncaught(tell: Callable[[BaseException], None] = explain) -> None:
    """Explains an out-of-memory error that ends the process, before Python prints it.

    Args:
        tell: Is given every error that ends the process, and explains it.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell(error)
        before(kind, error, trace)

    sys.excepthook = hook


def describe_device(device: torch.device | None) -> str:
    """Returns the memory's classes, who holds how much, and the largest holders with their paths.

    Args:
        device: What `_device.resolve` returned.
    """
    state = _state.measure(device)
    found = find_holders(device, _least_bytes(state), seconds=_SEARCH_SECONDS)
    return "\n".join([str(state), *_owner_lines(found), *holder_lines(found)])


def remedies(state: MemoryState, holders: list[Holder]) -> list[Remedy]:
    """Returns what would have made room, the cheapest first, each with the bytes that it gives."""
    sums: collections.Counter[str] = collections.Counter()
    for holder in holders:
        is_cycle = holder.path.startswith("reference cycle: ")
        sums["cycle" if is_cycle else holder.kind] += holder.num_bytes
    copies, where = _copies(holders)
    found = [
        Remedy(state.returnable, _RETURNABLE),
        Remedy(state.draining, "freed, but a stream still uses it: synchronise before asking"),
        Remedy(sums["cycle"], "in reference cycles: gc.collect() frees it, or break the cycle"),
        Remedy(
            state.stuck or 0,
            "free, but in pieces between live tensors: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True lets it be used",
        ),
        Remedy(copies, f"in copies of parameters or states, a clone for a save perhaps: {where}"),
        _offload([holder for holder in holders if holder.kind == "optimizer state"]),
        Remedy(sums["gradient"], "of gradients: optimizer.zero_grad() before this phase"),
        Remedy(
            sums["autograd"],
            "saved for backward: activation checkpointing, a smaller batch, or torch.no_grad()",
        ),
        _largest_unowned(holders),
        Remedy(state.outside, _OUTSIDE),
    ]
    return [remedy for remedy in found if remedy.num_bytes > 0]


def _offload(states: list[Holder]) -> Remedy:
    """Returns what an offload of the optimizer gives: its state less the buckets of a step.

    The bucket that it names is the largest of which three take a quarter of the state at most.
    Where a class moves whole parameters, a slot has the largest of their states, if that is more.
    """
    state_bytes = sum(holder.num_bytes for holder in states)
    slot_bytes = bucket_bytes = fitting_bucket(state_bytes, _SLOTS)
    classes = _stepping_classes() if bucket_bytes else set()
    if not bucket_bytes or any(issubclass(cls, _REFUSED) for cls in classes):
        return Remedy(0, "")
    if not classes <= ELEMENT_WISE:
        sizes: collections.Counter[str] = collections.Counter()
        for holder in states:
            sizes[holder.path.rpartition("[")[0]] += holder.num_bytes
        slot_bytes = max(bucket_bytes, *sizes.values())
    return Remedy(
        state_bytes - _SLOTS * slot_bytes,
        "of optimizer state: residency.offload_optimizer(optimizer, "
        f'bucket="{spell_bytes(bucket_bytes)}", slots={_SLOTS}) keeps it on the host',
    )


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


def _largest_unowned(holders: list[Holder]) -> Remedy:
    unowned = grouped(holder for holder in holders if holder.kind == "tensor")
    if not unowned:
        return Remedy(0, "")
    return Remedy(unowned[0].num_bytes, f"to be let go, if it may: {unowned[0]}")


def _is_explained(error: BaseException) -> bool:
    return any(str(note).startswith(_HEADING) for note in getattr(error, "__notes__", ()))


def _lines(error: BaseException, phase: str | None) -> Iterator[str]:
    device = _device.accelerator()
    state = _state.measure(device)
    yield _HEADING + (f", in the phase {phase!r}:" if phase else ":")
    yield str(state)
    found = find_holders(device, _least_bytes(state), seconds=_SEARCH_SECONDS, error=error)
    yield from _owner_lines(found)
    yield from holder_lines(found)
    yield from _remedy_lines(error, state, found)
    yield from integration_lines(error)


def _least_bytes(state: MemoryState) -> int:
    return max(1, state.held // _SHARE_OF_A_HOLDER)


def _owner_lines(holders: list[Holder]) -> Iterator[str]:
    """Yields the sums of what each kind of owner holds, the largest first."""
    sums: dict[str, list[int]] = {}
    for holder in holders:
        sums.setdefault(holder.kind, []).append(holder.num_bytes)
    if sums:
        yield "held by:"
    for kind, sizes in sorted(sums.items(), key=lambda entry: -sum(entry[1])):
        count = f" in {len(sizes)}" if kind != "c++" else ""
        yield f"  {format_bytes(sum(sizes)):>12}  {_KINDS[kind]}{count}"


def _remedy_lines(error: BaseException, state: MemoryState, holders: list[Holder]) -> Iterator[str]:
    asked, held = asked_bytes(str(error)), held_bytes(str(error))
    found = remedies(state, holders)
    if held is not None:
        # Torch's allocator had given back what it could before it failed. What is free now, too,
        # are values without a name, let go as the error passed.
        found = [remedy for remedy in found if remedy.text != _RETURNABLE]
        if held - state.held >= _LEAST_TOLD:
            yield (
                f"{format_bytes(held - state.held)} more were held when it failed, "
                "by values without a name of their own; they are let go by now."
            )
    if not found:
        return
    if asked is None:
        yield "what would make room, the cheapest first:"
        for remedy in found:
            yield f"  {format_bytes(remedy.num_bytes):>12}  {remedy.text}"
        return
    room = state.free
    if (limited := room_below_limit(str(error))) is not None and limited < room:
        found = [remedy for remedy in found if remedy.text != _OUTSIDE]
        found.insert(0, Remedy(room - limited, _BEYOND_LIMIT))
        room = limited
    short = max(0, asked - room)
    yield f"{format_bytes(asked)} were asked for, and {format_bytes(short)} more were needed."
    fitting = next((remedy for remedy in found if remedy.num_bytes >= short), None)
    if fitting is not None:
        yield "the cheapest that would have fitted:"
        yield f"  {format_bytes(fitting.num_bytes):>12}  {fitting.text}"
        return
    yield "none of these would have been enough alone:"
    for remedy in found:
        yield f"  {format_bytes(remedy.num_bytes):>12}  {remedy.text}"


def _copies(holders: list[Holder]) -> tuple[int, str]:
    """Returns the bytes of tensors without an owner, of an owned one's shape; and one's path.

    Each owned tensor accounts for one copy.
    """
    owned = collections.Counter(
        (holder.shape, holder.dtype)
        for holder in holders
        if holder.kind in ("parameter", "buffer", "optimizer state")
    )
    num_bytes, where = 0, ""
    for holder in holders:  # the largest comes first
        key = (holder.shape, holder.dtype)
        if holder.kind == "tensor" and owned[key] > 0:
            owned[key] -= 1
            num_bytes += holder.num_bytes
            where = where or holder.path
    return num_bytes, where
