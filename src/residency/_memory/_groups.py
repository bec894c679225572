"""What holds memory in a few lines: a list, the graph behind a tensor, or what a kept error's
functions left is one line each, with what it grows by.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from residency._memory._history import SteadyGrowth
from residency._memory._holders._holders import Holder
from residency._memory._kept_errors import TRAIL, kept_error_of
from residency._transfer import align_up
from residency._units import format_bytes

_MOST_LINES = 8
_FEWEST = 3  # of a list: fewer are named one by one
_INDEX = re.compile(r"\[(?:\d+|'[^']*\d[^']*')\]")  # of a list, or a key with a number in it
_ANY = "[...]"
_LEAST_SHARE, _MOST_SHARE = 0.7, 1.3  # of a growth: what accounts for it holds about as much
_SLACK_VISITS = 3  # beside this share: what one step holds for a while
_INACCURACY = 0.1  # of the growth of a list whose tensors are of one size
_GRAPH, _ERROR, _LIST, _CYCLE = "graph", "error", "list", "cycle"
IN_CYCLES = "reference cycle: "  # begins the paths of what nothing but cycles keep


@dataclass(frozen=True, slots=True)
class HolderGroup:
    """The holders of a list, of a graph or of a kept error, or a single one.

    Attributes:
        holders: The largest first.
        path: What leads to all: the list, the tensor whose graph it is, the error.
        what: ``"graph"``, ``"error"``, ``"list"``, ``"cycle"``, or ``""`` for a single one.
    """

    holders: Sequence[Holder]
    path: str
    what: str = ""

    @property
    def num_bytes(self) -> int:
        """The bytes of all."""
        return sum(holder.num_bytes for holder in self.holders)

    @property
    def kind(self) -> str:
        """The kind of the largest holder."""
        return self.holders[0].kind

    @property
    def each_bytes(self) -> int | None:
        """The bytes of each, as the allocator rounds them; None where they differ."""
        sizes = {align_up(holder.num_bytes) for holder in self.holders}
        return sizes.pop() if len(sizes) == 1 else None

    def __str__(self) -> str:
        if not self.what:
            return self.path
        detail = {
            _GRAPH: " and the graph behind it",
            _ERROR: ", an error that is kept, with the values of the functions that it left",
        }.get(self.what, "")
        return f"{self.path}{detail}: {len(self.holders)} tensors"


def grouped(holders: Iterable[Holder], *, error: str = "") -> list[HolderGroup]:
    """Returns the holders in groups, the largest first.

    Args:
        holders: What a search found.
        error: The name with which paths through the error begin that is explained, and not kept.
    """
    found = list(holders)
    by_key: dict[tuple[str, str], list[Holder]] = {}
    for holder in found:
        by_key.setdefault(_key_of(holder, error), []).append(holder)
    groups = []
    for (what, path), members in by_key.items():
        is_graph = any(holder.kind == "autograd" for holder in members)
        if what == _ERROR:
            groups.append(HolderGroup(members, path, _ERROR))
        elif len(members) < _FEWEST or not (is_graph or _ANY in path or _is_cycle(path)):
            groups += [HolderGroup([holder], holder.path) for holder in members]
        else:
            kind = _GRAPH if is_graph else _CYCLE if _is_cycle(path) else _LIST
            groups.append(HolderGroup(members, path.removesuffix(_ANY).rstrip(), kind))
    return sorted(groups, key=lambda group: -group.num_bytes)


def _is_cycle(path: str) -> bool:
    return path.startswith(IN_CYCLES)


def _key_of(holder: Holder, error: str) -> tuple[str, str]:
    whole = holder.root or holder.path
    kept = kept_error_of(whole)
    if kept is not None and not (error and whole.startswith(f"{error}{TRAIL} ")):
        return _ERROR, kept
    if holder.kind in ("tensor", "autograd"):
        return "", _INDEX.sub(_ANY, whole)
    return holder.kind, _INDEX.sub(_ANY, holder.path)


def holder_lines(
    groups: Sequence[HolderGroup], growing: Mapping[int, str] | None = None
) -> Iterator[str]:
    """Yields the largest groups with their paths, and how those grow that do.

    Args:
        groups: What `grouped` returned.
        growing: What is said of groups that grow, by their place among them.
    """
    said = growing or {}
    if groups:
        yield "the largest:"
    shown = sorted({*range(min(_MOST_LINES, len(groups))), *said})
    for index in shown:
        group = groups[index]
        rate = f", {said[index]}" if index in said else ""
        yield f"  {format_bytes(group.num_bytes):>12}  {group}{rate}"
        for other in group.holders[0].others[:1] if not group.what else ():
            word = "" if group.kind == "c++" else "and "
            yield f"  {'':>12}  {word}{other}"
    if len(groups) > len(shown):
        rest = sum(group.num_bytes for at, group in enumerate(groups) if at not in set(shown))
        yield f"  {format_bytes(rest):>12}  in {len(groups) - len(shown)} more"


def growing_groups(groups: Sequence[HolderGroup], growth: SteadyGrowth | None) -> dict[int, str]:
    """Returns which groups account for a growth, by their places, and how each grows.

    One does that holds about as many bytes as have come since the visits began. Where none does,
    those lists do together that have as many tensors for each visit, if they hold as much in all.
    """
    if growth is None:
        return {}
    able = [at for at, group in enumerate(groups) if _may_grow(group)]
    alone = [at for at in able if _is_alone(groups[at], growth)]
    if len(alone) == 1:
        return {alone[0]: _rate(groups[alone[0]], growth, growth.bytes_per_visit)}
    if alone:
        return {}
    listed = [at for at in able if _a_visit(groups[at], growth.num_visits) is not None]
    if not _accounts(sum(groups[at].num_bytes for at in listed), growth):
        return {}
    return {
        at: _rate(groups[at], growth, groups[at].num_bytes // growth.num_visits) for at in listed
    }


def _may_grow(group: HolderGroup) -> bool:
    return group.what != _ERROR and (group.kind in ("tensor", "autograd") or len(group.holders) > 2)


def _is_alone(group: HolderGroup, growth: SteadyGrowth) -> bool:
    more = _a_visit(group, growth.num_visits)
    if group.what in (_LIST, _CYCLE) and group.each_bytes and more is not None:
        return abs(more * group.each_bytes / growth.bytes_per_visit - 1) <= _INACCURACY
    return _accounts(group.num_bytes, growth)


def _accounts(num_bytes: int, growth: SteadyGrowth) -> bool:
    slack = _SLACK_VISITS * growth.bytes_per_visit
    least, most = _LEAST_SHARE * growth.total_bytes, _MOST_SHARE * growth.total_bytes
    return least - slack <= num_bytes <= most + slack and num_bytes > 2 * growth.bytes_per_visit


def _a_visit(group: HolderGroup, num_visits: int) -> int | None:
    """Returns how many tensors more a list has for each visit; None where it is not so many."""
    count = len(group.holders)
    more = max(1, round(count / num_visits))
    is_so = count >= _FEWEST and abs(count - more * num_visits) <= 2 * more
    return more if is_so else None


def _rate(group: HolderGroup, growth: SteadyGrowth, num_bytes: int) -> str:
    more = _a_visit(group, growth.num_visits)
    if group.what in (_LIST, _CYCLE) and group.each_bytes and more is not None:
        return f"+{more} {growth.when}"
    return f"+{format_bytes(num_bytes)} {growth.when}"
