"""One owner's bytes on the host, as long as they are parked there.

Invariant: every change is made whole or not at all. What can fail (host memory, copies, device
memory) comes before the first tensor is bound anew, and a failure after it is undone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from residency import _device
from residency._errors import RefusedError
from residency._handoff._park_hooks import Notices
from residency._handoff._park_tensors import (
    Gradients,
    Owner,
    gradients_of,
    reshard,
    take_gradients,
    tensors_of,
)
from residency._handoff._park_ties import Rebound, Tie, shared_with_others, ties_of
from residency._transfer import Region, Run, SlabArena, copy_to_host, gate_of, lanes_of
from residency._units import format_bytes

# A pinned arena for each owner, so that the second parking of a module allocates nothing.
_arenas: weakref.WeakKeyDictionary[Owner, dict[bool, SlabArena]] = weakref.WeakKeyDictionary()


class Parking:
    """Moves the bytes of one owner to the host and back, partly or wholly.

    Several may exist for one owner; each brings back what it has moved itself, and the pinned
    memory belongs to the owner.

    Args:
        owner: A module or an optimizer; not kept alive.
        gradients: Whether gradients move with a module, or are set to None.
        pin: Whether the host memory is page-locked.

    Attributes:
        device: Where the owner was last found, if on a device at all.
    """

    def __init__(self, owner: Owner, *, gradients: Gradients = "move", pin: bool = True) -> None:
        self._owner = weakref.ref(owner)
        self._gradients: Gradients = gradients
        self._arena = _arenas.setdefault(owner, {}).setdefault(pin, SlabArena(pin=pin, keep=True))
        self.device: torch.device | None = None
        self._rebound: dict[int, Rebound] = {}
        self._slots: set[str] = set()
        self._regions: dict[int, Region] = {}
        self._notices = Notices(self._rebound)

    @property
    def owner(self) -> Owner:
        """The module or the optimizer."""
        owner = self._owner()
        assert owner is not None, "the owner of a parking is gone"
        return owner

    @property
    def num_bytes_on_device(self) -> int:
        """The device bytes that ``park`` would free now, as the allocator counts them."""
        ties, _ = self._found()
        return self._droppable_bytes() + sum(tie.allocated_bytes for tie in ties)

    @property
    def num_bytes_shared(self) -> int:
        """The device bytes that stay, because somebody else holds the same storages."""
        return sum(tie.allocated_bytes for tie in self._found()[1])

    @property
    def is_parked(self) -> bool:
        """Whether anything is parked."""
        return bool(self._rebound)

    @property
    def num_bytes_parked(self) -> int:
        """The device bytes that ``unpark`` would take, as the allocator counts them."""
        return sum(tie.allocated_bytes for tie in ties_of(self._parked_tensors()))

    @torch.inference_mode(mode=False)  # what is bound here outlives the caller's mode
    @torch.no_grad()
    def park(self, up_to: int | None = None) -> int:
        """Moves bytes to the host; returns when they are there and the device's are free.

        Args:
            up_to: How many bytes suffice; whole storages go, the fewest bytes that a short search
                finds. None moves everything.

        Returns:
            The device bytes that were freed, as the allocator counts them: 0 where nothing is on
            the device. What a save has in flight is freed when it has seen its copies done.

        Raises:
            RefusedError: Something cannot be moved, is on several devices, or the host has no
                room. Everything is as it was.
        """
        owner = self.owner
        self._find_device(tensors_of(owner))
        if self.device is None or up_to == 0:
            return 0
        if isinstance(owner, nn.Module):
            reshard(owner)
        # Whoever writes or reads these bytes, on whatever stream, is done from here on.
        _device.synchronize(self.device)
        ties, _ = self._found()
        chosen = list(ties) if up_to is None else _fewest(ties, up_to - self._droppable_bytes())
        # Measured: a save that has not seen its copies done keeps what it reads, a reducer its
        # buckets.
        before = _device.memory_allocated(self.device)
        dropped = self._take_gradients()
        is_first = not self._rebound
        try:
            self._move_to_host(chosen)
            self._notices.put_up(owner)
        except BaseException:
            for holder, name, gradient in dropped:
                setattr(holder, name, gradient)
            if is_first:  # else what was parked before is to stay, and unpark brings all back
                self.unpark()
            raise
        dropped.clear()
        ties.clear()
        chosen.clear()
        return max(0, before - _device.memory_allocated(self.device))

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def unpark(self) -> int:
        """Brings everything back that this object has parked.

        Returns:
            The device bytes that were allocated for it.

        Raises:
            torch.OutOfMemoryError: The device has no room. Everything is whole on the host, and a
                call after room was made works.
        """
        if not self._rebound:
            return 0
        assert self.device is not None
        ties = ties_of(self._parked_tensors())
        self._move_to_device(ties)
        self._rebound.clear()
        self._slots.clear()
        self._regions.clear()
        self._notices.take_down()
        return sum(tie.allocated_bytes for tie in ties)

    def free_host_memory(self) -> None:
        """Gives the owner's pinned memory back, as far as nothing is parked in it."""
        self._arena.free_all()

    # ------------------------------------------------------------------------------- what there is

    def _find_device(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        devices = {tensor.device for _, tensor in tensors if not tensor.is_cpu}
        if len(devices) > 1:
            raise RefusedError(
                f"this {type(self.owner).__name__} is on {sorted(map(str, devices))}; expected it "
                "on one device. Nothing moved; park its parts."
            )
        accelerator = _device.accelerator()
        for device in devices:
            if accelerator is None or accelerator.type != device.type:
                raise RefusedError(
                    f"this {type(self.owner).__name__} is on {device}, which is no accelerator "
                    "here. Nothing moved."
                )
            self.device = device

    def _found(self) -> tuple[list[Tie], list[Tie]]:
        """Returns what can be moved now, and what somebody else holds."""
        named = tensors_of(self.owner, gradients=self._gradients)
        self._find_device(named)
        ties = ties_of((slot, tensor) for slot, tensor in named if tensor.device == self.device)
        if self.device is None:
            return [], []
        shared = shared_with_others(ties, self.device)
        return [tie for tie in ties if tie not in shared], shared

    def _droppable_bytes(self) -> int:
        owner = self.owner
        if self._gradients != "drop" or not isinstance(owner, nn.Module):
            return 0
        ties = ties_of((s, t) for s, t in gradients_of(owner) if not t.is_cpu)
        shared = shared_with_others(ties, ties[0].storage.device) if ties else []
        return sum(
            tie.allocated_bytes
            for tie in ties
            # A bucket's views are the reducer's too.
            if tie not in shared and not any(t._is_view() for t in tie.tensors)
        )

    def _take_gradients(self) -> list[tuple[Any, str, Tensor]]:
        owner = self.owner
        if self._gradients == "drop" and isinstance(owner, nn.Module):
            return take_gradients(owner)
        return []

    def _parked_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what is to come back: what was moved, and what took its place meanwhile."""
        seen: set[int] = set()
        owner = self._owner()
        named = [] if owner is None else tensors_of(owner)
        for slot, tensor in named:
            # A gradient that came meanwhile belongs to where its parameter goes.
            is_of_slot = slot in self._slots or slot.removesuffix(".grad") in self._slots
            if tensor.is_cpu and (is_of_slot or id(tensor) in self._rebound):
                seen.add(id(tensor))
                yield slot, tensor
        # A parameter that nobody has any more stays away, and so does its gradient.
        dead = [r.tensor for r in self._rebound.values() if not r.is_in_use()]
        seen.update(map(id, dead), (id(t.grad) for t in dead if t.is_leaf))
        del dead
        for rebound in self._rebound.values():
            if rebound.tensor.is_cpu and id(rebound.tensor) not in seen:
                yield "", rebound.tensor

    # --------------------------------------------------------------------------------------- moves

    def _move_to_host(self, ties: Sequence[Tie]) -> None:
        assert self.device is not None
        lanes, gate = lanes_of(self.device), gate_of(self.device)
        full = [tie for tie in ties if tie.num_bytes]
        regions = self._take_room([tie.num_bytes for tie in full])
        hosts = [
            self._arena.tensor(region, torch.uint8, [tie.num_bytes], [1]).untyped_storage()
            for tie, region in zip(full, regions, strict=True)
        ]
        buffers = [tie.as_bytes() for tie in full]
        try:
            copy_to_host(buffers, regions, lanes=lanes, gate=gate).synchronize()
        except BaseException:
            _device.synchronize(self.device)  # nothing may still write into the regions
            raise
        gate.before_free(buffers)
        of_tie = dict(zip(full, hosts, strict=True))
        empty = torch.empty(0, dtype=torch.uint8).untyped_storage()
        moves = [
            (self._rebound.get(id(tensor), Rebound(tensor)), of_tie.get(tie, empty), tie.storage)
            for tie in ties
            for tensor in tie.tensors
        ]
        _rebind_all(moves, Rebound.to_host, Rebound.to_device)
        self._rebound.update((id(rebound.tensor), rebound) for rebound, _, _ in moves)
        self._slots.update(slot for tie in ties for slot in tie.slots)
        for host, region in zip(hosts, regions, strict=True):
            self._regions[host.data_ptr()] = region

    def _take_room(self, sizes: Sequence[int]) -> list[Region]:
        try:
            return self._arena.allocate_all(sizes)
        except RefusedError as error:
            raise RefusedError(
                f"the host has no room for {format_bytes(sum(sizes))} to be parked: {error}"
            ) from error

    def _move_to_device(self, ties: Sequence[Tie]) -> None:
        assert self.device is not None
        lanes = lanes_of(self.device)
        try:
            targets = [
                torch.empty(tie.num_bytes, dtype=torch.uint8, device=self.device) for tie in ties
            ]
        except torch.OutOfMemoryError as error:
            wanted = format_bytes(sum(tie.allocated_bytes for tie in ties))
            error.add_note(
                f"{wanted} were to come back from the host, where everything still is, whole. Make "
                "room on the device and call residency.unpark again."
            )
            raise
        # A block may have been freed by work that the current stream has not come to yet.
        lanes.h2d.wait_event(lanes.mark(_device.current_stream(self.device)))
        try:
            for tie, target in zip(ties, targets, strict=True):
                self._load(tie, target)
            lanes.mark(lanes.h2d).synchronize()
        except BaseException:
            _device.synchronize(self.device)  # nothing may still write what is freed now
            raise
        moves = [
            (
                self._rebound.get(id(tensor), Rebound(tensor)),
                target.untyped_storage(),
                tie.storage,
            )
            for tie, target in zip(ties, targets, strict=True)
            for tensor in tie.tensors
        ]
        moves += [
            (rebound, rebound.tensor.untyped_storage(), rebound.tensor.untyped_storage())
            for rebound in self._rebound.values()
            if rebound.is_split and rebound.tensor.device == self.device  # moved by somebody else
        ]
        _rebind_all(moves, Rebound.to_device, Rebound.to_host)

    def _load(self, tie: Tie, target: Tensor) -> None:
        assert self.device is not None
        region = self._regions.get(tie.storage.data_ptr())
        if not tie.num_bytes:
            return
        lanes = lanes_of(self.device)
        if region is not None and region.num_bytes >= tie.num_bytes:
            lanes.load(target, [Run(region.slab, region.offset, 0, tie.num_bytes)])
            return
        with lanes.h2d:
            target.copy_(tie.as_bytes())


_Move = tuple[Rebound, torch.UntypedStorage, torch.UntypedStorage]


def _rebind_all(
    moves: Iterable[_Move],
    do: Callable[[Rebound, torch.UntypedStorage], None],
    undo: Callable[[Rebound, torch.UntypedStorage], None],
) -> None:
    """Binds tensors to their new storages, or, where one fails, all of them to the old ones.

    Gradients come before their parameters in both directions: torch takes a gradient only where its
    parameter is.
    """
    done: list[_Move] = []
    try:
        for move in moves:
            do(move[0], move[1])
            done.append(move)
    except BaseException:
        for rebound, _, before in done:
            undo(rebound, before)
        raise


def _fewest(ties: Sequence[Tie], wanted: int) -> list[Tie]:
    """Chooses storages that together have at least as many bytes, and few more."""
    chosen: list[Tie] = []
    left = wanted
    descending = sorted(ties, key=lambda tie: -tie.allocated_bytes)
    for tie in descending:
        if 0 < tie.allocated_bytes <= left:
            chosen.append(tie)
            left -= tie.allocated_bytes
    if left > 0:
        more = [tie for tie in descending if tie not in chosen]
        if more:  # each of them is larger than what is left
            chosen.append(more[-1])
            left -= more[-1].allocated_bytes
    for tie in sorted(chosen, key=lambda tie: -tie.allocated_bytes):
        if tie.allocated_bytes <= -left:
            chosen.remove(tie)
            left += tie.allocated_bytes
    return chosen
