"""Carries device tensors to pageable host memory through a small ring of page-locked memory.

The d2h lane fills the ring's slots while the device computes on; the host copies a full slot to
where its bytes stay. Nothing blocks until a tensor is requested, so a caller who asks one batch
later barely waits. Invariant, which ``tests/transfer/test_host_ring.py`` tries to break: the host
reads a slot only when the copies into it are over, and the lane fills it anew only when the host
has read it. ``test_bytes_are_read_when_they_are_there`` and
``test_a_slot_is_filled_anew_when_it_was_read`` try to break it.

[Note: whose bytes] A tensor that no other code can write is copied from where it is. Where another
tensor has the same storage, as a batch's labels have, or where its storage has more than its bytes,
the lane reads a copy that is made on the device at the call.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residency import _device
from residency._errors import RefusedError
from residency._modes import callers_modes_off
from residency._storages import is_dense, laid_over
from residency._transfer._lanes import lanes_of, raw_bytes
from residency._transfer._mover import Flight, Move, Mover
from residency._transfer._slab import Slab, align_up, is_only_one
from residency._units import MIB, format_bytes

_logger = logging.getLogger("residency")
_PLAIN = (Tensor, torch.nn.Parameter)
_RING_BYTES = 32 * MIB  # what `ResidencyCallback` says that an evaluation takes of the host
_NUM_SLOTS = 4  # the lane fills some while the host empties another


class _Outgoing:
    """A device tensor whose bytes are on their way to the host.

    Attributes:
        device: Where it is.
        source: What the lane reads; None once all of it has arrived.
        version: That of the caller's tensor, where the lane reads that one; else None.
        ready: Recorded when the bytes were queued.
        device_bytes: Those that the lane reads.
        host_bytes: Where they go.
        num_left: How many have not arrived.
        is_written: Whether the caller's tensor was written before they had.
    """

    def __init__(
        self, source: Tensor, version: int | None, ready: torch.Event, target: Tensor
    ) -> None:
        self.device = source.device
        self.source: Tensor | None = source
        self.version = version
        self.ready: torch.Event | None = ready
        self.device_bytes: Tensor | None = raw_bytes(source)
        self.host_bytes = raw_bytes(target)
        self.num_left = self.host_bytes.numel()
        self.is_written = False
        if not self.num_left:
            self._let_go()

    def arrive(self, start: int, data: Tensor) -> None:
        """Takes bytes that the ring has brought; with the last ones the device's memory goes."""
        self.host_bytes.narrow(0, start, data.numel()).copy_(data)
        self.num_left -= data.numel()
        if not self.num_left:
            assert self.source is not None
            # torch counts the writes into a tensor, and has no public name for their number.
            self.is_written = self.version not in (None, self.source._version)
            self._let_go()

    def _let_go(self) -> None:
        self.source = self.device_bytes = self.ready = None


@dataclass(slots=True, eq=False)
class _Ferried:
    """A range of a source's bytes, and where it is in the ring."""

    source: _Outgoing
    start: int
    num_bytes: int
    ring_offset: int


@dataclass(slots=True, eq=False)
class _Filling:
    """A slot that the lane fills.

    Attributes:
        slot: Where it begins in the ring.
        stretches: What comes into it.
        flight: Of the copies.
    """

    slot: int
    stretches: list[_Ferried]
    flight: Flight


class Carried:
    """The host tensors to which a ring carries the bytes of others.

    Attributes:
        tensors: One for each that was given, with its dtype, shape and strides. The bytes are
            there after ``wait``.
    """

    def __init__(self, ring: HostRing, tensors: list[Tensor], sources: list[_Outgoing]) -> None:
        self.tensors = tensors
        self._ring = ring
        self._sources = sources

    def wait(self) -> None:
        """Blocks the host until all bytes are there; does nothing when called again.

        Raises:
            RefusedError: One of the tensors was written in place before its bytes were there.
        """
        sources, self._sources = self._sources, []
        self._ring.bring(sources)


class HostRing:
    """A ring of page-locked memory, through which device tensors go to pageable host memory.

    One thread uses it.

    Args:
        num_bytes: Of the ring, a power of two; it is allocated when something first needs it.
        num_slots: How many fillings may be under way at once.

    Memory:
        Host: ``num_bytes``, page-locked if they can be; the bytes of what is carried, pageable.
        Device: what is carried stays until its bytes are there, which ``Carried.wait`` sees to, and
        for tensors that share their storage a copy of their bytes does. [Note: whose bytes]
    """

    _is_made = False  # of one that an interrupt left half made, which has nothing under way

    def __init__(self, *, num_bytes: int = _RING_BYTES, num_slots: int = _NUM_SLOTS) -> None:
        self._num_bytes = num_bytes
        self._slot_bytes = num_bytes // num_slots
        self._slab: Slab | None = None
        self._free = deque(range(0, num_slots * self._slot_bytes, self._slot_bytes))
        self._waiting: deque[tuple[_Outgoing, int]] = deque()  # with the first byte not queued yet
        self._under_way: deque[_Filling] = deque()
        self._is_made = True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._is_made and not is_finalizing():  # modules are empty then
            self._abandon()

    @staticmethod
    def takes(value: object) -> bool:
        """Returns whether a value is a tensor of plain bytes, on the host or an accelerator."""
        if not isinstance(value, Tensor) or type(value) not in _PLAIN:
            return False
        here = _device.accelerator()
        device_types = ("cpu",) if here is None else ("cpu", here.type)
        is_plain = value.layout is torch.strided and not value.is_quantized
        return is_plain and value.device.type in device_types

    @callers_modes_off()
    def carry(self, tensors: Sequence[Tensor]) -> Carried:
        """Begins to copy tensors to the host, and waits for nothing.

        The bytes are those of the call. A tensor that only the caller has must not be written in
        place before they are there: ``Carried.wait`` finds that, and raises.

        Args:
            tensors: Such of which ``takes`` says True; those on the host are copied at once.
        """
        if self._slab is None and not all(tensor.is_cpu for tensor in tensors):
            self._slab = self._allocate()
        taken = [_taken(tensor) for tensor in tensors]
        ready = {
            # The lane reads them when what the current stream has queued so far is done.
            device: lanes_of(device).mark(_device.current_stream(device))
            for device in {source.device for source, _ in taken if not source.is_cpu}
        }
        hosts = [source if source.is_cpu else _host_like(source) for source, _ in taken]
        sources = [
            _Outgoing(source, version, ready[source.device], host)
            for (source, version), host in zip(taken, hosts, strict=True)
            if not source.is_cpu
        ]
        self._waiting.extend((source, 0) for source in sources if source.num_left)
        self._fill()
        return Carried(self, hosts, sources)

    def bring(self, sources: Sequence[_Outgoing]) -> None:
        """Blocks the host until the bytes of some sources are there; see ``Carried.wait``."""
        with callers_modes_off():
            while any(source.num_left for source in sources):
                self._empty_oldest()
        if any(source.is_written for source in sources):
            raise RefusedError(
                "A tensor was written in place while its bytes were on their way to the host, so"
                " that they are neither the old ones nor the new. Give a copy of it away"
                " (tensor.clone()), or write into a new tensor each time."
            )

    def _allocate(self) -> Slab:
        try:
            return Slab(self._num_bytes, pin=True)
        except (RuntimeError, MemoryError) as error:  # the driver's, or a limit on locked pages
            if _device.is_lost(error):
                raise
            _logger.warning(
                "%s of host memory could not be page-locked (%s): copies to the host are slower",
                format_bytes(self._num_bytes),
                str(error),
            )
            return Slab(self._num_bytes, pin=False)

    def _fill(self) -> None:
        """Queues copies into the slots that are free."""
        while self._waiting and self._free:
            self._under_way.append(self._queue(self._free.popleft()))

    def _queue(self, slot: int) -> _Filling:
        """Queues the copies into one slot: of what waits, as much as it has room for."""
        assert self._slab is not None
        device = self._waiting[0][0].device
        stretches: list[_Ferried] = []
        used = 0
        while self._waiting and used < self._slot_bytes and self._waiting[0][0].device == device:
            source, start = self._waiting[0]
            end = min(start + self._slot_bytes - used, source.host_bytes.numel())
            stretches.append(_Ferried(source, start, end - start, slot + used))
            used = align_up(used + end - start)
            if end < source.host_bytes.numel():
                self._waiting[0] = (source, end)
            else:
                self._waiting.popleft()
        return self._queued(slot, stretches, device)

    def _queued(self, slot: int, stretches: list[_Ferried], device: torch.device) -> _Filling:
        assert self._slab is not None
        mover = Mover(device)
        moves: list[Move] = []
        sources: list[Tensor] = []
        for each in stretches:
            source = each.source.device_bytes
            assert source is not None
            # It reads what the caller's stream had queued when the tensor was given.
            mover.follow_to_host(each.source.ready)
            target = self._slab.data.narrow(0, each.ring_offset, each.num_bytes)
            moves.append((target, source.narrow(0, each.start, each.num_bytes)))
            sources.append(source)
        return _Filling(slot, stretches, mover.to_host(moves, sources))

    def _empty_oldest(self) -> None:
        """Copies the oldest filling to where its bytes stay, and lets the lane have its slot."""
        assert self._slab is not None
        filling = self._under_way[0]
        filling.flight.wait()  # the host reads the slot next
        for each in filling.stretches:
            data = self._slab.data.narrow(0, each.ring_offset, each.num_bytes)
            each.source.arrive(each.start, data)
        self._under_way.popleft()
        self._free.append(filling.slot)
        self._fill()

    def _abandon(self) -> None:
        """Waits for the copies that are under way: the lane reads what goes with this object."""
        while self._under_way:
            filling = self._under_way.popleft()
            try:
                filling.flight.wait()
            except Exception as error:  # the next call that asks the device raises it
                why = f"{type(error).__name__}: {error}"
                _logger.warning("copies to the host cannot be waited for: %s", why)


def host_bytes(num_bytes: int) -> Tensor:
    """Returns pageable host memory that is not filled, ``uint8`` of shape ``[num_bytes]``."""
    if num_bytes >= MIB:
        return Slab(num_bytes, pin=False).data  # of large pages, where the system has them
    with callers_modes_off():
        return _device.unfilled_bytes(num_bytes, torch.device("cpu"))


def _host_like(tensor: Tensor) -> Tensor:
    return laid_over(host_bytes(tensor.numel() * tensor.element_size()), 0, tensor)


def _taken(tensor: Tensor) -> tuple[Tensor, int | None]:
    """Returns what is read in a tensor's place, and the tensor's version where it is itself."""
    is_alone = is_only_one(tensor) and not (tensor.is_cpu or tensor.is_inference())
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if is_alone and is_whole and is_dense(tensor) and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.detach(), tensor._version  # see `_Outgoing.arrive`
    return tensor.detach().resolve_conj().resolve_neg().clone(), None  # [Note: whose bytes]
