"""Explains an out-of-memory error while what filled the device is still there.

The error's traceback keeps the locals of the functions that it left, so that their tensors are
still held, and can be named, where the error is caught. The explanation is a note on the error: the
memory's classes, who holds the most, and a change that would have made room.

It allocates nothing on the device, waits for nothing, ends within seconds, and never fails: the
error that a caller gets is the one that was raised.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container, Iterator
from types import TracebackType

import torch

from residency import _device
from residency._memory import _objects, _state
from residency._memory._framework_calls import frames_of, integration_lines
from residency._memory._groups import grouped, growing_groups, holder_lines
from residency._memory._history import held_history
from residency._memory._holders._holders import Holder, find_holders
from residency._memory._messages import asked_bytes, held_bytes, room_below_limit
from residency._memory._moving import failed_move
from residency._memory._remedies import Failure, Remedy, fitting, remedies, remedy_lines
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


def remedy_for(error: BaseException, *, phase: str | None = None) -> tuple[int, str] | None:
    """Returns the first change that would have made room for what ran out of memory.

    Args:
        error: As for `explain`.
        phase: As for `explain`.

    Returns:
        The bytes that it gives, and what to do; None where none is reckoned to be enough.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    try:
        failure, _ = _examined(error, phase)
        sure, _ = fitting(failure, _remedies(failure))
    except Exception:  # a second error would hide the first
        _log.warning("residency could not look for changes that make room", exc_info=True)
        return None
    return (sure[0].num_bytes, sure[0].text) if sure else None


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
    failure, found = _examined(error, phase)
    yield _HEADING + (f", in the phase {phase!r}:" if phase else ":")
    yield str(failure.state)
    yield from _owner_lines(found)
    yield from holder_lines(failure.groups, failure.growing)
    yield from _remedy_lines(error, failure)
    yield from integration_lines(error)


def _examined(error: BaseException, phase: str | None) -> tuple[Failure, list[Holder]]:
    """Returns what is known of a failure while what filled the device is there, and who holds it.

    Torch's allocator had given back what it could before it failed. What is free now, too, are
    values without a name, let go as the error passed.
    """
    device = _device.accelerator()
    state = _state.measure(device)
    found = find_holders(device, _least_bytes(state), seconds=_SEARCH_SECONDS, error=error)
    groups = grouped(found, error=_objects.type_name(error))
    growth = held_history.steady()
    limited = _limited_room(error, state)
    failure = Failure(
        state=state,
        groups=groups,
        growing=growing_groups(groups, growth),
        growth=growth,
        asked=asked_bytes(str(error)),
        room=state.free if limited is None else limited,
        phase=(phase or "").rpartition("/")[2],
        step=failed_step(error),
        move=failed_move(error),
        is_backward=_is_in_backward(error),
        is_outside_known=limited is None,
        is_new=phase is not None and not held_history.num_visits(phase),
        is_cache_known=held_bytes(str(error)) is None,
    )
    return failure, found


def _limited_room(error: BaseException, state: MemoryState) -> int | None:
    """Returns what a limit of torch's left of the free bytes; None where it left them all."""
    limited = room_below_limit(str(error))
    is_limited = asked_bytes(str(error)) is not None and limited is not None
    return limited if is_limited and (limited or 0) < state.free else None


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
    held = held_bytes(str(error))
    if held is not None and held - failure.state.held >= _LEAST_TOLD:
        yield (
            f"{format_bytes(held - failure.state.held)} more were held when it failed, "
            "by values without a name of their own; they are let go by now."
        )
    found = _remedies(failure)
    if failure.asked is None:
        if found:
            yield "changes that would make room, in the order to try them:"
        for remedy in found:
            yield f"  {format_bytes(remedy.num_bytes):>12}  {remedy.text}"
        return
    short = max(0, failure.asked - failure.room)
    rest = failure.missing - short
    whose = "to the end of this step" if failure.move is None else "for the rest of this module"
    more = f", and about {format_bytes(rest)} {whose}" * (rest > 0)
    yield (
        f"{format_bytes(failure.asked)} were asked for, and {format_bytes(short)} more were "
        f"needed{more}."
    )
    yield from remedy_lines(failure, found)


def _remedies(failure: Failure) -> list[Remedy]:
    found = remedies(failure)
    if not failure.is_outside_known:
        found.insert(0, Remedy(failure.state.free - failure.room, _BEYOND_LIMIT))
    return found


def _is_in_backward(error: BaseException) -> bool:
    return any(module.startswith("torch.autograd") for module, _ in frames_of(error))
