"""Into which files a rank's tensors go, and how these are named after the state.

A file costs two waits for the disk, so their number is bounded: each top-level name has its own,
unless there are many. Names of files are safe on every file system, whatever the state's names are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from residency._checkpoint._disk._manifest import file_name
from residency._checkpoint._disk._parts import FilePlan, Stores
from residency._checkpoint._document._nodes import ARRAYS, TENSOR, Node, kind_of, pairs_of

SHARED = "tensors"
"""The name of the file for all tensors that have no file of their own."""

_MOST_OWN_FILES = 32
_MOST_LETTERS = 100  # of a file's name, without the ending that has the rank


def plan_files(
    tree: Node, parts: Iterable[Stores], *, rank: int, world_size: int
) -> list[FilePlan]:
    """Returns which parts go into which files.

    Each top-level name has a file. Where there are more than 32, tensors that are directly at the
    top share one; of the rest, the 32 with the most bytes keep a file each and the others go there.

    Args:
        tree: The document's tree.
        parts: What is written, by names that begin with a top-level name.
        rank: This process's.
        world_size: The number of ranks.
    """
    nodes: dict[str, object] = {key: node for key, node in pairs_of(tree) if isinstance(key, str)}
    by_top: dict[str, list[Stores]] = {}
    for part in parts:
        by_top.setdefault(_top_of(part.record.name, nodes), []).append(part)
    own = set(by_top)
    if len(own) > _MOST_OWN_FILES:
        own = {top for top in own if kind_of(nodes.get(top)) not in (TENSOR, *ARRAYS)}
    if len(own) > _MOST_OWN_FILES:
        sizes = {top: sum(part.record.num_bytes for part in by_top[top]) for top in own}
        own = set(sorted(own, key=lambda top: -sizes[top])[:_MOST_OWN_FILES])
    by_file: dict[str, list[Stores]] = {}
    used: set[str] = {SHARED} if len(own) < len(by_top) else set()
    for top, of_top in by_top.items():
        name = _file_of(top, used) if top in own else SHARED
        by_file.setdefault(name, []).extend(of_top)
    return [
        FilePlan(file_name(name, rank=rank, world_size=world_size), of_file)
        for name, of_file in by_file.items()
    ]


def _top_of(name: str, tops: Iterable[str]) -> str:
    """Returns the longest top-level name that a tensor's name begins with."""
    end = len(name)
    while end > 0:
        if name[:end] in tops:
            return name[:end]
        end = name.rfind(".", 0, end)
    return ""


def _file_of(top: str, used: set[str]) -> str:
    """Returns a name for the file of a top-level name that no other file has, in any case."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", top)[:_MOST_LETTERS].lstrip("-") or "state"
    name, count = plain, 1
    while name.lower() in used:
        count += 1
        name = f"{plain}_{count}"
    used.add(name.lower())
    return name
