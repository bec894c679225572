"""The sizes that torch's out-of-memory messages tell, rounded as they are there. No torch here."""

from __future__ import annotations

import re

from residency._errors import InvalidArgumentError
from residency._units import parse_bytes

_SIZE = r"(\d+(?:\.\d+)?) ?([KMGT]iB|B|bytes)"
_ASKED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_HELD = re.compile(rf"{_SIZE} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_ALLOWED = re.compile(rf"{_SIZE} allowed;")  # only below torch's limit of this process


def asked_bytes(message: str) -> int | None:
    """Returns how many bytes were asked for when memory ran out; None if it is not stated."""
    return _size_in(message, _ASKED)


def held_bytes(message: str) -> int | None:
    """Returns how many bytes live tensors held then; None if it is not stated."""
    return _size_in(message, _HELD)


def room_below_limit(message: str) -> int | None:
    """Returns what the process was still allowed to take of the device; None without a limit."""
    patterns = (_ALLOWED, _HELD, _UNALLOCATED)
    allowed, held, unallocated = (_size_in(message, pattern) for pattern in patterns)
    if allowed is None or held is None or unallocated is None:
        return None
    return max(0, allowed - held - unallocated)


def _size_in(message: str, pattern: re.Pattern[str]) -> int | None:
    match = pattern.search(message)
    if match is None:
        return None
    unit = "B" if match[2] == "bytes" else match[2]
    try:
        return parse_bytes(f"{round(float(match[1]) * 100)}{unit}") // 100
    except InvalidArgumentError:
        return None
