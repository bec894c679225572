"""Explains an out-of-memory error while what filled the device is still there.

The error's traceback keeps the locals of the functions that it left, so that their tensors are
still held, and can be named, where the error is caught. The explanation is a note on the error: the
memory's classes, who holds the most, and the cheapest thing that would have made room.

It allocates nothing on the device, waits for nothing, ends within seconds, and never fails: the
error that a caller gets is the one that was raised.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from types import TracebackType

import torch

from residency import _device
from residency._memory import _objects, _state
from residency._memory._framework_calls import frames_of, integration_lines
from residency._memory._groups import grouped, growing_groups, holder_lines
from residency._memory._history import held_history
from residency._memory._holders._holders import Holder, find_holders
from residency._memory._messages import asked_bytes, held_bytes, room_below_limit
from residency._memory._remedies import Failure, Remedy, remedies, remedy_lines
from residency._memory._state import MemoryState
from residency._memory._stepping import failed_step
from residency._units import MIB, format_bytes

_HEADING = "residency: the device's memory when this failed"
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
_log = logging.getLogger("residency")


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


def describe_device(device: torch.device | None, *, but: Container[int] | None = None) -> str:
    """Returns the memory's classes, who holds how much, and the largest holders with their paths.

    Args:
        device: What `_device.resolve` returned.
        but: Addresses of storages. Where they are given, the holders come first, and those of these
            storages are left out.
    """
    state = _state.measure(device)
    found = find_holders(device, _least_bytes(state), seconds=_SEARCH_SECONDS)
    whole = [str(state), *_owner_lines(found)]
    if but is None:
        return "\n".join([*whole, *holder_lines(grouped(found))])
    named = [holder for holder in found if not holder.address or holder.address not in but]
    return "\n".join([*holder_lines(grouped(named)), *whole])


def _is_explained(error: BaseException) -> bool:
    return any(str(note).startswith(_HEADING) for note in getattr(error, "__notes__", ()))


def _lines(error: BaseException, phase: str | None) -> Iterator[str]:
    device = _device.accelerator()
    state = _state.measure(device)
    yield _HEADING + (f", in the phase {phase!r}:" if phase else ":")
    yield str(state)
    found = find_holders(device, _least_bytes(state), seconds=_SEARCH_SECONDS, error=error)
    yield from _owner_lines(found)
    groups = grouped(found, error=_objects.type_name(error))
    growth = held_history.steady()
    growing = growing_groups(groups, growth)
    yield from holder_lines(groups, growing)
    failure = Failure(
        state=state,
        groups=groups,
        growing=growing,
        growth=growth,
        room=state.free,
        phase=(phase or "").rpartition("/")[2],
        step=failed_step(error),
        is_backward=_is_in_backward(error),
        is_new=phase is not None and not held_history.num_visits(phase),
    )
    yield from _remedy_lines(error, failure)
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


def _remedy_lines(error: BaseException, failure: Failure) -> Iterator[str]:
    state = failure.state
    asked, held = asked_bytes(str(error)), held_bytes(str(error))
    if held is not None:
        # Torch's allocator had given back what it could before it failed. What is free now, too,
        # are values without a name, let go as the error passed.
        failure = replace(failure, is_cache_known=False)
        if held - state.held >= _LEAST_TOLD:
            yield (
                f"{format_bytes(held - state.held)} more were held when it failed, "
                "by values without a name of their own; they are let go by now."
            )
    limited = room_below_limit(str(error))
    is_limited = asked is not None and limited is not None and limited < state.free
    if is_limited:
        failure = replace(failure, room=limited or 0, is_outside_known=False)
    failure = replace(failure, asked=asked)
    found = remedies(failure)
    if is_limited:
        found.insert(0, Remedy(state.free - failure.room, _BEYOND_LIMIT))
    if asked is None:
        if found:
            yield "what would make room, the cheapest first:"
        for remedy in found:
            yield f"  {format_bytes(remedy.num_bytes):>12}  {remedy.text}"
        return
    short = max(0, asked - failure.room)
    rest = failure.missing - short
    more = f", and about {format_bytes(rest)} to the end of this step" * (rest > 0)
    yield (
        f"{format_bytes(asked)} were asked for, and {format_bytes(short)} more were needed{more}."
    )
    yield from remedy_lines(failure, found)


def _is_in_backward(error: BaseException) -> bool:
    return any(module.startswith("torch.autograd") for module, _ in frames_of(error))
