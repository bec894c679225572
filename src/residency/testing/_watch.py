"""What a test's own lines did to the device: the bytes they left behind, and the work they queued.

The figures are taken around the test's call, between the setup of its fixtures and their end, so
that what a fixture holds counts on neither side.
"""

from __future__ import annotations

import gc
import weakref

import torch

from residency import _device
from residency._memory import addresses_of, describe_device, explain, is_a, measure, slot
from residency._modes import callers_modes_off
from residency._units import format_bytes
from residency.testing._rest import allocated_bytes_at_rest, finish_work, queued_work_error
from residency.testing._settings import Request


class Watch:
    """A watch over one call of a test; made before it, without waiting for the device.

    A wait would hide one that is missing between a fixture and the test.
    """

    def __init__(self, request: Request) -> None:
        """Notes the bytes that tensors hold now."""
        self._request = request
        self._before_bytes = 0
        self._before: list[weakref.ref[torch.Tensor]] = []
        if request.growth is not None:
            self._before_bytes = allocated_bytes_at_rest(0)
            self._before = _tensors_on(_device.accelerator()) if self._before_bytes else []

    def peaks(self) -> dict[str, int]:
        """Returns the test's peaks so far, in bytes, by names for a report: what its tensors held,
        and what the allocator had of the device for them, which is what a limit limits.
        """
        state = measure(_device.accelerator())
        found = {"peak_held_bytes": state.peak_held, "peak_reserved_bytes": state.peak_reserved}
        limit_bytes = self._request.limit_bytes
        return found if limit_bytes is None else {**found, "limit_bytes": limit_bytes}

    def find_fault(self) -> str | None:
        """Lets the work of a call that passed finish, and says what is wrong with it, if anything.

        That is a failure of work that it queued, or more bytes left allocated than may be.
        """
        if failures := finish_work():
            return str(queued_work_error("by the test", failures))
        growth_bytes = self._request.growth_bytes
        if growth_bytes is None:
            return None
        after_bytes = allocated_bytes_at_rest(self._before_bytes + growth_bytes)
        if after_bytes - self._before_bytes <= growth_bytes:
            return None
        return self._explain_growth(after_bytes)

    def explain(self, error: Exception) -> None:
        """Adds notes to the error of a call that failed: its limit, and the failures behind it."""
        limit_bytes = self._request.limit_bytes
        if isinstance(error, torch.OutOfMemoryError) and limit_bytes is not None:
            error.add_note(
                f"device_memory(limit={self._request.limit!r}): the test had "
                f"{format_bytes(limit_bytes)}, and its tensors held at most "
                f"{format_bytes(_device.max_memory_allocated())} of them at once."
            )
        explain(error)
        if failures := finish_work():
            error.add_note(str(queued_work_error("by the test", failures)))

    def _explain_growth(self, after_bytes: int) -> str:
        device = _device.accelerator()
        assert device is not None
        growth_bytes = after_bytes - self._before_bytes
        return (
            f"The test left {format_bytes(growth_bytes)} on {device}: "
            f"{format_bytes(self._before_bytes)} were allocated before it and "
            f"{format_bytes(after_bytes)} after it; "
            f"device_memory(growth={self._request.growth!r}) allows "
            f"{format_bytes(self._request.growth_bytes or 0)}.\n"
            "The tensors that it left, and then all tensors on the device:\n"
            f"{describe_device(device, but=self._addresses_before())}"
        )

    def _addresses_before(self) -> set[int]:
        """Returns where the storages begin that there were before the test, and still are."""
        with callers_modes_off():
            alive = [tensor for ref in self._before if (tensor := ref()) is not None]
            return {address for tensor in alive for address in addresses_of(tensor)}


def _tensors_on(device: torch.device | None) -> list[weakref.ref[torch.Tensor]]:
    """Returns the tensors on a device that Python's garbage collector knows, without keeping one.

    A storage that C++ alone holds is not among them.
    """
    with callers_modes_off():  # what a subclass does on a use of it must not run, nor raise
        return [
            weakref.ref(thing)
            for thing in gc.get_objects()
            if is_a(thing, torch.Tensor) and slot(thing, "device") == device
        ]
