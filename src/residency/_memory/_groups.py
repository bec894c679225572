"""What holds memory in a few lines: the tensors of one list are one line, with what it grows by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from residency._memory._history import HeldHistory, held_history
from residency._memory._holders._holders import Holder
from residency._units import format_bytes

_MOST_LINES = 8
_FEWEST = 3  # of a list: fewer are named one by one
_BLOCK_BYTES = 512  # what the allocator rounds up to
_STEPS = ("step", "optimizer_step")  # of a Trainer with `ResidencyCallback`, and of any optimizer
_INDEX = re.compile(r"\[\d+\]")
_ANY = "[...]"


@dataclass(frozen=True, slots=True)
class HolderGroup:
    """The holders whose paths differ in indices alone, or a single one.

    Attributes:
        holders: The largest first.
        path: Theirs, without the index.
    """

    holders: Sequence[Holder]
    path: str

    @property
    def num_bytes(self) -> int:
        """The bytes of all."""
        return sum(holder.num_bytes for holder in self.holders)

    @property
    def each_bytes(self) -> int | None:
        """The bytes of each, as the allocator rounds them; None where they differ."""
        sizes = {-(-holder.num_bytes // _BLOCK_BYTES) for holder in self.holders}
        return sizes.pop() * _BLOCK_BYTES if len(sizes) == 1 else None

    def __str__(self) -> str:
        count = len(self.holders)
        return self.path if count == 1 else f"{self.path}: {count} tensors"


def grouped(holders: Iterable[Holder]) -> list[HolderGroup]:
    """Returns the holders in groups, the largest first."""
    by_path: dict[tuple[str, str], list[Holder]] = {}
    for holder in holders:
        by_path.setdefault((holder.kind, _INDEX.sub(_ANY, holder.path)), []).append(holder)
    groups = []
    for (_, path), members in by_path.items():
        if len(members) < _FEWEST or _ANY not in path:
            groups += [HolderGroup([holder], holder.path) for holder in members]
        else:
            groups.append(HolderGroup(members, path.removesuffix(_ANY).rstrip()))
    return sorted(groups, key=lambda group: -group.num_bytes)


def holder_lines(holders: Sequence[Holder], history: HeldHistory = held_history) -> Iterator[str]:
    """Yields the largest groups with their paths, and what grows at each visit of a phase."""
    groups = grouped(holders)
    if groups:
        yield "the largest:"
    growing = _growing(groups, history)
    for group in groups[:_MOST_LINES]:
        rate = growing[1] if growing and growing[0] is group else ""
        yield f"  {format_bytes(group.num_bytes):>12}  {group}{rate}"
        for other in group.holders[0].others[:1] if len(group.holders) == 1 else ():
            word = "" if group.holders[0].kind == "c++" else "and "
            yield f"  {'':>12}  {word}{other}"
    if len(groups) > _MOST_LINES:
        rest = sum(group.num_bytes for group in groups[_MOST_LINES:])
        yield f"  {format_bytes(rest):>12}  in {len(groups) - _MOST_LINES} more"


def _growing(groups: Iterable[HolderGroup], history: HeldHistory) -> tuple[HolderGroup, str] | None:
    """Returns the group that accounts for a steady growth, and says how; None unless there is one.

    What grew at each visit is so many of its tensors, and it has that many for each visit so far,
    but for two visits.
    """
    found: dict[int, tuple[HolderGroup, str]] = {}
    for path, num_bytes, num_visits in history.steady():
        name = path.rpartition("/")[2]
        is_step = name in _STEPS
        for group in groups:
            each, count = group.each_bytes, len(group.holders)
            if count < _FEWEST or not each or num_bytes % each:
                continue
            more = num_bytes // each
            if abs(count - more * num_visits) <= 2 * more and (is_step or id(group) not in found):
                when = "a step" if is_step else f"at each {name!r}"
                found[id(group)] = (group, f", +{more} {when}")
    return next(iter(found.values())) if len(found) == 1 else None
