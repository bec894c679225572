"""The changes that can make a script fit, in order of cost: those of residency, and of the script.

An offer says how many bytes of a phase's peak it can take away at most, so that only those are
tried which can help where the memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from residency._dryrun._books import ACTIVATIONS, OTHER
from residency._dryrun._owners import STATE
from residency._dryrun._settings import RunSettings
from residency._units import MIB

Found = Mapping[str, Any]  # what a run's child found
Phase = Mapping[str, Any]  # of it
_LINK_BYTES_PER_SECOND = 55_000_000_000  # as residency.sim.Clock has it, with its source
_DIVISORS = (2, 4, 8, 16)
# What scripts call these, with "_" for "-".
_BATCH = ("per_device_train_batch_size", "micro_batch_size", "train_batch_size", "batch_size", "bs")
_ACCUMULATION = (
    "gradient_accumulation_steps", "grad_accumulation_steps", "accumulate_grad_batches",
    "gradient_accumulation", "grad_accum_steps", "grad_accum", "accumulation_steps",
    "accumulation", "accumulate",
)  # fmt: skip
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
        change: Makes the settings with it of those without.
        lines: What to write into the script, or into its command, given settings and what a run
            with them found.
        cost: What it costs, given the same.
        group: Of the offers of a group one alone is made.
        joins_pieces: Whether it makes one of free bytes that lie in pieces.
    """

    name: str
    gain: Callable[[Phase], int]
    change: Callable[[RunSettings], RunSettings]
    lines: Callable[[RunSettings, Found], tuple[str, ...]]
    cost: Callable[[RunSettings, Found], str]
    group: str
    joins_pieces: bool = False

    def helps(self, phase: Phase, room: int) -> bool:
        """Returns whether it can help in a phase that does not fit into the room for torch."""
        if self.joins_pieces:
            return bool(phase["peak_allocated"] <= room < phase["peak_reserved"])
        return self.gain(phase) >= MIB


def offers(found: Found) -> list[Offer]:
    """Returns what can be tried with a script, the cheapest first.

    Args:
        found: What a run of it with room enough found.
    """
    names = [phase["name"] for phase in found["phases"]]
    is_trainer = "transformers.trainer" in found["libraries"]
    has_load = any(name.endswith("load") for name in names)
    made = [_segments()]
    if has_load and (not is_trainer or "peft" in found["libraries"]):
        made.append(_load_on_host(found))
    if any(name.endswith("save") for name in names):
        made.append(_save_on_host(found))
    if has_load and not is_trainer:
        made.append(_defer_state())
    # A loaded state is booked as "other" until its optimizer steps.
    state = _at_peak(STATE, OTHER) if has_load else _at_peak(STATE)
    if state_bytes(found) >= MIB:
        made += [_park_state(state), _offload(found, state, is_resumed=is_trainer and has_load)]
    if not any(found["arguments"].get(name, {}).get("value") for name in _CHECKPOINTING):
        made.append(_checkpointing(found))
    return made + [each for divisor in _DIVISORS for each in _batch(found, divisor)]


def state_bytes(found: Found) -> int:
    """Returns the most bytes that optimizers' state held on the device."""
    return max(map(_at_peak(STATE), found["phases"]), default=0)


def seconds_over_link(num_bytes: int) -> float:
    """Returns the seconds that bytes take over PCIe 5, in one direction."""
    return max(0, num_bytes) / _LINK_BYTES_PER_SECOND


def _segments() -> Offer:
    setting = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return Offer(
        name="segments that grow",
        gain=lambda phase: 0,
        change=lambda settings: replace(
            settings, environment=settings.environment | dict([setting])
        ),
        lines=lambda settings, found: (f"export {'='.join(setting)}",),
        cost=lambda settings, found: "no time",
        group="segments",
        joins_pieces=True,
    )


def _load_on_host(found: Found) -> Offer:
    line = 'torch.load(file, map_location="cpu")'
    if "transformers.trainer" in found["libraries"]:
        line = "Trainer(..., callbacks=[ResidencyCallback(offload=False)])"
    elif "peft" in found["libraries"]:
        line = 'model.load_adapter(folder, name, torch_device="cpu")'
    return Offer(
        name="files are loaded by way of the host",
        gain=_at_peak(OTHER),
        change=lambda settings: replace(settings, loads_on_host=True),
        lines=lambda settings, found: (line,),
        cost=lambda settings, found: "nothing in a step",
        group="load",
    )


def _save_on_host(found: Found) -> Offer:
    lines: tuple[str, ...] = (
        "checkpointer = residency.Checkpointer(folder)",
        'checkpointer.save(step, {"model": model, "optimizer": optimizer})  # of the live objects',
    )
    if {"lightning", "pytorch_lightning"} & set(found["libraries"]):
        lines = ("Trainer(..., plugins=[ResidencyCheckpointIO()])",)
    copies = max(
        _at_peak(OTHER)(phase) for phase in found["phases"] if phase["name"].endswith("save")
    )  # of which the save writes, so that they are there then
    return Offer(
        name="saves without a copy on the device",
        gain=lambda phase: min(copies, _at_peak(OTHER)(phase)),
        change=lambda settings: replace(settings, saves_on_host=True),
        lines=lambda settings, found: lines,
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
        lines=lambda settings, found: (
            "checkpointer = residency.Checkpointer(folder)  # which also made the save",
            'checkpointer.restore({"model": model, "optimizer": optimizer})',
        ),
        cost=lambda settings, found: "nothing in a step",
        group="load",
    )


def _park_state(state: Callable[[Phase], int]) -> Offer:
    def gain(phase: Phase) -> int:
        return state(phase) if phase["name"].endswith(("evaluate", "generate")) else 0

    def cost(settings: RunSettings, found: Found) -> str:
        seconds = 2 * seconds_over_link(state_bytes(found))
        return f"{seconds:.2f} s for each evaluation or generation over PCIe 5, none in a step"

    return Offer(
        name="the optimizer's state parked while the script evaluates or generates",
        gain=gain,
        change=lambda settings: replace(settings, parks_state=True),
        lines=lambda settings, found: (
            "residency.park(optimizer)  # before it evaluates or generates",
            "residency.unpark(optimizer)  # after it",
        ),
        cost=cost,
        group="park",
    )


def _offload(found: Found, state: Callable[[Phase], int], *, is_resumed: bool) -> Offer:
    """Returns the offer; a Trainer that resumes needs the mixin, which reads to the host, too."""
    num_bytes = state_bytes(found)
    libraries = set(found["libraries"])

    def lines(settings: RunSettings, found: Found) -> tuple[str, ...]:
        resident = f'"{(settings.offload or 0) // MIB}MiB"'
        if is_resumed:
            return (
                "class MyTrainer(ResidencyTrainerMixin, Trainer): ...",
                f"MyTrainer(..., callbacks=[ResidencyCallback(resident={resident})])",
            )
        if "transformers.trainer" in libraries:
            return (f"Trainer(..., callbacks=[ResidencyCallback(resident={resident})])",)
        if {"lightning", "pytorch_lightning"} & libraries:
            callback = f'ResidencyCallback(offload={{"resident": {resident}}})'
            return (f"Trainer(..., callbacks=[{callback}])",)
        return (f"residency.offload_optimizer(optimizer, resident={resident})",)

    return Offer(
        name="the optimizer's state on the host",
        gain=state,
        change=lambda settings: replace(
            settings, offload=0, loads_on_host=settings.loads_on_host or is_resumed
        ),
        lines=lines,
        cost=lambda settings, found: (
            f"{seconds_over_link(num_bytes - (settings.offload or 0)):.2f} s a step over PCIe 5"
        ),
        group="offload",
    )


def _checkpointing(found: Found) -> Offer:
    flag = _argument(found, _CHECKPOINTING)

    def change(settings: RunSettings) -> RunSettings:
        if flag is None:
            return replace(settings, checkpointing=True)
        return replace(settings, arguments=settings.arguments | {flag: True})

    def lines(settings: RunSettings, found: Found) -> tuple[str, ...]:
        if flag is not None:
            return (found["arguments"][flag]["flag"],)
        if found["recomputed"] == "transformers":
            return ("model.gradient_checkpointing_enable()",)
        call = "torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False)"
        return (f"{call}  # for each block of {found['recomputed']}",)

    return Offer(
        name="gradient checkpointing",
        gain=_at_peak(ACTIVATIONS),
        change=change,
        lines=lines,
        cost=lambda settings, found: "one more forward pass a step",
        group="checkpointing",
    )


def _batch(found: Found, divisor: int) -> list[Offer]:
    """Returns the offer of smaller batches of which so many more are added up, if there is one."""
    batch, accumulation = _argument(found, _BATCH), _argument(found, _ACCUMULATION)
    numbers = {name: each["value"] for name, each in found["arguments"].items()}
    values: dict[str, int | bool] = {}
    if batch is not None and accumulation is not None:
        if numbers[batch] % divisor:
            return []
        values = {batch: numbers[batch] // divisor, accumulation: numbers[accumulation] * divisor}
    elif "transformers.trainer" not in found["libraries"]:
        return []

    def lines(settings: RunSettings, found: Found) -> tuple[str, ...]:
        if values:
            flags = {found["arguments"][name]["flag"]: value for name, value in values.items()}
            return (" ".join(f"{flag} {value}" for flag, value in flags.items()),)
        return (
            f"TrainingArguments(per_device_train_batch_size=1/{divisor} of yours, "
            f"gradient_accumulation_steps={divisor} times yours)",
        )

    def change(settings: RunSettings) -> RunSettings:
        if values:
            return replace(settings, arguments=settings.arguments | values)
        return replace(settings, batch_divisor=divisor)

    return [
        Offer(
            name=f"batches of 1/{divisor}, with {divisor} times the accumulation",
            gain=lambda phase: _at_peak(ACTIVATIONS, OTHER)(phase) * (divisor - 1) // divisor,
            change=change,
            lines=lines,
            cost=lambda settings, found: "smaller kernels",
            group="batch",
        )
    ]


def _argument(found: Found, names: tuple[str, ...]) -> str | None:
    """Returns the first of some arguments that the script's parser has."""
    return next((name for name in names if name in found["arguments"]), None)
