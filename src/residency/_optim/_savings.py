"""What an offload saves on the device, said once in the log: after the first step with a state.

The figures are those of the step's plan. A plain optimizer has each state in an allocation of its
own, throughout; an offloaded one has it in the slots of a step, and not at all between steps.
"""

from __future__ import annotations

import logging

import torch
from torch.optim import Optimizer

from residency import _device
from residency._optim._offload_record import HostState, Offload
from residency._transfer import align_up, fitting_bucket
from residency._units import format_bytes, parse_bytes, spell_bytes

_HOST = torch.device("cpu")
_LEAST_BUCKET_BYTES = parse_bytes("64KiB")  # that the log names to a caller who chose one
_LITTLE = 0.01  # of a device
_ON_HOST = (
    "0 B: the parameters are on the host, and their state with them. Move the model to the device, "
    "or leave the offload out."
)
_NO_STATE = "0 B: the optimizer has no state. Leave the offload out."
_ALL_RESIDENT = (
    "0 B: resident= has room for all of the state. Give it less, or leave the offload out."
)
_NOT_WORTH = " The state is less than a hundredth of the device, as LoRA's mostly is: leave it out."
_log = logging.getLogger("residency")


def tell_savings(optimizer: Optimizer, offload: Offload) -> None:
    """Logs what the offload saves, where that is not said yet; called at the end of a step.

    It is a warning where a step has as much state on the device as without an offload.
    """
    host = offload.host
    device = _HOST if host is None else host.homes.device
    if offload.logged_for == device or not (host is None or host.state or offload.num_buckets):
        return  # a step without gradients makes no state
    offload.logged_for = device
    try:
        saved, text = (0, _ON_HOST) if host is None else _savings(optimizer, offload, host)
    except Exception as problem:  # no run ends because of a line in a log
        _log.warning("residency could not tell what an offload saves: %s", repr(problem))
        return
    level = logging.INFO if saved else logging.WARNING
    _log.log(level, "residency: offloading this %s saves %s", offload.base.__name__, text)


def _savings(optimizer: Optimizer, offload: Offload, host: HostState) -> tuple[int, str]:
    """Returns the bytes that are saved during a step, and the words for all figures."""
    inners = host.state.peek_each(list(host.state))
    homes = {home for inner in inners if inner for home in inner.homes_by_key.values()}
    state_bytes = sum(align_up(home.num_bytes) for home in homes)
    if not homes:
        return 0, _ALL_RESIDENT if any(inners) else _NO_STATE
    in_slots = _slot_bytes(optimizer, offload, offload.bucket_bytes)
    saved = max(0, state_bytes - in_slots)  # slots of one size may take more than the state
    bucket_bytes = fitting_bucket(state_bytes, offload.num_slots)
    excess = in_slots - state_bytes
    more = f", {format_bytes(excess)} more than the state" if excess > 0 else ""
    advice = ""
    if _LEAST_BUCKET_BYTES <= bucket_bytes < (offload.bucket_bytes or 0):
        better = state_bytes - _slot_bytes(optimizer, offload, bucket_bytes)
        if better > 2 * saved:
            advice = f' bucket="{spell_bytes(bucket_bytes)}" would save {format_bytes(better)}.'
    _, capacity = _device.device_room(host.homes.device) or (0, 0)
    return saved, (
        f"{format_bytes(saved)} of device memory in a step, whose slots have "
        f"{format_bytes(in_slots)}{more}, and {format_bytes(state_bytes)} between steps."
        f"{advice}{'' if saved or state_bytes > _LITTLE * capacity else _NOT_WORTH}"
    )


def _slot_bytes(optimizer: Optimizer, offload: Offload, bucket_bytes: int | None) -> int:
    """Returns what a step has in slots, as it allocates them."""
    plan = offload.plan_like_newest(optimizer, bucket_bytes)
    return min(offload.num_slots, len(plan.streamed)) * plan.slot_bytes
