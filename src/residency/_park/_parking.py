"""One owner's bytes on the host, as long as they are parked there.

Invariant, which ``tests/park/test_failures.py`` tries to break: every change is made whole or not
at all. What can fail (host memory, copies, device memory) comes before the first tensor is bound
anew, and a failure after it is undone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from residency import _device
from residency._errors import RefusedError
from residency._modes import callers_modes_off
from residency._park._guards import Notices
from residency._park._room import WantedStorage, allocate_all
from residency._park._storages import (
    Binding,
    Rebound,
    Tie,
    gone_bytes,
    has_live_accumulator,
    rebind_all,
    shared_with_others,
    ties_of,
    watched,
)
from residency._park._tensors import (
    Gradients,
    Owner,
    Taken,
    give_back_gradients,
    gradients_of,
    reshard,
    take_gradients,
    tensors_of,
)
from residency._storages import storage_key
from residency._transfer import Mover, Region, SlabArena, bring_all_home
from residency._units import format_bytes

# A pinned arena for each owner, so that the second parking of a module allocates nothing.
_arenas: weakref.WeakKeyDictionary[Owner, dict[bool, SlabArena]] = weakref.WeakKeyDictionary()


class Parking:
    """The way of one owner's bytes to the host and back, partly or wholly.

    Several may exist for one owner; each brings back what it has moved itself, and the pinned
    memory belongs to the owner.

    Args:
        owner: A module or an optimizer; not kept alive.
        gradients: Whether gradients move with a module, or are set to None.
        pin: Whether the host memory is page-locked.
        beside: Other owners of the same request: what they have in the owner's storages moves with
            it, and is no other owner's.

    Attributes:
        device: Where the owner was last found, if on a device at all.
    """

    def __init__(
        self,
        owner: Owner,
        *,
        gradients: Gradients = "move",
        pin: bool = True,
        beside: Iterable[Owner] = (),
    ) -> None:
        self._owner = weakref.ref(owner)
        self._beside = [weakref.ref(other) for other in beside if other is not owner]
        self._gradients: Gradients = gradients
        self._arena = _arenas.setdefault(owner, {}).setdefault(pin, SlabArena(pin=pin, reuse=True))
        self.device: torch.device | None = None
        self._rebound: dict[int, Rebound] = {}
        self._sites: set[str] = set()
        self._addresses: dict[int, int] = {}  # where the bytes of a storage on the host were
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
        """The device bytes that stay, because other code holds the same storages."""
        return sum(tie.allocated_bytes for tie in self._found()[1])

    @property
    def is_parked(self) -> bool:
        """Whether anything is parked."""
        return bool(self._rebound)

    def has_parked(self, tensor: Tensor) -> bool:
        """Returns whether this tensor is one that is parked here."""
        rebound = self._rebound.get(id(tensor))
        return rebound is not None and rebound.tensor is tensor

    @property
    def num_bytes_parked(self) -> int:
        """The device bytes that ``unpark`` would take, as the allocator counts them."""
        return sum(tie.allocated_bytes for tie in ties_of(self._parked_tensors()))

    @callers_modes_off()  # what is bound here outlives them
    def park(self, up_to: int | None = None) -> int:
        """Moves bytes to the host; returns when they are there and the device's are free.

        Args:
            up_to: How many bytes suffice; whole storages go, the fewest bytes that a short search
                finds. None moves everything.

        Returns:
            The device bytes that were freed, as the allocator rounds them: 0 where nothing is on
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
        bring_all_home()  # what a step keeps here until the next forward pass
        # All work that writes or reads these bytes, on whatever stream, is done from here on.
        _device.synchronize(self.device)
        ties, _ = self._found()
        chosen = list(ties)
        if up_to is not None:
            chosen = _with_gradients(_fewest(ties, up_to - self._droppable_bytes()), ties)
        # A save that has not seen its copies done keeps what it reads, a reducer its buckets.
        going = watched([*chosen, *self._gradients_to_drop()])
        dropped: list[Taken] = []
        is_first = not self._rebound
        try:
            if self._gradients == "drop" and isinstance(owner, nn.Module):
                take_gradients(owner, dropped)
            self._move_to_host(chosen)
            self._notices.put_up([owner, *self._companions()])
        except BaseException:
            if is_first:  # else what was parked before is to stay, and unpark brings all back
                self._unpark()
            give_back_gradients(dropped)
            if is_first:
                self._arena = SlabArena(pin=self._arena.is_pinned, reuse=True)  # ranges got lost
                _arenas.setdefault(owner, {})[self._arena.is_pinned] = self._arena
            raise
        dropped.clear()
        ties.clear()
        chosen.clear()
        return gone_bytes(going)

    @callers_modes_off()
    def unpark(self) -> int:
        """Brings everything back that this object has parked.

        Returns:
            The device bytes that were allocated for it.

        Raises:
            RefusedError: C++ code has a weak reference to a parameter that a graph waits for.
                Everything is whole on the host.
            torch.OutOfMemoryError: The device has no room. Everything is whole on the host, and a
                call after room was made works.
        """
        return self._unpark()

    def _unpark(self) -> int:
        if not self._rebound:
            return 0
        assert self.device is not None
        ties = ties_of(self._parked_tensors())
        self._move_to_device(ties)
        self._notices.take_down()
        self._sites.clear()
        self._addresses.clear()
        self._rebound.clear()
        return sum(tie.allocated_bytes for tie in ties)

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
                    "here. Nothing moved; park an owner on one."
                )
            self.device = device

    def _found(self) -> tuple[list[Tie], list[Tie]]:
        """Returns what can be moved now, and what other code holds."""
        named = self._named(self._gradients)
        self._find_device(named)
        ties = ties_of((site, tensor) for site, tensor in named if tensor.device == self.device)
        if self.device is None:
            return [], []
        shared = shared_with_others(ties, self.device)
        return [tie for tie in ties if tie not in shared], shared

    def _named(self, gradients: Gradients = "move") -> list[tuple[str, Tensor]]:
        """Returns the owner's tensors, and what other owners of the request have in their storages;
        gradients first.
        """
        owner = self._owner()
        own = [] if owner is None else tensors_of(owner, gradients=gradients)
        storages = {storage_key(tensor) for _, tensor in own}
        for number, ref in enumerate(self._beside):
            other = ref()
            named = [] if other is None else tensors_of(other, gradients=gradients)
            tied = {site for site, t in named if storage_key(t) in storages}
            own += [
                (f"{number}:{site}", tensor)
                for site, tensor in named
                if site in tied or site.removesuffix(".grad") in tied
            ]
        return sorted(own, key=lambda pair: not pair[0].endswith(".grad"))

    def _companions(self) -> Iterator[Owner]:
        """Yields the other owners of which something is parked here."""
        for number, ref in enumerate(self._beside):
            other = ref()
            if other is not None and any(site.startswith(f"{number}:") for site in self._sites):
                yield other

    def _gradients_to_drop(self) -> list[Tie]:
        owner = self.owner
        if self._gradients != "drop" or not isinstance(owner, nn.Module):
            return []
        return ties_of((s, t) for s, t in gradients_of(owner) if not t.is_cpu)

    def _droppable_bytes(self) -> int:
        ties = self._gradients_to_drop()
        shared = shared_with_others(ties, ties[0].storage.device) if ties else []
        return sum(
            tie.allocated_bytes
            for tie in ties
            # A bucket's views are the reducer's too.
            if tie not in shared and not any(t._is_view() for t in tie.tensors)
        )

    def _parked_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what is to come back: what was moved, and what took its place meanwhile."""
        seen: set[int] = set()
        for site, tensor in self._named():
            # A gradient that came meanwhile belongs to where its parameter goes.
            is_of_site = site in self._sites or site.removesuffix(".grad") in self._sites
            if tensor.is_cpu and (is_of_site or id(tensor) in self._rebound):
                seen.add(id(tensor))
                yield site, tensor
        # A parameter without another reference stays away, and so does its gradient.
        dead = [r.tensor for r in self._rebound.values() if not r.is_in_use()]
        seen.update(map(id, dead), (id(t.grad) for t in dead if t.is_leaf))
        del dead
        for rebound in self._rebound.values():
            if rebound.tensor.is_cpu and id(rebound.tensor) not in seen:
                yield "", rebound.tensor

    # --------------------------------------------------------------------------------------- moves

    def _move_to_host(self, ties: Sequence[Tie]) -> None:
        assert self.device is not None
        mover = Mover(self.device)
        full = [tie for tie in ties if tie.num_bytes]
        rebound = [
            [self._rebound.get(id(tensor), Rebound(tensor)) for tensor in tie.tensors]
            for tie in ties
        ]
        for tie, of_tie in zip(ties, rebound, strict=True):
            for each in of_tie:
                each.check(min(tie.sites))
        regions = self._take_room([tie.num_bytes for tie in full])
        taken = [
            self._arena.tensor(region, torch.uint8, [tie.num_bytes], [1])
            for tie, region in zip(full, regions, strict=True)
        ]
        buffers = [tie.as_bytes() for tie in full]
        mover.follow_to_host()
        try:
            mover.to_host(zip(taken, buffers, strict=True), buffers).wait()
        except BaseException:
            mover.settle()
            raise
        mover.let_go(buffers)
        hosts = {tie: host.untyped_storage() for tie, host in zip(full, taken, strict=True)}
        empty = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
        moves = [
            Binding(each, hosts.get(tie, empty), tie.storage)
            for tie, of_tie in zip(ties, rebound, strict=True)
            for each in of_tie
        ]
        # All that the way back needs is known before the first tensor goes.
        for tie in full:
            self._addresses[hosts[tie].data_ptr()] = tie.storage.data_ptr()
        self._sites.update(site for tie in ties for site in tie.sites)
        known = self._rebound.copy()
        self._rebound.update((id(move.rebound.tensor), move.rebound) for move in moves)
        try:
            rebind_all(moves, Rebound.to_host, Rebound.to_device)
        except BaseException:
            for number in self._rebound.keys() - known.keys():
                del self._rebound[number]
            raise

    def _take_room(self, sizes: Sequence[int]) -> list[Region]:
        try:
            return self._arena.allocate_all(sizes)
        except RefusedError as error:
            raise RefusedError(
                f"the host has no room for {format_bytes(sum(sizes))} to be parked; park less, or "
                f"free some: {error}"
            ) from error

    def _move_to_device(self, ties: Sequence[Tie]) -> None:
        assert self.device is not None
        mover = Mover(self.device)
        for tie in ties:
            for tensor in tie.tensors:
                if id(tensor) in self._rebound:
                    self._rebound[id(tensor)].check(min(tie.sites))
        wanted = [
            WantedStorage(tie.num_bytes, self._addresses.get(tie.storage.data_ptr()))
            for tie in ties
        ]
        try:
            targets = allocate_all(wanted, self.device)
        except torch.OutOfMemoryError as error:
            total = format_bytes(sum(tie.allocated_bytes for tie in ties))
            error.add_note(
                f"{total} were to come back from the host, and everything still is there, whole. "
                "Make room on the device and call residency.unpark again."
            )
            raise
        mover.follow_to_device()
        try:
            mover.to_device(
                (target, tie.as_bytes())
                for tie, target in zip(ties, targets, strict=True)
                if tie.num_bytes
            ).wait()
        except BaseException:
            mover.settle()
            raise
        moves = [
            Binding(
                self._rebound.get(id(tensor), Rebound(tensor)),
                target.untyped_storage(),
                tie.storage,
            )
            for tie, target in zip(ties, targets, strict=True)
            for tensor in tie.tensors
        ]
        moves += [
            Binding(rebound, rebound.tensor.untyped_storage(), rebound.tensor.untyped_storage())
            for rebound in self._rebound.values()
            if rebound.is_split and rebound.tensor.device == self.device  # moved by other code
        ]
        rebind_all(moves, Rebound.to_device, Rebound.to_host)


def _with_gradients(chosen: Sequence[Tie], ties: Sequence[Tie]) -> list[Tie]:
    """Adds the gradients of parameters that get another body on the host, which shows none that
    stays on the device: what clears them meanwhile would find nothing to clear.
    """
    moved = {
        id(tensor.grad)
        for tie in chosen
        for tensor in tie.tensors
        if tensor.is_leaf and tensor.grad is not None and has_live_accumulator(tensor)
    }
    return [
        tie for tie in ties if tie in chosen or any(id(tensor) in moved for tensor in tie.tensors)
    ]


def _fewest(ties: Sequence[Tie], wanted: int) -> list[Tie]:
    """Chooses storages that together have at least as many bytes, and few more; where that takes
    every byte, those without bytes too, as their owner is then away as a whole.
    """
    if sum(tie.allocated_bytes for tie in ties) <= wanted:
        return list(ties)
    chosen: list[Tie] = []
    left = wanted
    descending = sorted(ties, key=lambda tie: -tie.allocated_bytes)
    for tie in descending:
        if 0 < tie.allocated_bytes <= left:
            chosen.append(tie)
            left -= tie.allocated_bytes
    if left > 0:
        more = [tie for tie in descending if tie.allocated_bytes and tie not in chosen]
        if more:  # each of them is larger than what is left
            chosen.append(more[-1])
            left -= more[-1].allocated_bytes
    for tie in sorted(chosen, key=lambda tie: -tie.allocated_bytes):
        if tie.allocated_bytes <= -left:
            chosen.remove(tie)
            left += tie.allocated_bytes
    return chosen
