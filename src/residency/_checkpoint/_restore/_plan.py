"""What a restore fills, from where, and all that stands against it, before any byte moves.

Invariant, which ``tests/checkpoint/restore/test_document.py`` tries to break: making a plan changes
nothing. A plan that is refused leaves every object as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from residency._checkpoint._capture._walk import layout_problem
from residency._checkpoint._document._decode import tensor_names
from residency._checkpoint._document._nodes import Node
from residency._checkpoint._restore._boxes import Box, whole_box
from residency._checkpoint._restore._values import SavedValue
from residency._checkpoint._sources._source import Source, StoredTensor
from residency._dtensor import is_sharded, local_of, shard_offsets
from residency._errors import RefusedError, in_short, warn
from residency._storages import overlaps_itself
from residency._units import MIB

_MOST_LINES = 40


@dataclass(slots=True, eq=False)
class Target:
    """A tensor to fill, and what fills it.

    Attributes:
        name: How errors call it.
        local: Its bytes, on the device or on the host; of a ``DTensor``, those of this rank.
        box: Where in the whole tensor they are.
        whole_shape: The whole tensor's.
        shards: What is stored of it, of which each element is in one place.
    """

    name: str
    local: Tensor
    box: Box
    whole_shape: tuple[int, ...]
    shards: Sequence[StoredTensor]


@dataclass(slots=True, eq=False)
class MetObject:
    """An object that is here and is planned under one name; another name may be the same object.

    Attributes:
        path: The name.
        node: What is saved under it.
        here: The object, which lives as long as its ``id`` is asked for.
        result: What is to stand in its place; see ``DocumentPlan.visit``.
    """

    path: str
    node: Node
    here: object
    result: object = None


@dataclass(frozen=True, slots=True)
class Differences:
    """The points in which a checkpoint and what is asked of it do not agree.

    Attributes:
        missing: Names that are to be filled and are not in the checkpoint.
        unexpected: Names in the checkpoint that nothing takes.
        differing: What is in both, but of another shape, dtype or kind, as sentences.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.differing)

    def __str__(self) -> str:
        parts = [
            *_listed("missing in the checkpoint", self.missing),
            *_listed("in the checkpoint, with no place here", self.unexpected),
            *_listed("different", self.differing),
        ]
        return "\n".join(parts)


class Remedied(str):
    """A difference that says itself what to do, where neither a cast nor a name would help."""

    __slots__ = ()


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    more = len(lines) - _MOST_LINES
    rest = [f"  and {more} more"] if more > 0 else []
    return [
        f"{title} ({len(lines)}):",
        *(f"  {in_short(line)}" for line in lines[:_MOST_LINES]),
        *rest,
    ]


@dataclass(slots=True)
class RestorePlan:
    """The work of a restore, as it is collected.

    The tensors are data, which is checked, sorted and read at once. What comes before and after are
    calls, each a function with its arguments, in the order in which they are made.

    Attributes:
        source: What is stored, and where.
        staging_bytes: The ring's; what is compared of a save takes as much.
        targets: Tensors to fill.
        values: What is read anew: understood before any target is filled.
        fresh: Host tensors that are made for values, by name.
        of_values: What fills those.
        late: Memory that is written after all targets, by name; no target may lie in it.
        seen: What is here and was planned already, by ``id``.
        taken: What was saved for each tensor of an optimizer's group, by the tensor's memory.
        checks: What looks at the values once they are understood, with nothing changed.
        before: What makes room for bytes once the plan stands; it may refuse, with nothing changed.
        after: What puts values in place once all bytes are there.
    """

    source: Source
    staging_bytes: int = 64 * MIB
    targets: list[Target] = field(default_factory=list)
    values: list[SavedValue] = field(default_factory=list)
    fresh: dict[str, Tensor] = field(default_factory=dict)
    of_values: list[Target] = field(default_factory=list)
    late: list[tuple[str, Tensor]] = field(default_factory=list)
    seen: dict[int, MetObject] = field(default_factory=dict)
    taken: dict[object, Node] = field(default_factory=dict)
    checks: list[Callable[[], object]] = field(default_factory=list)
    before: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def fill(self, name: str, tensor: Tensor, stored_name: str | None = None) -> None:
        """Plans to fill a tensor, or notes why it cannot be; what shares bytes with others, as a
        tied one does, is for ``settle_overlaps``.

        Args:
            name: What the tensor is called.
            tensor: Filled in place later; a ``DTensor`` in its local part.
            stored_name: What it is called in the checkpoint, where that is another name.
        """
        shards = self.source.tensors.get(stored_name or name)
        if shards is None:
            self.missing.append(name)
            return
        target = target_of(name, tensor, shards)
        problem = difference(target)
        if problem is not None:
            self.differing.append(problem)
            return
        self.targets.append(target)

    def value(
        self, node: Node, path: str, check: Callable[[Any], object] | None = None
    ) -> SavedValue:
        """Plans to read a node's value anew; the tensors in it are on the host.

        Args:
            node: The node.
            path: Where it stands in the state.
            check: Raises where a value cannot be used; called before anything is changed.
        """
        for name in tensor_names(node):
            self.make_fresh(name)
        made = SavedValue(path, node, check)
        self.values.append(made)
        return made

    def make_fresh(self, name: str) -> None:
        """Plans a host tensor; those that shared their bytes when they were saved do so again."""
        if name in self.fresh:
            return
        view = self.source.views.get(name)
        dtype = None if view is None else view.dtype
        if view is not None and view.of is not None and dtype and not view.start % dtype.itemsize:
            self.make_fresh(view.of)
            flat = self.fresh[view.of].reshape(-1).view(torch.uint8)[view.start :]
            whole = flat[: flat.numel() // dtype.itemsize * dtype.itemsize]
            self.fresh[name] = whole.view(dtype).as_strided(view.shape, view.stride)
            return
        shards = self.source.tensors[name]
        made = torch.empty(tuple(shards[0].whole_shape), dtype=shards[0].dtype, device="cpu")
        self.fresh[name] = made
        self.of_values.append(target_of(name, made, shards))

    def clear(self) -> None:
        """Lets go of every tensor."""
        for each in (self.targets, self.of_values, self.values, self.late):
            each.clear()
        for later in (self.fresh, self.seen, self.checks, self.before, self.after):
            later.clear()

    def differences(self) -> Differences:
        """Returns all that was noted."""
        return Differences(tuple(self.missing), tuple(self.unexpected), tuple(self.differing))

    def check(self, what: str, *, strict: bool) -> Differences:
        """Refuses a plan with differences, or warns of what it leaves out.

        Raises:
            RefusedError: There are differences, and ``strict`` is set. All are in the message.
        """
        found = self.differences()
        if not found:
            return found
        if strict:
            is_remedied = all(isinstance(line, Remedied) for line in found.differing)
            is_told = is_remedied and not (found.missing or found.unexpected)
            advice = "Follow each line" if is_told else "Cast or rename the entries that differ"
            raise RefusedError(
                f"{what} does not fit; nothing was changed. {advice}, or pass strict=False to "
                f"leave it out.\n{found}"
            )
        warn(f"{what} does not fit; this is left out:\n{found}")
        return found


def target_of(name: str, tensor: Tensor, shards: Sequence[StoredTensor]) -> Target:
    """Describes a tensor to fill from what is stored of it.

    Raises:
        RefusedError: It is a partial sum, of which no rank has the value, or has no bytes.
    """
    if is_lazy(tensor):
        raise RefusedError(
            f"{name} is a {type(tensor).__name__}, which has no shape before the first forward. "
            "Nothing was changed; run one first."
        )
    is_shard = is_sharded(tensor)
    local = local_of(tensor) if is_shard else tensor
    if local.requires_grad:
        local = local.detach()
    shape = tuple(tensor.shape)
    if local.is_meta:
        raise RefusedError(
            f"{name} is on meta and has no bytes to fill. Nothing was changed; call to_empty on "
            "its module first, and make values anew that no save has, such as buffers that are "
            "not persistent: to_empty leaves them without values."
        )
    if not is_shard:
        box = whole_box(shape)
        return Target(name, local, box, box.shape, shards)
    offsets = shard_offsets(name, tensor, done="changed")
    return Target(name, local, Box(offsets, tuple(local.shape)), shape, shards)


def box_of(shard: StoredTensor) -> Box:
    """Returns where in the whole tensor a stored shard is."""
    return Box(tuple(shard.offsets), tuple(shard.shape))


def is_whole(target: Target, shard: StoredTensor) -> bool:
    """Returns whether what is stored here is just what a target has, as nearly always."""
    return shard.shape == target.box.shape and shard.offsets == target.box.offsets


def difference(target: Target) -> str | None:
    """Returns what stands against filling a target, or None."""
    first = target.shards[0]
    name, local = target.name, target.local
    if tuple(first.whole_shape) != target.whole_shape:
        return f"{name}: saved shape {tuple(first.whole_shape)}, here {target.whole_shape}"
    if first.dtype != local.dtype:
        return f"{name}: saved dtype {first.dtype}, here {local.dtype}"
    problem = layout_problem(local)
    if problem is not None:
        return f"{name}: here {problem[0]}"
    if not local.is_contiguous() and overlaps_itself(local):
        return f"{name}: several of its elements share their bytes here, as in an expanded tensor"
    if is_whole(target, first):
        return None
    overlaps = (target.box.overlap(box_of(shard)) for shard in target.shards)
    num_saved = sum(part.numel for part in overlaps if part is not None)
    if num_saved < math.prod(target.box.shape):
        wanted = math.prod(target.box.shape)
        return f"{name}: of the {wanted} elements of this rank {num_saved} were saved"
    return None
