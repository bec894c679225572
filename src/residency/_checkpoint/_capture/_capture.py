"""Takes the bytes of a state tree as they are at one call, while training goes on.

What the host holds is copied at the call; what the device holds is copied on the d2h lane, buffers
first, with an event after every group; what an offloaded optimizer holds is lent. Nothing waits on
the host, and no device memory is allocated. Invariant, which
``tests/integrations/test_dcp_stager.py`` tries to break: every region and every loan is given back
exactly once, after the last copy into it.

[Note: the order of a capture] Tensors that others than optimizers may change come first, and the
current stream waits for that group alone before the call returns. Parameters and states follow;
their writers wait at the gate, which knows for each storage the event after its copy.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from residency import _device
from residency._checkpoint._capture._blocks import Block, Blocks, Layout, make_blocks
from residency._checkpoint._capture._sums import Sums
from residency._checkpoint._capture._walk import Description, describe
from residency._checkpoint._disk._manifest import Record
from residency._dtensor import local_of
from residency._errors import CheckpointError, InvalidArgumentError
from residency._transfer import (
    Flight,
    Mover,
    Region,
    SlabArena,
    gate_of,
    memory_of,
    views_in,
    wait_asleep,
    watch_optimizers,
)
from residency._units import parse_bytes

_logger = logging.getLogger("residency")
_of_thread = threading.local()  # where a thread that writes a save stands

_GROUP_BYTES = parse_bytes("64MiB")
_PAGE = parse_bytes("4KiB")
_LONG = parse_bytes("64KiB")
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class CopyGroup:
    """The copies of some blocks to the host that one flight covers.

    Args:
        device: Whose storages are copied; None where nothing is.
        sources: Of them.
        sums: See below.

    Attributes:
        flight: The copies, None before they are queued and once they are done.
        sources: What keeps the copied storages alive until then.
        sums: Those over all bytes before and after, where they were asked for.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        sources: Sequence[Tensor] = (),
        sums: Sums | None = None,
    ) -> None:
        self._device = device
        self.flight: Flight | None = None
        self.sources = list(sources)
        self.sums = sums
        self._is_over = device is None

    def finish(self) -> None:
        """Blocks the host until the copies are done; may be called from any thread, and again."""
        flight = self.flight
        if self._is_over or self._device is None:
            return
        if flight is not None:
            flight.wait(asleep=True)
        else:  # an exception came before it; copies may be queued
            Mover(self._device).settle()
        self.sources = []
        if self.sums is not None:
            self.sums.let_go()
        self._is_over = True
        self.flight = None


class Held:
    """The bytes of one block on the host, until they are released.

    Attributes:
        block: What the bytes are.
        group: The copies that bring them.
        region: The range of a slab for the bytes; None for a lent block.
        target: What they are copied into until they are, like the block's source.
    """

    def __init__(self, block: Block, arena: SlabArena, device_index: int | None) -> None:
        self.block = block
        self._device_index = device_index
        self.group = _NO_COPIES
        self._arena = arena
        self.region: Region | None = None
        self.target = _NO_BYTES
        self._is_released = False
        self._handed_over: Tensor | None = None

    @property
    def host(self) -> Tensor:
        """The span's bytes, ``uint8`` of shape ``[num_bytes]``."""
        if self.region is None:
            return self.block.span
        return self.region.slab.data.narrow(0, self.region.offset, self.block.num_bytes)

    def final(self) -> Tensor:
        """Returns the span's bytes once they are final.

        Raises:
            CheckpointError: Other code wrote into the source while it was copied.
        """
        self._settle()
        return self.host

    def _settle(self) -> None:
        """Blocks the host until the bytes are final."""
        lent = self.block.lent
        if lent is not None and lent.written is not None:
            wait_asleep(lent.written)
        self.group.finish()
        if self.group.sums is not None and self.group.sums.differs(self.block):
            self._raise_written()

    def is_done(self) -> bool:
        """Returns whether the bytes are final, without a wait."""
        flight, lent = self.group.flight, self.block.lent
        is_there = lent is None or lent.written is None or lent.written.query()
        is_done = is_there and (flight is None or flight.is_over())
        if is_done:
            self.group.finish()  # from here on no step waits for it
        return is_done

    def hand_over(self, final: Tensor) -> Tensor:
        """Hands the final bytes over for good: the tensor that it returns keeps the memory.

        Called again, after an interrupt, it returns the same tensor.

        Raises:
            RefusedError: Others still have the bytes, and the host no room for a copy.
        """
        if self._handed_over is None:
            if self.block.lent is not None:
                self._handed_over = self.block.lent.for_good(final)
            elif self.region is not None:
                shape = [self.block.num_bytes]
                self._handed_over = self._arena.tensor(self.region, torch.uint8, shape, [1])
            else:
                self._handed_over = final
        self._is_released = True
        return self._handed_over

    @property
    def record(self) -> Record:
        """How the bytes are stored."""
        return self.block.record

    def acquire(self) -> memoryview:
        """Returns the final bytes in the order in which they are stored, to a thread that writes.

        The thread is on the device of the call from then on, and its waits are none of a capture's
        business. Events end in it: on CUDA, for their
        device and then for the thread's own, on which that makes a context (``destroyEvent`` in
        c10/cuda/impl/CUDAGuardImpl.h).
        """
        if getattr(_of_thread, "device_index", -1) != self._device_index:
            _device.use_index(self._device_index)
            _device.tolerate_captures()
            _of_thread.device_index = self._device_index
        self._settle()
        block, region = self.block, self.region
        if block.lent is not None:
            region = block.lent.region
        if block.gather is not None:
            final = view_of(self.host, block.gather).contiguous()
            return memory_of(final.view(-1).view(torch.uint8))
        if region is not None:
            return region.slab.memory(region.offset, block.num_bytes)
        return memory_of(block.source)

    def check(self) -> None:
        """Asks, once the bytes were read, whether they were final all the time.

        Raises:
            CheckpointError: Other code wrote into what an optimizer has lent.
        """
        if self.block.lent is not None and self.block.lent.is_written():
            self._raise_written()

    def _raise_written(self) -> None:
        names = ", ".join(self.block.names)
        raise CheckpointError(
            f"{names} was written while it was being copied, by code that passes no gate. "
            "The save was dropped; put that write into `with residency.mutating(tensor):`, which "
            "begins after the save."
        )

    def release(self) -> None:
        """Gives the memory back, once no copy into it is under way; raises nothing of its own.

        Memory into which a broken device may still copy is left alone for good.
        """
        if self.block.lent is not None:
            self.block.lent.give_back()
        if self._is_released or not has_ended(self.group):
            return
        self._is_released = True  # first: what is given back twice would serve two at once
        if self.region is not None:
            self._arena.release(self.region)


_NO_COPIES = CopyGroup()


def has_ended(group: CopyGroup) -> bool:
    """Waits for the copies of a group; returns False, and logs why, where the device cannot say."""
    try:
        group.finish()
    except Exception as error:  # of a failed kernel; the next call that asks the device raises it
        _logger.warning(
            "copies of a save cannot be waited for: %s: %s", type(error).__name__, str(error)
        )
        return False
    return True


class Capture:
    """A state tree's bytes at one moment, on their way to the host or there.

    It owns all that is taken for them, from the first loan on: loans, regions, copies under way.
    ``describe`` or ``adopt`` comes first, then ``make_room``, then ``copy``.

    Attributes:
        description: The tree.
        blocks: What was copied, and how tensors lie in it.
        held: The bytes, for each block.
        arena: Where they go.
        device_index: Of the device that has the bytes, on which threads wait for them.
    """

    _is_made = False  # of one that an interrupt left half made, which has nothing yet

    def __init__(self, arena: SlabArena) -> None:
        self.description = Description({}, {})
        self.blocks = Blocks([], {})
        self.held: tuple[Held, ...] = ()
        self.arena = arena
        self.device_index = _device.current_index()
        self._groups: dict[torch.device, list[tuple[CopyGroup, list[Held]]]] = {}
        self._is_made = True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._is_made and not is_finalizing():  # modules are empty then
            self.release()

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document of the tree."""
        return {"tree": self.description.tree, "tensors": self.blocks.special}

    def describe(self, tree: object, *, rank: int | None = None) -> None:
        """Finds what is to be taken, and borrows what an optimizer lends."""
        describe(tree, into=self.description)
        self._lay_out(rank)

    def adopt(self, description: Description) -> None:
        """Takes over a tree that is described already, with its loans."""
        self.description = description
        self._lay_out(None)

    def _lay_out(self, rank: int | None) -> None:
        description = self.description
        self.blocks = make_blocks(description.leaves, replicated=description.replicated, rank=rank)
        lent = [block.lent for block in self.blocks.blocks if block.lent is not None]
        description.loans.end(but=lent)

    def make_room(self, *, verify: bool = False) -> None:
        """Takes the memory that the bytes need, here and on the device; nothing is copied yet.

        Raises:
            RefusedError: The host has no room.
        """
        blocks = self.blocks.blocks
        on_device = [block for block in blocks if not block.source.is_cpu]
        self.arena.pin_for(bool(on_device))  # a lent block is on the host
        self.device_index = on_device[0].source.device.index if on_device else self.device_index
        self.held = tuple([Held(block, self.arena, self.device_index) for block in blocks])
        alike: dict[int, list[Held]] = {}
        for each in self.held:
            if each.block.lent is None:
                alike.setdefault(id(each.block.laid), []).append(each)
        sizes = [each.block.num_bytes for like in alike.values() for each in like]
        regions = iter(make_room(self.arena, sizes))
        for like in alike.values():
            ranges = list(itertools.islice(regions, len(like)))
            targets = views_in(ranges, like[0].block.source)
            for each, region, target in zip(like, ranges, targets, strict=True):
                each.region, each.target = region, target
        self._groups = _groups_of(self.held, verify=verify)

    def copy(self) -> None:
        """Copies what the host has, and queues the copies of what a device has."""
        on_host = [h for h in self.held if h.block.lent is None and h.block.source.is_cpu]
        if on_host:
            targets = [each.target for each in on_host]
            # torch has no public name for many copies in one call (2.11 to 2.13)
            torch._foreach_copy_(targets, [each.block.source for each in on_host])  # pyright: ignore[reportPrivateImportUsage]
        for each in on_host:
            each.block.source = each.target = _NO_BYTES
        if self._groups:
            watch_optimizers()
        for device, groups in self._groups.items():
            _queue_copies(device, groups)
        # The tree asks for the form of shards; of all else, the copies alone keep the bytes.
        found = self.description.leaves.items()
        leaves = {name: leaf for name, leaf in found if type(leaf.value) is not Tensor}
        self.description.leaves = leaves
        for local in (local_of(leaf.value) for leaf in leaves.values() if leaf.lent is None):
            if not local.is_cpu:
                gate_of(local.device).note_sources((local,))

    def release(self) -> bool:
        """Gives all back, and lets go of what the caller has; from any thread, and again.

        Returns:
            Whether the arena may be used again: no copy into it is under way.
        """
        self.description.loans.end()  # first: a step may wait for them
        groups = [group for here in self._groups.values() for group, _ in here]
        ended = [has_ended(group) for group in groups]  # each is waited for
        for held in self.held:
            held.release()
        self._groups = {}
        self.held = ()
        self.blocks.blocks.clear()
        self.description.leaves.clear()
        return all(ended)


def capture_described(
    description: Description, *, arena: SlabArena, verify: bool = False
) -> Capture:
    """Begins to copy a tree that ``describe`` has looked at; its loans end where this fails.

    Raises:
        RefusedError: Something in the tree cannot be saved, or the host has no room.
    """
    captured = Capture(arena)
    try:
        captured.adopt(description)
        captured.make_room(verify=verify)
        captured.copy()
    except BaseException:
        captured.release()
        raise
    return captured


def make_room(arena: SlabArena, sizes: Sequence[int]) -> list[Region]:
    """Takes ranges of these sizes, allocating just what they need where there is no room.

    Long ones begin at pages of a slab, from where the disk takes them without a copy.
    """
    rounded = [-(-n // _PAGE) * _PAGE if n >= _LONG else n for n in sizes]
    # In one order for the same sizes, however they are listed.
    last = max(rounded, default=0) + 1
    ranks = [bool(n % _PAGE) * last - n for n in rounded]
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    regions = dict(zip(order, arena.allocate_all([rounded[i] for i in order]), strict=True))
    return [regions[index] for index in range(len(sizes))]


def _groups_of(
    held: Iterable[Held], *, verify: bool
) -> dict[torch.device, list[tuple[CopyGroup, list[Held]]]]:
    """Returns the copies from each device, in their order there.

    [Note: the order of a capture]
    """
    on_device: dict[torch.device, list[Held]] = {}
    for each in held:
        source = each.block.source
        if not source.is_cpu and each.block.num_bytes:
            on_device.setdefault(source.device, []).append(each)
    found: dict[torch.device, list[tuple[CopyGroup, list[Held]]]] = {}
    for device, here in on_device.items():
        early = [each for each in here if each.block.is_early]
        late = [each for each in here if not each.block.is_early]
        for members in (*_groups(early), *_groups(late)):
            sums = Sums([each.block for each in members]) if verify else None
            sources = [each.block.source for each in members]
            found.setdefault(device, []).append((CopyGroup(device, sources, sums), members))
    return found


def _queue_copies(device: torch.device, groups: Sequence[tuple[CopyGroup, list[Held]]]) -> None:
    """Queues the copies from one device. [Note: the order of a capture]"""
    mover = Mover(device)
    mover.follow_to_host()
    num_early = sum(1 for _, members in groups if members[0].block.is_early)
    for index, (group, members) in enumerate(groups):
        _copy_group(group, members, mover)
        if index + 1 == num_early:
            assert group.flight is not None
            mover.land(group.flight)  # others than optimizers may write these, past the gate


def _copy_group(group: CopyGroup, members: Sequence[Held], mover: Mover) -> None:
    for each in members:
        each.group = group
    moves = [(each.target, each.block.source) for each in members]
    then = None if group.sums is None else group.sums.compare
    group.flight = mover.to_host(moves, group.sources, then=then)
    gone = torch.empty(0, dtype=torch.uint8, device=group.sources[0].device)
    for each in members:
        each.block.source = gone  # the group alone keeps the storage
        each.target = _NO_BYTES


def _groups(held: Iterable[Held]) -> Iterator[list[Held]]:
    group: list[Held] = []
    num_bytes = 0
    for each in held:
        num_bytes += each.block.num_bytes
        if group and num_bytes > _GROUP_BYTES:
            yield group
            group, num_bytes = [], each.block.num_bytes
        group.append(each)
    if group:
        yield group


def view_of(span: Tensor, layout: Layout) -> Tensor:
    """Returns a tensor that lies in a span of bytes; its start is aligned to its elements."""
    count = 1 + sum((n - 1) * s for n, s in zip(layout.shape, layout.stride, strict=True))
    if 0 in layout.shape:
        return torch.empty(layout.shape, dtype=layout.dtype)
    flat = span.narrow(0, layout.start, count * layout.dtype.itemsize).view(layout.dtype)
    return flat.as_strided(layout.shape, layout.stride, flat.storage_offset())


def check_verify(verify: str, *others: str) -> bool:
    """Returns whether sums are compared.

    Raises:
        InvalidArgumentError: It is none of the two words, nor of others that the caller knows.
    """
    known = ("gate", "full", *others)
    if verify not in known:
        names = ", ".join(map(repr, known[:-1]))
        raise InvalidArgumentError(f"verify is {verify!r}; expected {names} or {known[-1]!r}.")
    return verify == "full"
