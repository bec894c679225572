"""The rows of the table: what every run measures, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STEPS = "peak of three steps"
HELD = "held between steps"
SAVE = "peak of the save"
BEFORE = "held by a fresh process, before its load"
LOAD = "peak of the load"
LOADED = "held after the load"
STEPS_AFTER = "peak of three steps after it"
FIGURES = (STEPS, HELD, SAVE, BEFORE, LOAD, LOADED, STEPS_AFTER)

LOADED_AGAINST_SAVED = "loaded against saved"
RESUMED = "resumed run against the uninterrupted one"
AGAINST_PLAIN_SAVED = "after three steps, against the first column"
AGAINST_PLAIN = "after six steps, against the first column"

LOSSES = "losses"
LOSSES_AFTER = "losses after the resume"
RATES = "rates"
_MIB = 2**20
_NOTHING = "-"

Result = Mapping[str, Any]


def merged(results: Iterable[Result]) -> dict[str, Any]:
    """Returns one result of a kind from those of its processes."""
    found: dict[str, Any] = {}
    for result in results:
        for key, value in result.items():
            if isinstance(value, dict):
                found[key] = {**found.get(key, {}), **value}
            elif key in ("stand-ins", "changed"):
                found[key] = sorted({*found.get(key, ()), *value})
            else:
                found[key] = value
    return found


def table(titles: Mapping[str, str], results: Mapping[str, Result | None]) -> list[str]:
    """Returns the lines of a project's table.

    Args:
        titles: What each kind of run is called, in the order of the columns.
        results: What each found; None for one that failed.
    """
    columns = [results.get(kind) for kind in titles]
    names = list(dict.fromkeys(n for c in columns if c for n in c.get("differ", {})))
    lines = [
        _line("allocated on the device, MiB", titles.values()),
        _line("---", ["---:"] * len(columns)),
        *(_line(row, [_size(column, row) for column in columns]) for row in FIGURES),
        _line("**tensors that differ in a bit**", ["" for _ in columns]),
        *(_line(name, [_count(column, name) for column in columns]) for name in names),
        _line("losses after the resume", [_losses(column) for column in columns]),
    ]
    if any(column and RATES in column for column in columns):
        lines.append(_line("rates and counters after the load", [_rates(c) for c in columns]))
    return lines


def _line(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def _size(column: Result | None, row: str) -> str:
    if column is None:
        return "failed"
    found = column["figures"].get(row) if "figures" in column else None
    return _NOTHING if found is None else f"{found / _MIB:.1f}"


def _count(column: Result | None, name: str) -> str:
    found = column and column.get("differ", {}).get(name)
    if not found:
        return _NOTHING
    differ, count = found
    return f"{differ} of {count}" if not differ else f"**{differ} of {count}**"


def _losses(column: Result | None) -> str:
    if not column or LOSSES_AFTER not in column:
        return _NOTHING
    expected: Sequence[float] = column[LOSSES][-len(column[LOSSES_AFTER]) :]
    return "as uninterrupted" if column[LOSSES_AFTER] == expected else "**others**"


def _rates(column: Result | None) -> str:
    if not column or RATES not in column:
        return _NOTHING
    saved, loaded = column[RATES]
    if saved == loaded:
        return "as saved"
    pairs = [
        f"{now:.3g} for {then:.3g}" for then, now in zip(saved, loaded, strict=True) if then != now
    ]
    return f"**{', '.join(pairs)}**"
