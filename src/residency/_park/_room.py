"""Room on a device for many storages at once, where there is little more than they need.

[Note: the way back] Storages that were parked fitted before, in holes between tensors that stayed
and in segments that went back to the device. Taken one by one they may land elsewhere than they
were, and the last one finds no hole. So where the plain way fails they go back in the runs in which
they lay one beside the other: a placeholder takes the room of each run, the longest first, and is
filled when all runs have theirs. Meanwhile another one holds the device's free memory, so that runs
from holes find holes.
``test_what_was_parked_fits_back_on_a_device_that_is_nearly_full`` tries it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residency import _device
from residency._memory import SMALL_BLOCK_BYTES, SMALL_SEGMENT_BYTES
from residency._transfer import align_up

_GRAIN = SMALL_SEGMENT_BYTES  # the caching allocator asks the device for multiples of this


class DoesNotFitError(torch.OutOfMemoryError):
    """The device has no room for all storages.

    Attributes:
        num_bytes: The bytes for which none was found in the best of several attempts.
    """

    def __init__(self, message: str, num_bytes: int) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes


@dataclass(frozen=True, slots=True)
class WantedStorage:
    """A storage that is to come to the device.

    Attributes:
        num_bytes: Its size.
        address: Where it was on the device; None where that is not known.
    """

    num_bytes: int
    address: int | None = None


def allocate_all(wanted: Sequence[WantedStorage], device: torch.device) -> list[Tensor]:
    """Allocates a ``uint8`` tensor for each storage. [Note: the way back]

    Raises:
        DoesNotFitError: There is no room; what was allocated is free again.

    Memory:
        Device: the storages.
    """
    most: int | None = None
    cause: torch.OutOfMemoryError | None = None
    attempts: list[Callable[[_Allocation], None]] = [_one_by_one, _holes_first, _by_runs]
    for number, attempt in enumerate(attempts):
        if number:
            _device.empty_cache(device)
        state = _Allocation(wanted, device)
        attempt(state)
        missing = state.num_bytes_missing
        if not missing:
            return [state.made[index] for index in range(len(wanted))]
        most = missing if most is None else min(most, missing)
        cause = cause or state.error
        del state
    assert cause is not None
    assert most is not None
    raise DoesNotFitError(str(cause), most) from cause


class _Allocation:
    """One attempt to place storages.

    Attributes:
        made: The tensors so far, by index.
        error: Why one was not to be had.
    """

    def __init__(self, wanted: Sequence[WantedStorage], device: torch.device) -> None:
        self.made: dict[int, Tensor] = {}
        self.error: torch.OutOfMemoryError | None = None
        self._wanted = wanted
        self._device = device

    @property
    def num_bytes_missing(self) -> int:
        absent = (w.num_bytes for i, w in enumerate(self._wanted) if i not in self.made)
        return sum(map(align_up, absent)) if len(self.made) < len(self._wanted) else 0

    def find(self, num_bytes: int) -> Tensor | None:
        """Allocates bytes, if there is room."""
        try:
            return _device.unfilled_bytes(num_bytes, self._device)
        except torch.OutOfMemoryError as error:
            self.error = error.with_traceback(None)  # which would keep what the frames have
            return None

    def allocate(self, indices: Iterable[int]) -> None:
        """Allocates storages, the largest first, as far as there is room."""
        for index in sorted(indices, key=lambda index: -self._wanted[index].num_bytes):
            tensor = self.find(self._wanted[index].num_bytes)
            if tensor is not None:
                self.made[index] = tensor

    def runs(self) -> list[tuple[int, list[int]]]:
        """Returns storages that lay one behind the other, with their bytes, the longest first."""
        large = [
            (wanted.address, index)
            for index, wanted in enumerate(self._wanted)
            if wanted.address is not None and wanted.num_bytes > SMALL_BLOCK_BYTES
        ]
        runs: list[tuple[int, list[int]]] = []
        end = -1
        for address, index in sorted(large):
            size = align_up(self._wanted[index].num_bytes)
            if address == end:
                runs[-1] = (runs[-1][0] + size, [*runs[-1][1], index])
            else:
                runs.append((size, [index]))
            end = address + size
        return sorted(runs, key=lambda run: -run[0])

    def hold_free_memory(self, num_bytes: int) -> Tensor | None:
        """Takes the device's own free bytes, no more than so many and the rest of a segment."""
        room = _device.device_room(self._device)
        most = 0 if room is None else min(room[0], num_bytes + _GRAIN)
        return self.find(most // _GRAIN * _GRAIN) if most >= _GRAIN else None


def _one_by_one(attempt: _Allocation) -> None:
    attempt.allocate(range(len(attempt._wanted)))


def _holes_first(attempt: _Allocation) -> None:
    _by_runs(attempt, is_holding=True)


def _by_runs(attempt: _Allocation, *, is_holding: bool = False) -> None:
    runs = attempt.runs()
    in_runs = {index for _, run in runs for index in run}
    attempt.allocate(index for index in range(len(attempt._wanted)) if index not in in_runs)
    held = attempt.hold_free_memory(sum(size for size, _ in runs)) if is_holding else None
    found: list[tuple[Tensor, list[int]]] = []
    for is_last in (False, True):
        left: list[tuple[int, list[int]]] = []
        for size, run in runs:
            block = attempt.find(size)
            if block is None:
                left.append((size, run))
            else:
                found.append((block, run))
        runs = left
        if not is_last:
            del held
            held = None
    while found:
        block, run = found.pop()
        del block  # its room is the only one of its size
        attempt.allocate(run)
    attempt.allocate(index for _, run in runs for index in run)
