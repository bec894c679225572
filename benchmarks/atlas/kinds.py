"""The list of kinds, ``kinds.txt``: each kind of rows in which a dry run differs from the card, how
far it may, and why.

A line is ``kind | held | reason``. Held is ``1 KiB``, within which peak and retained bytes are of
every row, or ``apart``. ``, torch 2.11`` behind it, or behind ``exact``, says that other torches
have another rule than the card's: there nothing is held of the kind. A line of a whole group holds
how many of its rows have their large requests in the card's order, with any torch: it may only
rise.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.atlas.compare import Likeness, Row, group_of, kind_of, likeness

CARD = Path(__file__).parent / "h100_half.jsonl.gz"
LIST = Path(__file__).parent / "kinds.txt"
_EXACT, _NEAR, _APART = "exact", "1 KiB", "apart"
_HELD = (_EXACT, _NEAR, _APART)  # from the strictest
_NO_REASON = "?"


@dataclass(frozen=True, slots=True)
class Held:
    """A line of the list: how near the rows of a kind have to be.

    Attributes:
        held: ``exact``, ``1 KiB`` or ``apart``.
        torch: The beginning of the only versions of torch that it is held of; empty for all.
        reason: Why it is not exact, or not of every torch.
    """

    held: str
    torch: str = ""
    reason: str = _NO_REASON


def read(path: Path = LIST) -> dict[str, Held]:
    """Returns the lines of the list by kind, or by group, which counts its rows in order.

    Raises:
        ValueError: A line has no such form, or a kind stands twice.
    """
    listed = {}
    for line in path.read_text("utf-8").splitlines():
        kind, what, reason = (part.strip() for part in line.split("|", 2))
        held, _, version = what.partition(", torch ")
        is_known = held in _HELD and what != _EXACT if "/" in kind else held.isdigit()
        if not is_known or kind in listed or not reason:
            raise ValueError(f"{path.name}: {line}")
        listed[kind] = Held(held, version, reason)
    return listed


def found(card: dict[str, Row], dry: dict[str, Row]) -> dict[str, str]:
    """Returns what could be held of each kind that both runs have."""
    likes: dict[str, list[Likeness]] = defaultdict(list)
    for case in card.keys() & dry.keys():
        likes[kind_of(card[case])].append(likeness(card[case], dry[case]))
    return {
        kind: _EXACT
        if all(like.is_same for like in of_kind)
        else _NEAR
        if all(like.is_near for like in of_kind)
        else _APART
        for kind, of_kind in likes.items()
    }


def in_order(card: dict[str, Row], dry: dict[str, Row]) -> dict[str, int]:
    """Returns how many rows have their large requests in order, of each group that is whole."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for case, row in card.items():
        groups[group_of(row)].append(case in dry)
    return {
        group: sum(
            likeness(row, dry[case]).is_in_order is True
            for case, row in card.items()
            if group_of(row) == group
        )
        for group, are_there in groups.items()
        if all(are_there)
    }


def faults(
    listed: dict[str, Held], card: dict[str, Row], dry: dict[str, Row], torch: str
) -> list[str]:
    """Returns a sentence for each kind of which the list holds too much, or too little.

    Args:
        listed: From `read`.
        card: The card's rows by their case.
        dry: Those of a dry run, of all kinds or of some.
        torch: The version of torch that the dry run had.
    """
    said = []
    for kind, now in sorted(found(card, dry).items()):
        entry = listed.get(kind, Held(_EXACT))
        if not torch.startswith(entry.torch):
            continue
        if _HELD.index(now) > _HELD.index(entry.held):
            said.append(f"{kind}: held is {entry.held}, and it is {now}")
        elif now != entry.held:
            said.append(f"{kind}: it is {now} by now; the list says {entry.held}")
    for group, count in sorted(in_order(card, dry).items()):
        held = int(listed[group].held) if group in listed else 0
        if count < held:
            said.append(f"{group}: {held} rows had their large requests in order, and {count} have")
    return said


def update(
    card: dict[str, Row], dry: dict[str, Row], torch: str, other: dict[str, Row] | None = None
) -> list[str]:
    """Writes the list anew from a dry run, reasons kept; returns the kinds that lack one.

    Args:
        card: The card's rows by their case.
        dry: Those of a dry run; a kind that it lacks stays as it is listed.
        torch: The version of torch that it had, which should be the card's.
        other: Rows of a dry run with another torch: a kind of which they differ is held of the
            first torch alone, and an order in both.
    """
    listed, others = read(), other or {}
    differ = {
        kind_of(dry[case])
        for case in dry.keys() & others.keys()
        if not likeness(dry[case], others[case]).is_same
    }
    for kind, held in found(card, dry).items():
        before = listed.pop(kind, Held(held))
        version = before.torch
        if others:
            version = ".".join(torch.split(".")[:2]) if kind in differ else ""
        if held != _EXACT or version:
            listed[kind] = replace(before, held=held, torch=version)
    for group, count in in_order(card, dry).items():
        least = min(count, in_order(card, others).get(group, count)) if others else count
        before = listed.get(group, Held("0", reason="rows with large requests in the card's order"))
        listed[group] = replace(before, held=str(max(least, int(before.held))))
    lines = [
        f"{kind} | {entry.held}{f', torch {entry.torch}' * bool(entry.torch)} | {entry.reason}"
        for kind, entry in sorted(listed.items())
    ]
    LIST.write_text("\n".join(lines) + "\n", "utf-8")
    return [kind for kind, entry in sorted(listed.items()) if entry.reason == _NO_REASON]
