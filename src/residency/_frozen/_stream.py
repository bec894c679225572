"""The two ends of the streaming of a model's frozen parameters.

Invariant, which ``tests/frozen/test_stop.py`` tries to break: a call that fails leaves the whole
model where it was, on the host or on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from residency import _device
from residency._errors import InvalidArgumentError, RefusedError
from residency._frozen import _guards
from residency._frozen._homes import FrozenUnit, moved_to_host
from residency._frozen._passes import UnitPasses
from residency._frozen._slots import UnitSlots
from residency._frozen._statistics import FrozenStatistics
from residency._frozen._units import FoundUnit, units_of
from residency._transfer import SlabArena, note_visitor
from residency._units import format_bytes
from residency._whole import done_whole


def stream_frozen(
    model: nn.Module, *, units: Iterable[nn.Module | str] | None = None, slots: int = 2
) -> FrozenStream:
    """Keeps a model's frozen parameters on the host, and has a few of its blocks on the device.

    For a LoRA run whose base does not fit: load the model on the host, freeze the base, add the
    adapters, and call this in the place of ``model.to(device)``. Each block's frozen parameters are
    copied to the device before the block runs, forward and backward, while the block before it
    computes. Nothing is copied back. All results keep their bits.

    Between uses the parameters are ordinary tensors on the host: ``state_dict``,
    ``save_pretrained`` and saves need no device memory. All else in the model goes to the device.
    A later ``model.to(device)`` moves none of the streamed parameters.

    Args:
        model: On the host, or on one device.
        units: The modules whose frozen parameters come and go together, or their names in the
            model; a ``ModuleList`` stands for its members. None finds the repeated blocks.
        slots: How many units are on the device at once, at least 2. More than two help if blocks
            differ much in their size or time.

    Returns:
        The stream. It lasts until ``stop()``, the end of a ``with``, or the end of the model.

    Raises:
        InvalidArgumentError: An argument is invalid.
        RefusedError: The model has no frozen parameters, its units share parameters or are compiled
            or wrapped, nothing would be freed, a slot is larger than the device, or the host has no
            room. Nothing was changed.
        torch.OutOfMemoryError: The device has no room for the slots and for the rest of the model.
            The whole model is back on the host, or on the device that had it.

    Memory:
        Device: ``slots * largest_unit``, each parameter rounded up to 512 bytes, in the place of
        the units' frozen bytes. Host: these bytes, page-locked, in slabs whose sizes are powers of
        two; one unit twice while it is moved.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model is a {type(model).__name__}; expected a module.")
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 2:
        raise InvalidArgumentError(
            f"slots is {slots!r}; expected an int of at least 2: one unit computes, one comes."
        )
    if streamed := _guards.streamed_in(model):
        raise RefusedError(
            f"{streamed[0].name} of this {type(model).__name__} streams already. Nothing was "
            "changed; call stop() of the stream that stream_frozen returned."
        )
    device = _device_of(model)
    found = units_of(model, units, slots)
    _refuse_too_large(found, slots, device)
    return FrozenStream(model, found, slots, device)


class FrozenStream:
    """The streaming of a model's frozen parameters, from ``stream_frozen``.

    Attributes:
        units: The names of the modules whose frozen parameters come and go together.
        device: The accelerator.
    """

    def __init__(
        self, model: nn.Module, found: list[FoundUnit], slots: int, device: torch.device
    ) -> None:
        self.device = device
        self.units = [each.name for each in found]
        was_on_host = all(tensor.is_cpu for tensor in (*model.parameters(), *model.buffers()))
        self._arena = SlabArena()
        self._units: list[FrozenUnit] = []
        self._passes: UnitPasses | None = None
        try:
            self._units = moved_to_host(found, device, self._arena)
            self._slots = UnitSlots(self._units, device, slots)
            self._passes = UnitPasses(self._units, self._slots)
            _guards.begin(self._units, self._passes)
            nn.Module.to(model, device)  # all but what streams; some classes refuse their own
            # What the units had there is in the caller's pool, of which the lane takes nothing.
            _device.empty_cache(device)
            note_visitor(self._slots)
        except BaseException:
            done_whole(self._end)
            nn.Module.to(model, "cpu" if was_on_host else device)
            raise

    def __repr__(self) -> str:
        num_bytes = format_bytes(sum(unit.num_bytes for unit in self._units))
        how = "stopped" if self.is_stopped else f"{self._slots.num_slots} slots on {self.device}"
        return f"FrozenStream({len(self.units)} units, {num_bytes} on the host, {how})"

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._passes is None or self._passes.is_over

    def stop(self) -> None:
        """Ends the streaming; moves nothing, and may be called again.

        The frozen parameters are ordinary parameters on the host from here on:
        ``model.to(device)`` or ``model.cpu()`` puts the whole model in one place, to merge an
        adapter, to copy the model or to generate with everything on the device.

        Raises:
            RefusedError: A forward or backward pass through a unit is under way.
        """
        if self.is_stopped:
            return
        if self._passes is not None and self._passes.is_under_way():
            raise RefusedError(
                "stop() was called within a forward or backward pass through a streamed unit. "
                "Nothing was changed; call it between passes."
            )
        done_whole(self._end)

    def _end(self) -> None:
        _guards.end(self._units)
        if self._passes is not None:
            self._slots.drop_all()
            self._passes.is_over = True

    def statistics(self) -> FrozenStatistics:
        """Returns the figures so far; waits for copies that are under way."""
        home_bytes = sum(unit.num_bytes for unit in self._units)
        return FrozenStatistics(
            num_units=len(self._units),
            home_bytes=home_bytes,
            pinned_bytes=self._arena.pinned_bytes,
            slot_bytes=self._slots.room,
            num_slots=self._slots.num_slots,
            here_bytes=self._slots.held_bytes,
            saved_bytes=home_bytes - self._slots.num_slots * self._slots.room,
            num_loads=self._slots.num_loads,
            num_late=self._slots.num_late,
            copied_bytes=self._slots.copied_bytes,
            to_device_bytes_per_second=self._slots.rate(),
            exposed_seconds=self._slots.exposed_seconds(),
            is_simulated=_device.is_simulated(),
        )

    def __enter__(self) -> FrozenStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _device_of(model: nn.Module) -> torch.device:
    """Returns the accelerator that a model is on, or is to go to."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    there = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
    accelerator = _device.accelerator()
    if accelerator is None:
        raise RefusedError(
            "there is no accelerator, to which parameters could stream. Nothing was changed; "
            "residency.sim.enable() makes a simulated one."
        )
    if len(there) > 1 or any(d.type != accelerator.type for d in there):
        raise RefusedError(
            f"this {type(model).__name__} is on {', '.join(map(str, there))}; expected it on the "
            "host or on one accelerator. Nothing was changed; load it without a device_map over "
            "several devices."
        )
    device = there[0] if there else accelerator
    _device.refuse_shared_memory(device, f"streaming this {type(model).__name__}")
    return device


def _refuse_too_large(found: list[FoundUnit], slots: int, device: torch.device) -> None:
    largest = max(found, key=lambda each: each.num_bytes)
    room = _device.device_room(device)
    if room is not None and slots * largest.num_bytes > room[1]:
        raise RefusedError(
            f"{slots} slots of {largest.name}, the largest unit ({format_bytes(largest.num_bytes)} "
            f"of frozen parameters), are more than {device} has ({format_bytes(room[1])}). Nothing "
            "was changed; name smaller units: units=[...]."
        )
