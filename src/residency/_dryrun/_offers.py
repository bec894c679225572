"""The changes that can make a script fit, in order of cost: those of residency, and of the script.

An offer says how many bytes of a phase's peak it can take away at most, so that only those are
tried which can help where the memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from residency._dryrun._books import ACTIVATIONS, OTHER
from residency._dryrun._lines import Found
from residency._dryrun._numbers import (
    ACCUMULATION,
    BATCH,
    ScriptNumber,
    number_in_command,
    number_in_script,
)
from residency._dryrun._owners import GRADIENTS, STATE
from residency._dryrun._resumes import TEMPLATE
from residency._dryrun._settings import RunSettings
from residency._dryrun._verdict import WITHOUT_GRADIENTS
from residency._units import MIB
from residency.sim import Clock

Phase = Mapping[str, Any]  # of it
_OVER_LINK = "over PCIe 5 (PCIe 4: twice that)"
_DIVISORS = (2, 4, 8, 16)
_LEAST_STATE = 12 * MIB  # under it, an offload's slots may have all of the state
_SHARE_OF_SLOTS = 4  # of a larger state, or less, are the slots
_CHECKPOINTING = (
    "gradient_checkpointing", "activation_checkpointing", "grad_checkpointing", "use_checkpointing",
)  # fmt: skip


def _at_peak(*kinds: str) -> Callable[[Phase], int]:
    return lambda phase: sum(phase["at_peak"].get(kind, 0) for kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A change that may make a script fit.

    Attributes:
        name: What it is.
        gain: At most so many bytes are missing from a phase's peak with it.
        added: At most so many bytes of a phase's peak, in a run with it, are there because of it.
        change: Makes the settings with it of those without.
        cost: What it costs, given settings and what a run with them found.
        group: Of the offers of a group one alone is made.
        joins_pieces: Whether it makes one of free bytes that lie in pieces.
    """

    name: str
    gain: Callable[[Phase], int]
    change: Callable[[RunSettings], RunSettings]
    cost: Callable[[RunSettings, Found], str]
    group: str
    added: Callable[[Phase], int] = lambda phase: 0
    joins_pieces: bool = False

    def helps(self, phase: Phase, room: int) -> bool:
        """Returns whether it can help in a phase that does not fit into the room for torch."""
        if self.joins_pieces:
            return bool(phase["peak_allocated"] <= room < phase["peak_reserved"])
        return self.gain(phase) >= MIB


def offers(found: Found, words: Sequence[str] = ()) -> list[Offer]:
    """Returns what can be tried with a script, the cheapest first.

    Args:
        found: What a run of it with room enough found.
        words: The command.
    """
    names = [phase["name"] for phase in found["phases"]]
    libraries = set(found["libraries"])
    is_trainer = "transformers.trainer" in libraries
    has_loop = not is_trainer and not libraries & {"lightning", "pytorch_lightning"}
    has_load = any(name.endswith("load") for name in names)
    made = [_segments()]
    if found["has_buckets"] and not is_trainer:  # which makes its arguments for DDP itself
        made.append(_bucket_views())
    is_known = has_loop or (is_trainer and "peft" in libraries)
    if has_load and found["loads_on_device"] and is_known:
        made.append(_load_on_host(has_adapters=is_trainer))
    if any(name.endswith("save") for name in names):
        made.append(_save_on_host(found))
    if found["loads_state"] and has_loop:
        made.append(_defer_template() if found["has_template"] else _defer_state())
    # A loaded state is booked as "other" until its optimizer steps.
    state = _at_peak(STATE, OTHER) if has_load else _at_peak(STATE)
    if state_bytes(found) >= MIB:
        made.append(_park_state(state))
    if state_bytes(found) >= _LEAST_STATE:
        made.append(_offload(found, state, is_resumed=is_trainer and found["loads_state"]))
    if not any(found["arguments"].get(name, {}).get("value") for name in _CHECKPOINTING):
        made.append(_checkpointing(found))
    return made + _batches(found, words)


def state_bytes(found: Found) -> int:
    """Returns the most bytes that optimizers' state held on the device."""
    return max(map(_at_peak(STATE), found["phases"]), default=0)


def seconds_over_link(num_bytes: int) -> float:
    """Returns the seconds that bytes take over PCIe 5, in one direction."""
    to_device, *_ = Clock().rates()
    return max(0, num_bytes) / to_device


def _seconds(num_bytes: int) -> str:
    seconds = seconds_over_link(num_bytes)
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds:.1g} s"


def _segments() -> Offer:
    setting = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return Offer(
        name="segments that grow",
        gain=lambda phase: 0,
        change=lambda settings: replace(
            settings, environment=settings.environment | dict([setting])
        ),
        cost=lambda settings, found: "no time",
        group="segments",
        joins_pieces=True,
    )


def _bucket_views() -> Offer:
    return Offer(
        name="gradients as views of DDP's buckets",
        gain=_at_peak(GRADIENTS),
        change=lambda settings: replace(settings, views_buckets=True),
        cost=lambda settings, found: "no time",
        group="buckets",
    )


def _load_on_host(*, has_adapters: bool) -> Offer:
    """Returns the offer; a Trainer's adapters are read by the callback."""
    return Offer(
        name="files are loaded by way of the host",
        gain=_at_peak(OTHER),
        change=lambda settings: (
            replace(settings, calls_back=True)
            if has_adapters
            else replace(settings, loads_on_host=True)
        ),
        cost=lambda settings, found: "nothing in a step",
        group="load",
    )


def _save_on_host(found: Found) -> Offer:
    copies = max(
        _at_peak(OTHER)(phase) for phase in found["phases"] if phase["name"].endswith("save")
    )  # of which the save writes, so that they are there then
    return Offer(
        name="saves without a copy on the device",
        gain=lambda phase: min(copies, _at_peak(OTHER)(phase)),
        change=lambda settings: replace(settings, saves_on_host=True),
        cost=lambda settings, found: "nothing in a step",
        group="save",
    )


def _defer_state() -> Offer:
    def gain(phase: Phase) -> int:
        is_step = phase["name"].endswith("optimizer step")
        return _at_peak(OTHER)(phase) if is_step else _at_peak(OTHER, STATE)(phase)

    return Offer(
        name="a resume that leaves the optimizer's state on the host until the first step",
        gain=gain,
        change=lambda settings: replace(settings, loads_on_host=True, defers_state=True),
        cost=lambda settings, found: "nothing in a step",
        group="load",
    )


def _defer_template() -> Offer:
    """Returns the offer of `TrainState`, which makes no state by a step before a load."""

    def gain(phase: Phase) -> int:
        name = phase["name"]
        if TEMPLATE in name:
            return _at_peak(GRADIENTS, STATE, ACTIVATIONS, OTHER)(phase)
        is_step = name.endswith("optimizer step")
        return _at_peak(OTHER)(phase) if is_step else _at_peak(OTHER, STATE)(phase)

    return Offer(
        name="a resume by TrainState, with the optimizer's state on the host until the first step",
        gain=gain,
        change=lambda settings: replace(settings, defers_template=True),
        cost=lambda settings, found: "nothing in a step",
        group="template",
    )


def _park_state(state: Callable[[Phase], int]) -> Offer:
    def gain(phase: Phase) -> int:
        return state(phase) if phase["name"].endswith(WITHOUT_GRADIENTS) else 0

    def cost(settings: RunSettings, found: Found) -> str:
        seconds = _seconds(2 * state_bytes(found))
        return f"{seconds} for each evaluation or generation {_OVER_LINK}, none in a step"

    return Offer(
        name="the optimizer's state parked while the script evaluates or generates",
        gain=gain,
        change=lambda settings: replace(settings, parks_state=True),
        cost=cost,
        group="park",
    )


def _offload(found: Found, state: Callable[[Phase], int], *, is_resumed: bool) -> Offer:
    """Returns the offer; a Trainer that resumes needs the mixin, which reads to the host, too."""
    num_bytes = state_bytes(found)
    is_trainer = "transformers.trainer" in found["libraries"]
    return Offer(
        name="the optimizer's state on the host",
        gain=state,
        change=lambda settings: replace(
            settings,
            offload=0,
            calls_back=settings.calls_back or is_trainer,
            loads_on_host=settings.loads_on_host or is_resumed,
        ),
        cost=lambda settings, found: (
            f"{_seconds(num_bytes - (settings.offload or 0))} a step {_OVER_LINK}"
        ),
        group="offload",
        added=lambda phase: min(num_bytes // _SHARE_OF_SLOTS, _at_peak(OTHER)(phase)),
    )


def _checkpointing(found: Found) -> Offer:
    flag = next((name for name in _CHECKPOINTING if name in found["arguments"]), None)

    def change(settings: RunSettings) -> RunSettings:
        if flag is None:
            return replace(settings, checkpointing=True)
        return replace(settings, arguments=settings.arguments | {flag: True})

    def gain(phase: Phase) -> int:
        return 0 if phase["name"].endswith(WITHOUT_GRADIENTS) else _at_peak(ACTIVATIONS)(phase)

    return Offer(
        name="gradient checkpointing",
        gain=gain,
        change=change,
        cost=lambda settings, found: "one more forward pass a step",
        group="checkpointing",
    )


def _batches(found: Found, words: Sequence[str]) -> list[Offer]:
    """Returns the offers of smaller batches of which so many more are added up."""
    batch, accumulation = (
        number_in_script(found, names) or number_in_command(words, names)
        for names in (BATCH, ACCUMULATION)
    )
    if batch is None or accumulation is None:
        return []
    return [
        _batch(batch, accumulation, divisor) for divisor in _DIVISORS if batch.value % divisor == 0
    ]


def _batch(batch: ScriptNumber, accumulation: ScriptNumber, divisor: int) -> Offer:
    def change(settings: RunSettings) -> RunSettings:
        smaller = batch.change(settings, batch.value // divisor)
        return accumulation.change(smaller, accumulation.value * divisor)

    return Offer(
        name=f"batches of 1/{divisor}, with {divisor} times the accumulation",
        gain=lambda phase: _at_peak(ACTIVATIONS, OTHER)(phase) * (divisor - 1) // divisor,
        change=change,
        cost=lambda settings, found: "smaller kernels",
        group="batch",
        added=_of_first_pass if accumulation.value == 1 else lambda phase: 0,
    )


def _of_first_pass(phase: Phase) -> int:
    """Returns the gradients that a pass finds there where its step has one before it.

    An optimizer's step has them all anyhow.
    """
    return 0 if phase["name"].endswith("optimizer step") else _at_peak(GRADIENTS)(phase)
