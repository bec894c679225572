"""What a line of a record may have in it: every field with its kind and its limits, in one table.

A record may come from anywhere. Nothing of a line goes further that this table does not know, and
text goes further only with what a terminal would obey made visible.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping

from residency._memory import FORMAT, VERSION

CLASSES = ("held", "returnable", "stuck", "draining", "pooled", "outside", "free")
FAILED = "num_out_of_memory"  # allocations that have failed so far
ABOUT = ("command", "torch", "residency", "python")  # what a record says of its process
Value = str | int | float | bool | None
_Check = Callable[[object], Value]
_MOST_BYTES = 2**63 - 1
_MOST_RANKS = 2**31
_MOST_SECONDS = 1e12
_LONGEST_TEXT = 200_000


class NewerFormatError(ValueError):
    """A later version of the library wrote the record."""


def visible(text: str) -> str:
    """Returns text with control characters, line ends and half characters as their escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def checked(line: Mapping[str, object]) -> dict[str, Value]:
    """Returns the known fields of a line, each within its limits.

    Raises:
        KeyError: A field is missing.
        NewerFormatError: The line is a header of a later format.
        ValueError: A field is of another kind, or beyond its limits.
    """
    kind = line["kind"]
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"kind {reprlib.repr(kind)}")
    fields, defaults = _FIELDS[kind], _DEFAULTS.get(kind, {})
    result: dict[str, Value] = {"kind": kind}
    for name, check in fields.items():
        value = line[name] if name in line or name not in defaults else defaults[name]
        try:
            result[name] = check(value)
        except NewerFormatError:
            raise
        except ValueError as error:
            raise ValueError(f"{name} is {reprlib.repr(value)}; expected {error}") from None
    return result


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise ValueError("text")
    return visible(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _whole(low: int, high: int) -> _Check:
    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    return check


def _seconds(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MOST_SECONDS or math.isnan(value):  # type: ignore[operator, arg-type]  # a number
        raise ValueError(f"seconds from 0 to {_MOST_SECONDS:.0e}")
    return float(value)  # type: ignore[arg-type]  # a number


def _or_null(check: _Check) -> _Check:
    return lambda value: None if value is None else check(value)


def _format(value: object) -> str:
    if value != FORMAT:
        raise ValueError(repr(FORMAT))
    return FORMAT


def _version(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a version")
    if value > VERSION:
        raise NewerFormatError(f"{reprlib.repr(value)}")
    return value


_bytes = _whole(0, _MOST_BYTES)
_BOUNDARY: dict[str, _Check] = {
    "phase": _text,
    "visit": _whole(0, _MOST_BYTES),
    "thread": _whole(0, 2**64),
    "t": _seconds,
    **dict.fromkeys((*CLASSES, "capacity"), _or_null(_bytes)),
    FAILED: _whole(0, _MOST_BYTES),
}
_FIELDS: dict[str, dict[str, _Check]] = {
    "header": {
        "format": _format,
        "version": _version,
        "rank": _whole(0, _MOST_RANKS),
        "world_size": _whole(1, _MOST_RANKS),
        "started_at": _seconds,
        **dict.fromkeys(ABOUT, _or_null(_text)),
    },
    "begin": _BOUNDARY,
    "end": {
        **_BOUNDARY,
        "peak": _bytes,
        "is_peak_exact": _flag,
        "seconds": _seconds,
        "error": _or_null(_text),
    },
    "close": {
        "error": _or_null(_text),
        "phase": _or_null(_text),
        "peak": _bytes,
        FAILED: _whole(0, _MOST_BYTES),
    },
}
# Of what not every version has written.
_DEFAULTS: dict[str, dict[str, Value]] = {
    "header": {"rank": 0, "world_size": 1, "started_at": 0.0, **dict.fromkeys(ABOUT)},
    "begin": {FAILED: 0},
    "end": {"error": None, FAILED: 0},
    "close": {"error": None, "phase": None, "peak": 0, FAILED: 0},
}
