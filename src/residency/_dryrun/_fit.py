"""Looks for settings with which a script fits, and for the largest number with which it does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from residency._dryrun._answer import Answer, rounded_down, seconds_of_offload
from residency._dryrun._owners import STATE
from residency._dryrun._settings import RunSettings
from residency._errors import InvalidArgumentError
from residency._units import MIB, format_bytes

_MARGIN = 256 * MIB  # left free beside what stays resident
# What scripts call these numbers.
_FLAGS = {
    "batch": (
        "batch-size", "batch_size", "per-device-train-batch-size", "per_device_train_batch_size",
        "micro-batch-size", "micro_batch_size", "train-batch-size", "train_batch_size", "bs",
    ),
    "sequence": (
        "seq-len", "seq_len", "sequence-length", "sequence_length", "block-size", "block_size",
        "max-length", "max_length", "max-seq-length", "max_seq_length", "max-seq-len",
        "max_seq_len", "context-length", "context_length", "seq-length", "seq_length", "length",
    ),
}  # fmt: skip
_LARGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class TriedChange:
    """A set of settings that was tried.

    Attributes:
        name: What they are.
        settings: The run's, with them.
        lines: What to write into the script, or before its command.
        cost: What they cost.
        answer: The run's answer.
    """

    name: str
    settings: RunSettings
    lines: tuple[str, ...]
    cost: str
    answer: Answer | None = None


def settings_that_fit(
    settings: RunSettings, found: dict[str, Any], run: Callable[[RunSettings], Answer]
) -> Iterator[TriedChange]:
    """Tries what makes room, the cheapest first, until something fits.

    Args:
        settings: Those of the run that did not fit.
        found: What a run with room enough found.
        run: Makes a run.

    Yields:
        Each change with its answer; the last one fits, or nothing does.
    """
    for parts in _combinations(found):
        changed = settings
        for part in parts:
            changed = part.change(changed)
        answer = run(changed)
        change = TriedChange(
            " and ".join(part.name for part in parts),
            changed,
            tuple(line for part in parts for line in part.lines),
            ", ".join(part.cost for part in parts),
            answer,
        )
        if answer.fits and changed.offload == 0:
            change = _with_resident(change, found, run)
        yield change
        if answer.fits:
            return


@dataclass(frozen=True, slots=True)
class _Possibility:
    name: str
    change: Callable[[RunSettings], RunSettings]
    lines: tuple[str, ...]
    cost: str


def _combinations(found: dict[str, Any]) -> Iterator[Sequence[_Possibility]]:
    parts = [
        _Possibility(
            "segments that grow",
            lambda settings: replace(
                settings,
                environment=settings.environment
                | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ),
            ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",),
            "no time",
        )
    ]
    if _state_bytes(found) >= MIB:
        seconds = seconds_of_offload(_state_bytes(found), 0)
        parts.append(
            _Possibility(
                "the optimizer's state on the host",
                lambda settings: replace(settings, offload=0),
                ("residency.offload_optimizer(optimizer)",),
                f"{seconds:.2f} s a step over PCIe 5",
            )
        )
    if found["can_checkpoint"]:
        parts.append(
            _Possibility(
                "gradient checkpointing",
                lambda settings: replace(settings, checkpointing=True),
                ("model.gradient_checkpointing_enable()",),
                "one more forward pass a step",
            )
        )
    for number in range(1, len(parts) + 1):
        yield from itertools.combinations(parts, number)
    if found["has_trainer"]:
        for divisor in (2, 4, 8, 16):
            yield (
                *parts,
                _Possibility(
                    f"a batch of 1/{divisor} with {divisor} times the accumulation",
                    _dividing(divisor),
                    (
                        f"TrainingArguments(per_device_train_batch_size=1/{divisor} of yours, "
                        f"gradient_accumulation_steps={divisor} times yours)",
                    ),
                    "smaller kernels",
                ),
            )


def _state_bytes(found: dict[str, Any]) -> int:
    return max((phase["at_peak"].get(STATE, 0) for phase in found["phases"]), default=0)


def _dividing(divisor: int) -> Callable[[RunSettings], RunSettings]:
    return lambda settings: replace(settings, batch_divisor=divisor)


def _with_resident(
    change: TriedChange, found: dict[str, Any], run: Callable[[RunSettings], Answer]
) -> TriedChange:
    """Keeps as much of the optimizer's state on the device as fits."""
    answer = change.answer
    if answer is None:
        return change
    room = answer.capacity - answer.needed - _MARGIN
    resident = rounded_down(min(room, _state_bytes(found)))
    if resident < MIB:
        return change
    settings = replace(change.settings, offload=resident)
    again = run(settings)
    if not again.fits:
        return change
    seconds = seconds_of_offload(_state_bytes(found), resident)
    call = f'residency.offload_optimizer(optimizer, resident="{resident // MIB}MiB")'
    lines = tuple(
        call if line.startswith("residency.offload_optimizer") else line for line in change.lines
    )
    cost = re.sub(r"[\d.]+ s a step", f"{seconds:.2f} s a step", change.cost)
    name = f"{change.name}, {format_bytes(resident)} of it resident"
    return TriedChange(name, settings, lines, cost, again)


def largest_that_fits(
    words: Sequence[str], what: str, run: Callable[[Sequence[str]], Answer]
) -> Iterator[tuple[int, Answer]]:
    """Tries numbers in a command until the largest one that fits is known.

    Args:
        words: The command, with ``{batch}`` or ``{sequence}``, or with a flag that scripts commonly
            have for it.
        what: ``"batch"`` or ``"sequence"``.
        run: Makes a run of a command.

    Yields:
        Each number with its answer. The largest of those that fit is the result; the first number
        that does not fit is the next one, or the next multiple of 64 for a sequence above 64.

    Raises:
        InvalidArgumentError: The command has no such number.
    """
    present, place = _placed(words, what)
    fitting, failing = 0, 0
    number = present
    while number:
        answer = run([word.replace(place, str(number)) for word in _marked(words, what, place)])
        yield number, answer
        if answer.fits and answer.is_complete:
            fitting = number
        else:
            failing = number
        number = _next(fitting, failing, 64 if what == "sequence" else 1)


def _next(fitting: int, failing: int, step: int) -> int:
    """Returns the next number to try; 0 when the answer is known."""
    if not failing:
        return 2 * fitting if fitting < _LARGEST else 0
    if not fitting:
        return failing // 2
    middle = (fitting + failing) // 2
    if fitting >= step:
        middle = middle // step * step
    return middle if fitting < middle < failing else 0


def _placed(words: Sequence[str], what: str) -> tuple[int, str]:
    """Returns the number that stands in the command now, and the mark that stands for it."""
    place = "{" + what + "}"
    if any(place in word for word in words):
        return (1 if what == "batch" else 64), place
    found = _flag(words, what)
    if found is None:
        raise InvalidArgumentError(
            f"the command has no flag for a {what} that is known here; write {place} where its "
            f"number stands, as in: -- python train.py --my-flag {place}"
        )
    index, prefix = found
    return int(words[index][len(prefix) :]), place


def _marked(words: Sequence[str], what: str, place: str) -> list[str]:
    marked = list(words)
    found = None if any(place in word for word in words) else _flag(words, what)
    if found is not None:
        index, prefix = found
        marked[index] = prefix + place
    return marked


def _flag(words: Sequence[str], what: str) -> tuple[int, str] | None:
    """Returns where a flag's number stands, and what stands before it in the same word."""
    for index, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if name.rpartition(".")[2] not in _FLAGS[what]:
            continue
        if equals and value.isdigit():
            return index, word[: -len(value)]
        if word.startswith("-") and index + 1 < len(words) and words[index + 1].isdigit():
            return index + 1, ""
    return None
