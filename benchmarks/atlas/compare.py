"""Holds the rows of two runs against each other: of a card and a dry run, or of two torches."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.atlas.rows import RESULTS

Row = dict[str, Any]
NEAR_BYTES = 1024
_PASSES = ("fw", "bw")
_GROUPS = {"sdpa": "attention", "conv": "convolutions", "conv refused": "convolutions"}


@dataclass(frozen=True, slots=True)
class Likeness:
    """How a row of one run is like that of another.

    Attributes:
        is_same: Peak and retained bytes are, in both passes.
        is_whole: The number of requests and the bytes asked for are, too.
        is_near: Peak and retained bytes are no more than 1 KiB apart.
        is_in_order: Large requests are the same, in their order; None where no run listed any.
    """

    is_same: bool
    is_whole: bool
    is_near: bool
    is_in_order: bool | None


def load(path: Path) -> dict[str, Row]:
    """Returns the rows of a file, plain or gzipped, by their case; other lines are passed by."""
    return by_case(json.loads(line) for line in _lines(path) if line.startswith('{"op"'))


def about(path: Path) -> dict[str, str]:
    """Returns what the rows of a file were made with: card, torch, date."""
    told = [line for line in _lines(path) if line.startswith('{"about"')]
    return dict(json.loads(told[0])["about"]) if told else {}


def _lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from file


def by_case(rows: Iterable[Row]) -> dict[str, Row]:
    """Returns rows by what names their case."""
    return {case_of(row): row for row in rows}


def case_of(row: Row) -> str:
    """Returns what names the case of a row."""
    return json.dumps({k: v for k, v in row.items() if k not in RESULTS}, sort_keys=True)


def group_of(row: Row) -> str:
    """Returns the group of a row, which its kinds' names begin with."""
    is_sample = row.keys() - RESULTS == {"op", "dtype", "n"}
    if is_sample and not row["op"].startswith("step "):
        return "opinfo"
    return _GROUPS.get(row["op"], "shapes")


def kind_of(row: Row) -> str:
    """Returns the kind of a row: all whose requests follow one rule of the source."""
    words = [row["op"], "channels_last" if row.get("channels_last") else None]
    if row["op"] == "sdpa":
        words = ["fp32" if row["dtype"] == "fp32" else "half", row.get("backend")]
        words += ["grouped" if row["gqa"] else None]
        words += ["dropout" if row["mask"] == "dropout" else None]
    return f"{group_of(row)}/{' '.join(filter(None, words))}"


def likeness(a: Row, b: Row) -> Likeness:
    """Returns how two rows of a case are alike; two that failed are."""
    if "error" in a or "error" in b or any((a[p] is None) != (b[p] is None) for p in _PASSES):
        both = "error" in a and "error" in b
        return Likeness(both, both, both, None)
    passes = [(a[name], b[name]) for name in _PASSES if a[name] is not None]
    apart = [abs(x[i] - y[i]) for x, y in passes for i in (2, 3)]
    lists = [(x[4:], y[4:]) for x, y in passes if x[4:] and y[4:]]
    has_large = any(x[0] or y[0] for x, y in lists)
    return Likeness(
        is_same=not any(apart),
        is_whole=all(x[:4] == y[:4] for x, y in passes),
        is_near=max(apart, default=0) <= NEAR_BYTES,
        is_in_order=all(x == y for x, y in lists) if has_large else None,
    )


def table(a: dict[str, Row], b: dict[str, Row], all_kinds: bool = False) -> list[str]:
    """Returns a table of the groups, and of the kinds whose rows are not all the same.

    Args:
        a: Rows of one run by their case.
        b: Rows of another.
        all_kinds: Whether kinds have a line of which every row is the same.
    """
    found: dict[str, list[Likeness]] = defaultdict(list)
    for case in a.keys() & b.keys():
        like = likeness(a[case], b[case])
        found[group_of(a[case])].append(like)
        found[kind_of(a[case])].append(like)
    lines = [
        f"{len(a)} rows and {len(b)}, {len(a.keys() & b.keys())} cases in both",
        f"{'kind':44} {'rows':>5} {'same':>5} {'all 4':>5} {'1 KiB':>5} {'large in order':>14}",
    ]
    for name, likes in sorted(found.items()):
        if all_kinds or "/" not in name or not all(like.is_whole for like in likes):
            ordered = [like.is_in_order for like in likes if like.is_in_order is not None]
            lines.append(
                f"{name:44} {len(likes):5} {sum(like.is_same for like in likes):5} "
                f"{sum(like.is_whole for like in likes):5} {sum(like.is_near for like in likes):5} "
                f"{sum(ordered):6} of {len(ordered):4}"
            )
    return lines


def differences(a: dict[str, Row], b: dict[str, Row], kind: str) -> list[str]:
    """Returns two lines for each case of a kind that differs: what each run has."""
    lines = []
    for case in sorted(a.keys() & b.keys()):
        if kind_of(a[case]) == kind and not likeness(a[case], b[case]).is_whole:
            lines += [case, *(f"    {_shown(row)}" for row in (a[case], b[case]))]
    return lines


def _shown(row: Row) -> str:
    return row.get("error") or "  ".join(f"{name} {row[name]}" for name in _PASSES)
