"""Sizes in bytes, read from and written for people.

The only file in which 1024 appears: everywhere else a size is an ``int`` of bytes. Units are binary
(``KiB``, ``MiB``, ``GiB``, ``TiB``); a decimal unit is refused rather than guessed at, because the
two readings of "1 GB" differ by the 70 MiB that often decide whether a run fits. A number in a
string without a unit is refused as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from residency._errors import InvalidArgumentError

_FACTORS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_MOST_GIB = 1024  # above this, a number without a unit is one of bytes

MIB = _FACTORS["MiB"]


def parse_bytes(size: int | str, *, name: str = "size") -> int:
    """Returns a size as a whole number of bytes.

    Args:
        size: An ``int`` of bytes, or a string such as ``"512MiB"``, ``"22.3 GiB"`` or ``"4096B"``;
            what a fraction has beyond the last whole byte is left out.
        name: What the caller calls this size; the error names it.

    Raises:
        InvalidArgumentError: The size is negative, is a string without a unit or with one that is
            not binary, is a part of a byte, or is no size at all.
    """
    expected = (
        f"expected an int of bytes, or a number with one of {', '.join(_FACTORS)}, such as '512MiB'"
    )
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InvalidArgumentError(f"{name} is {size!r} ({type(size).__name__}); {expected}.")
    if isinstance(size, int):
        if size < 0:
            raise InvalidArgumentError(
                f"{name} is {size}; a size cannot be negative: give 0 or more."
            )
        return size
    match = _SIZE.fullmatch(size)
    unit = match[2] if match else ""
    if match and not unit and not float(match[1]):
        unit = "B"  # 0 is the same in every unit; by "24" one means GiB, and another one bytes
    factor = _FACTORS.get(unit)
    if match is None or factor is None:
        raise InvalidArgumentError(f"{name} is {size!r}; {expected}.{_hint(match)}")
    whole, _, digits = match[1].partition(".")
    scale: int = 10 ** len(digits)
    num_bytes, rest = divmod(int(whole + digits) * factor, scale)
    if rest and (unit == "B" or not num_bytes):
        raise InvalidArgumentError(
            f"{name} is {size!r}, which is not a whole number of bytes; round it."
        )
    return num_bytes


def _hint(match: re.Match[str] | None) -> str:
    """Returns what may have been meant by a number whose unit is none, or is missing."""
    if match is None:
        return ""
    meant = [f"{match[2][:1].upper()}iB"] if match[2] else ["GiB", "B"]
    if not match[2] and float(match[1]) >= _MOST_GIB:
        meant = ["B"]
    meant = [f"'{match[1]}{unit}'" for unit in meant if unit in _FACTORS]
    return f" Did you mean {' or '.join(meant)}?" if meant else ""


def format_bytes(num_bytes: int) -> str:
    """Returns a size as people read it: ``"512 B"``, ``"1.50 MiB"``, ``"-2.00 GiB"``."""
    unit = "B"
    for candidate, factor in _FACTORS.items():
        if abs(num_bytes) >= factor:
            unit = candidate
    if unit == "B":
        return f"{num_bytes} B"
    return f"{num_bytes / _FACTORS[unit]:.2f} {unit}"


def spell_bytes(num_bytes: int) -> str:
    """Returns a size as `parse_bytes` takes it, without rounding: ``"1536KiB"``."""
    unit = next(unit for unit, factor in reversed(_FACTORS.items()) if num_bytes % factor == 0)
    return f"{num_bytes // _FACTORS[unit]}{unit}"


def format_figure(name: str, figure: float | None) -> str:
    """Returns a figure as people read it, in the unit that its name ends with; "-" for None."""
    if figure is None:
        return "-"
    if name.endswith("bytes_per_second"):
        return f"{format_bytes(round(figure))}/s"
    if name.endswith("bytes"):
        return format_bytes(round(figure))
    if name.endswith("seconds"):
        return f"{figure:.2f} s" if figure >= 1 else f"{1000 * figure:.3f} ms"
    return str(figure)


def format_figures(title: str, figures: DataclassInstance, meanings: Mapping[str, str]) -> str:
    """Returns a line for each figure that has a meaning: its name, the figure, the meaning."""
    values = asdict(figures)
    width = max(map(len, meanings))
    lines = [
        f"  {name:<{width}}{format_figure(name, values[name]):>14}  {meaning}".rstrip()
        for name, meaning in meanings.items()
    ]
    return "\n".join([title, *lines])
