"""The numbers of a script that a search may change: where its command, its parser or its Trainer
has a batch, a sequence or an accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from residency._dryrun._settings import RunSettings

# What scripts call these, with "_" for "-".
BATCH = (
    "per_device_train_batch_size", "micro_batch_size", "train_batch_size", "batch_size", "bs",
    "batchsize", "batch", "b",
)  # fmt: skip
SEQUENCE = (
    "seq_len", "seq_length", "sequence_length", "block_size", "max_length", "max_seq_length",
    "max_seq_len", "context_length", "length",
)  # fmt: skip
ACCUMULATION = (
    "gradient_accumulation_steps", "grad_accumulation_steps", "accumulate_grad_batches",
    "gradient_accumulation", "grad_accum_steps", "grad_accum", "accumulation_steps",
    "accumulation", "accumulate",
)  # fmt: skip
NUMBERS = (*BATCH, *SEQUENCE, *ACCUMULATION)


@dataclass(frozen=True, slots=True)
class ScriptNumber:
    """A number that a script is given.

    Attributes:
        value: What it is.
        change: Makes the settings of a run with another one.
    """

    value: int
    change: Callable[[RunSettings, int], RunSettings]


def number_in_command(words: Sequence[str], names: Sequence[str]) -> ScriptNumber | None:
    """Returns the first number of a command that stands behind one of some names."""
    for index, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if name.rpartition(".")[2].replace("-", "_") not in names:
            continue
        if equals and value.isdigit():
            return ScriptNumber(int(value), _in_word(index, word.removesuffix(value)))
        if word.startswith("-") and index + 1 < len(words) and words[index + 1].isdigit():
            return ScriptNumber(int(words[index + 1]), _behind_word(index, word))
    return None


def number_in_script(found: Mapping[str, Any], names: Sequence[str]) -> ScriptNumber | None:
    """Returns the first number that the script's parser, or else its Trainer, has for some names.

    Args:
        found: What a run of the script found.
        names: In order of preference.
    """
    arguments, numbers = found["arguments"], found["trainer"]["numbers"]
    for name in names:
        if name in arguments and not isinstance(arguments[name]["value"], bool):
            return ScriptNumber(arguments[name]["value"], _of_parser(name))
    for name in names:
        if name in numbers:
            return ScriptNumber(numbers[name], _of_trainer(name))
    return None


def _in_word(index: int, prefix: str) -> Callable[[RunSettings, int], RunSettings]:
    return lambda settings, value: replace(
        settings, words={**settings.words, index: f"{prefix}{value}"}
    )


def _behind_word(index: int, flag: str) -> Callable[[RunSettings, int], RunSettings]:
    return lambda settings, value: replace(
        settings, words={**settings.words, index: flag, index + 1: str(value)}
    )


def _of_parser(name: str) -> Callable[[RunSettings, int], RunSettings]:
    return lambda settings, value: replace(settings, arguments={**settings.arguments, name: value})


def _of_trainer(name: str) -> Callable[[RunSettings, int], RunSettings]:
    return lambda settings, value: replace(
        settings, trainer_arguments={**settings.trainer_arguments, name: value}
    )
