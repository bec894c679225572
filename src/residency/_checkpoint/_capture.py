"""Takes the bytes of a state tree as they are at one call, while training goes on.

What the host holds is copied at the call; what the device holds is copied on the d2h lane, buffers
first, with an event after every group; what an offloaded optimizer holds is lent. Nothing waits on
the host, and no device memory is allocated. Invariant: every region and every loan is given back
exactly once, after the last copy into it.

[Note: the order of a capture] Tensors that others than optimizers may change come first, and the
current stream waits for that group alone before the call returns. Parameters and states follow;
their writers wait at the gate, which knows for each storage the event after its copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from residency import _device
from residency._checkpoint._blocks import Block, Blocks, Layout, make_blocks
from residency._checkpoint._sums import Sums
from residency._checkpoint._tree import Description, describe, end_loans
from residency._errors import CheckpointError, InvalidArgumentError
from residency._transfer import (
    Gate,
    Lanes,
    Region,
    SlabArena,
    gate_of,
    lanes_of,
    local_of,
    memory_of,
    watch_optimizers,
)
from residency._units import parse_bytes

_GROUP_BYTES = parse_bytes("64MiB")
_PAGE = parse_bytes("4KiB")
_LONG = parse_bytes("64KiB")


class Group:
    """Is what one event covers: copies of some blocks to the host.

    Attributes:
        event: The event after the copies, None where they are done.
        sources: What keeps the copied storages alive until then.
        sums: Those over all bytes before and after, where they were asked for.
    """

    def __init__(self) -> None:
        self.event: torch.Event | None = None
        self.sources: list[Tensor] = []
        self.sums: Sums | None = None

    def finish(self) -> None:
        """Blocks the host until the copies are done; may be called from any thread, and again."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None
            self.sources = []
            if self.sums is not None:
                self.sums.let_go()


class Held:
    """Holds the bytes of one block on the host until they are released.

    Attributes:
        block: What the bytes are.
        group: The copies that bring them.
    """

    def __init__(self, block: Block, arena: SlabArena, region: Region | None) -> None:
        self.block = block
        self.group = Group()
        self._arena = arena
        self._region = region
        self._is_released = False

    @property
    def host(self) -> Tensor:
        """Returns the span's bytes, ``uint8`` of shape ``[num_bytes]``."""
        if self._region is None:
            return self.block.span
        return self._region.slab.data.narrow(0, self._region.offset, self.block.num_bytes)

    def final(self) -> Tensor:
        """Returns the span's bytes once they are final.

        Raises:
            CheckpointError: Somebody wrote into the source while it was copied.
        """
        lent = self.block.lent
        if lent is not None and lent.written is not None:
            lent.written.synchronize()
        self.group.finish()
        if self.group.sums is not None and self.group.sums.differs(self.block):
            names = ", ".join(self.block.layouts)
            raise CheckpointError(
                f"{names} was written while it was being copied, by code that passes no gate. "
                "The save was dropped; put that write into `with residency.mutating(tensor):`."
            )
        return self.host

    def is_done(self) -> bool:
        """Says whether the bytes are final, without a wait."""
        events = [self.group.event, self.block.lent.written if self.block.lent else None]
        return all(event is None or event.query() for event in events)

    def keep(self, final: Tensor) -> Tensor:
        """Hands the final bytes over for good: the tensor that it returns keeps the memory."""
        self._is_released = True
        if self._region is None:
            return final
        return self._arena.tensor(self._region, torch.uint8, [self.block.num_bytes], [1])

    def stored(self) -> memoryview:
        """Returns the final bytes in the order in which they are stored."""
        final = self.final()
        if self.block.gather is not None:
            final = view_of(final, self.block.gather).contiguous().view(-1).view(torch.uint8)
        return memory_of(final)

    def release(self) -> None:
        """Gives the memory back; waits for a copy into it that is still under way."""
        if self._is_released:
            return
        self._is_released = True
        self.group.finish()
        if self.block.lent is not None:
            self.block.lent.give_back()
        elif self._region is not None:
            self._arena.release(self._region)


class Capture:
    """Is a state tree's bytes at one moment, on their way to the host or there.

    Attributes:
        description: The tree.
        blocks: What was copied, and how tensors lie in it.
        held: The bytes, for each block.
    """

    def __init__(self, description: Description, blocks: Blocks, held: Sequence[Held]) -> None:
        self.description = description
        self.blocks = blocks
        self.held = tuple(held)

    @property
    def document(self) -> dict[str, Any]:
        """Returns the JSON document of the tree."""
        return {"tree": self.description.tree, "tensors": self.blocks.special}

    def release(self) -> None:
        """Gives all memory back, and lets go of what the caller has."""
        for held in self.held:
            held.release()
        self.held = ()
        self.blocks.blocks.clear()
        self.description.leaves.clear()


def capture(
    tree: Any,
    *,
    arena: SlabArena,
    keep: bool = False,
    verify: bool = False,
    rank: int | None = None,
) -> Capture:
    """Begins to copy a state tree; returns when all copies are queued.

    Args:
        tree: See ``describe``.
        arena: Where the bytes go, page-locked for copies that do not block the host.
        keep: Whether what is lent may be kept for good.
        verify: Whether to compare sums over all bytes before and after the copies.
        rank: This process's, where each tensor that several ranks have is wanted of one alone;
            None takes all that is here.

    Raises:
        RefusedError: Something in the tree cannot be saved, or the host has no room. Nothing is
            held.

    Memory:
        Device: none (``verify``: 8 bytes per 16 KiB, and up to 32 KiB for each tensor). Host: the
        bytes of all blocks that are not lent, each rounded up to 512.
    """
    return capture_described(describe(tree, keep=keep), arena=arena, verify=verify, rank=rank)


def capture_described(
    description: Description,
    *,
    arena: SlabArena,
    verify: bool = False,
    rank: int | None = None,
) -> Capture:
    """Is ``capture`` of a tree that is described already; its loans end where this fails."""
    held: list[Held] = []
    try:
        blocks = make_blocks(description.leaves, replicated=description.replicated, rank=rank)
        taken = {id(block.lent) for block in blocks.blocks}
        end_loans(leaf for leaf in description.leaves.values() if id(leaf.lent) not in taken)
        regions = iter(make_room(arena, sizes_of(blocks.blocks)))
        for block in blocks.blocks:
            held.append(Held(block, arena, None if block.lent is not None else next(regions)))
        _copy(held, verify=verify)
        for leaf in description.leaves.values():
            local = local_of(leaf.value)
            if leaf.lent is None and not local.is_cpu:
                gate_of(local.device).keeping([local])
    except BaseException:
        for each in held:
            each.release()
        end_loans(description.leaves.values())
        raise
    return Capture(description, blocks, held)


def sizes_of(blocks: Iterable[Block]) -> list[int]:
    """Returns the bytes of each block that is copied, for ``SlabArena.reserve``."""
    return [block.num_bytes for block in blocks if block.lent is None]


def make_room(arena: SlabArena, sizes: Sequence[int]) -> list[Region]:
    """Takes ranges of these sizes, allocating just what they need where there is no room.

    Long ones begin at pages of a slab, from where the disk takes them without a copy.
    """
    rounded = [-(-n // _PAGE) * _PAGE if n >= _LONG else n for n in sizes]
    # In one order for the same sizes, however they are listed.
    order = sorted(range(len(rounded)), key=lambda i: (rounded[i] % _PAGE != 0, -rounded[i]))
    regions = dict(zip(order, arena.allocate_all([rounded[i] for i in order]), strict=True))
    return [regions[index] for index in range(len(sizes))]


def _copy(held: Sequence[Held], *, verify: bool) -> None:
    to_copy = [each for each in held if each.block.lent is None and each.block.num_bytes]
    on_device: dict[torch.device, list[Held]] = {}
    for each in to_copy:
        if each.block.span.is_cpu:
            each.host.copy_(each.block.span)
            each.block.span = each.block.span.new_empty(0)
        else:
            on_device.setdefault(each.block.span.device, []).append(each)
    for device, each_of in on_device.items():
        watch_optimizers()
        _copy_from(device, each_of, verify=verify)


def _copy_from(device: torch.device, held: Sequence[Held], *, verify: bool) -> None:
    """Queues the copies from one device. [Note: the order of a capture]"""
    lanes, gate = lanes_of(device), gate_of(device)
    current = _device.current_stream(device)
    early = [each for each in held if each.block.is_early]
    late = [each for each in held if not each.block.is_early]
    groups = [*_groups(early), *_groups(late)]
    before = [Sums([e.block for e in group]) if verify else None for group in groups]
    lanes.d2h.wait_event(lanes.mark(current))
    num_early = sum(1 for group in groups if group[0].block.is_early)
    for index, (members, sums) in enumerate(zip(groups, before, strict=True)):
        _copy_group(members, sums, lanes, gate)
        if index + 1 == num_early:
            current.wait_event(lanes.mark(lanes.d2h))


def _copy_group(members: Sequence[Held], sums: Sums | None, lanes: Lanes, gate: Gate) -> None:
    group = Group()
    group.sources = [each.block.span for each in members]
    with lanes.d2h:
        for each in members:
            each.host.copy_(each.block.span, non_blocking=True)
        if sums is not None:
            sums.compare()
    group.sums = sums
    group.event = lanes.mark(lanes.d2h)
    gate.reading(group.sources, group.event, lanes.d2h)
    for each in members:
        each.group = group
        each.block.span = each.block.span.new_empty(0)  # the group alone keeps the storage


def _groups(held: Iterable[Held]) -> Iterator[list[Held]]:
    group: list[Held] = []
    num_bytes = 0
    for each in held:
        if group and num_bytes + each.block.num_bytes > _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(each)
        num_bytes += each.block.num_bytes
    if group:
        yield group


def view_of(span: Tensor, layout: Layout) -> Tensor:
    """Returns a tensor that lies in a span of bytes; its start is aligned to its elements."""
    count = 1 + sum((n - 1) * s for n, s in zip(layout.shape, layout.stride, strict=True))
    if 0 in layout.shape:
        return torch.empty(layout.shape, dtype=layout.dtype)
    flat = span.narrow(0, layout.start, count * layout.dtype.itemsize).view(layout.dtype)
    return flat.as_strided(layout.shape, layout.stride, flat.storage_offset())


def check_verify(verify: str) -> bool:
    """Returns whether sums are compared.

    Raises:
        InvalidArgumentError: It is neither of the two words.
    """
    if verify not in ("gate", "full"):
        raise InvalidArgumentError(f"verify is {verify!r}; expected 'gate' or 'full'.")
    return verify == "full"
