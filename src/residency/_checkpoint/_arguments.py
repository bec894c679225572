"""What ``Checkpointer`` is given, checked before anything is done."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any, SupportsIndex, cast

from residency._checkpoint._disk._header import METADATA
from residency._checkpoint._disk._publish import Retention
from residency._checkpoint._document._nodes import KIND, is_plain_key
from residency._checkpoint._rng import RNG
from residency._errors import InvalidArgumentError
from residency._units import parse_bytes


def retention(keep: int | Retention | None) -> Retention | None:
    """Returns what stays, or None where all does."""
    if keep is None or isinstance(keep, Retention):
        return keep
    check_count("keep", keep)
    return Retention(newest=keep)


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Raises InvalidArgumentError unless a value is a whole number of at least so many."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(
            f"{name} is {value!r}; expected a whole number of at least {least}."
        )


def check_seconds(name: str, value: object) -> float:
    """Returns a time; raises InvalidArgumentError unless it is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidArgumentError(f"{name} is {value!r}; expected a number of seconds above 0.")
    return float(value)


def spare_bytes(spare: int | str | None) -> int | None:
    """Returns the spare in bytes, or None where each optimizer has its own."""
    if spare is None:
        return None
    return sys.maxsize if spare == "all" else parse_bytes(spare, name="spare")


def check_metrics(metrics: object) -> dict[str, float]:
    """Returns the figures of a step as numbers, read now.

    Raises:
        InvalidArgumentError: A name is no string, or a figure is no number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise InvalidArgumentError(
            f"metrics is {metrics!r}; expected a mapping of names to numbers, such as "
            '{"loss": 0.5}.'
        )
    return {name: _figure(name, value) for name, value in metrics.items()}


def _figure(name: str, value: Any) -> float:
    error: Exception | None = None
    if not isinstance(value, str | bytes | bytearray):  # float() would parse them
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as found:  # a tensor of two
            error = found
    raise InvalidArgumentError(
        f"the metric {name!r} is {value!r}; expected one number. Nothing was saved."
    ) from error


def check_step(step: object) -> int:
    """Returns a step as Python's own integer; numpy's and others' are taken, too.

    Raises:
        InvalidArgumentError: It is no whole number of at least 0.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(cast(SupportsIndex, step))
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidArgumentError(f"step is {step!r}; expected a whole number of at least 0.")
    return number


def check_state(state: object, rng: bool) -> None:
    """Raises InvalidArgumentError unless this can be saved as a state."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise InvalidArgumentError(
            f"the state is a {type(state).__name__}; expected a mapping with names as keys, such "
            'as {"model": model, "optimizer": optimizer}.'
        )
    unfit = [name for name in state if name in ("", METADATA) or not is_plain_key(name)]
    if unfit:
        raise InvalidArgumentError(
            f"the state has the name {unfit[0]!r}; expected names with a letter in them, none that "
            f"begins with {KIND!r}, none that UTF-8 cannot write, and not {METADATA!r}, which the "
            "format of the files has for itself."
        )
    if rng and RNG in state:
        raise InvalidArgumentError(
            f"the state has the name {RNG!r}, under which the random number generators are saved; "
            "give it another name, or pass rng=False."
        )
