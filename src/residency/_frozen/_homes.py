"""Where a unit's frozen parameters live: bytes on the host, and a storage on the device.

A home is page-locked memory; the parameter is a view of it for as long as its unit is not in use.
The unit's storage on the device is one object for good, whose bytes come and go, so that every view
of it that autograd or a function's context has kept is right whenever the bytes are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from residency import _device
from residency._errors import RefusedError, warn
from residency._frozen._units import FoundUnit
from residency._modes import callers_modes_off
from residency._storages import is_gone, laid_over, weak_reference
from residency._transfer import (
    CopyRun,
    Flight,
    Mover,
    Region,
    SlabArena,
    align_up,
    copy_across,
    joined_runs,
    lanes_of,
    on_lane,
    raw_bytes,
)
from residency._units import format_bytes


class Streamed(NamedTuple):
    """A parameter of a unit.

    Attributes:
        path: Its name in the unit.
        table: Where its module has it.
        key: Under which name.
        parameter: The object, which stays the same one.
        home: The bytes on the host.
        address: Of the home.
        here: The bytes on the device, when they are there.
    """

    path: str
    table: dict[str, Any]
    key: str
    parameter: nn.Parameter
    home: Tensor
    address: int
    here: Tensor


class FrozenUnit:
    """A module's frozen parameters, which come and go together.

    Attributes:
        name: Of the module, in the model.
        index: Its place among the units.
        module: A reference that keeps it not alive.
        entries: The parameters.
        num_bytes: What they take on the device.
        memory: ``uint8``, over the storage on the device, which has no bytes between uses.
        flight: The copy that brings the bytes, from when they are on the device until they go.
        readers: The streams that read them since, by their numbers.
        calls: The calls of the module that are under way, by any objects.
        tasks: The backward passes that are within the unit, by torch's numbers.
        lost_write: Whether the bytes on the device were written in a pass, which the host's do not
            have.
    """

    def __init__(
        self, index: int, found: FoundUnit, entries: list[Streamed], runs: list[CopyRun]
    ) -> None:
        self.index = index
        self.name = found.name
        self.module = weakref.ref(found.module)
        self.entries = entries
        self.num_bytes = found.num_bytes
        self.memory: Tensor
        self.flight: Flight | None = None
        self.readers: dict[tuple[int, int], torch.Stream] = {}
        self.calls: set[object] = set()
        self.tasks: set[int] = set()
        self.lost_write = False
        self._runs = runs
        self._loaded: list[int] = []

    @property
    def is_in_use(self) -> bool:
        """Whether a forward or a backward pass is within the unit."""
        return bool(self.calls or self.tasks)

    @property
    def is_stale(self) -> bool:
        """Whether the host's bytes were written since they were copied, as far as torch counts."""
        return self._loaded != self._counts()

    def point_here(self) -> None:
        """Makes the parameters views of the device's bytes."""
        for entry in self.entries:
            entry.parameter.data = entry.here

    def point_home(self) -> None:
        """Makes the parameters views of the host's bytes."""
        for entry in self.entries:
            entry.parameter.data = entry.home

    def leave(self, uses: set[Any], use: object) -> None:
        """Ends one of the calls or tasks; with the last, the parameters are at home again."""
        if use in uses and self.flight is not None:
            self.lost_write |= self.is_stale
        uses.discard(use)
        if not self.is_in_use:
            self.point_home()

    def load(self, mover: Mover, *, timed: bool) -> None:
        """Queues the copy to the device, where the storage has its bytes."""
        counts = self._counts()
        moves = [run.into(self.memory) for run in self._runs]
        self.flight = mover.to_device(moves, timed=timed)
        self._loaded = counts

    def misplaced(self) -> str | None:
        """Returns a sentence about a parameter that is not as it was left; None if all are."""
        for path, table, key, parameter, _, address, _ in self.entries:
            if table.get(key) is not parameter:
                return f"{self.name} has another object as its {path}"
            if parameter.requires_grad:
                return f"{path} of {self.name} requires a gradient"
            if not self.is_in_use and parameter.data_ptr() != address:
                return f"{path} of {self.name} was given other memory ({parameter.device})"
        return None

    def _counts(self) -> list[int]:
        # torch has no public name for how often a tensor was written.
        return [entry.parameter._version for entry in self.entries]


@callers_modes_off()
def moved_to_host(
    found: Sequence[FoundUnit], device: torch.device, arena: SlabArena
) -> list[FrozenUnit]:
    """Makes units of modules: copies their frozen parameters to the host, one unit after another.

    Raises:
        RefusedError: The host has no room. Of some units all parameters are on the host by now.
    """
    room = max(each.num_bytes for each in found)
    left: list[tuple[StorageWeakRef, int]] = []
    units: list[FrozenUnit] = []
    for index, each in enumerate(found):
        for frozen in each.frozen:
            if not frozen.parameter.is_cpu:
                storage = frozen.parameter.untyped_storage()
                left.append((weak_reference(storage), storage.nbytes()))
                del storage
        units.append(_moved(index, each, device, arena, room))
    if held := sum(num_bytes for storage, num_bytes in left if not is_gone(storage)):
        warn(
            f"{format_bytes(held)} of the frozen parameters stay on {device}: other code holds the "
            "same storages, as bitsandbytes' 8-bit layers do. residency.holders() names it."
        )
    return units


def _moved(
    index: int, found: FoundUnit, device: torch.device, arena: SlabArena, room: int
) -> FrozenUnit:
    parameters = [each.parameter for each in found.frozen]
    try:
        regions = arena.allocate_all([p.nbytes for p in parameters])
    except RefusedError as error:
        raise RefusedError(
            f"the host has no room for {format_bytes(found.num_bytes)} of {found.name}; give the "
            f"process more host memory, or name fewer units: {error}"
        ) from error
    offsets = [0]
    for parameter in parameters:
        offsets.append(offsets[-1] + align_up(parameter.nbytes))
    memory = empty_storage(room, device)
    entries = []
    for frozen, region, offset in zip(found.frozen, regions, offsets, strict=False):
        p = frozen.parameter
        home = arena.tensor(region, p.dtype, p.shape, p.stride())
        here = laid_over(memory, offset, home)
        table = frozen.owner._parameters
        entries.append(Streamed(frozen.path, table, frozen.key, p, home, home.data_ptr(), here))
    _fill(zip(entries, regions, strict=True), device)
    release(memory, device)
    unit = FrozenUnit(index, found, entries, _runs_of(regions, offsets, parameters))
    unit.memory = memory
    unit.point_home()
    return unit


def _fill(entries: Iterable[tuple[Streamed, Region]], device: torch.device) -> None:
    """Copies parameters to their homes, from wherever they are; blocks the host."""
    mover = Mover(device)
    moves = []
    for entry, region in entries:
        if entry.parameter.is_cpu:
            copy_across(entry.home, entry.parameter)
        else:
            source = raw_bytes(entry.parameter)
            moves.append((region.slab.data.narrow(0, region.offset, source.numel()), source))
    if not moves:
        return
    sources = [source for _, source in moves]
    mover.follow_to_host()
    try:
        mover.to_host(moves, sources).wait()
    except BaseException:
        mover.settle()
        raise
    mover.let_go(sources)


def _runs_of(
    regions: Sequence[Region], offsets: Sequence[int], parameters: Sequence[Tensor]
) -> list[CopyRun]:
    """Returns the copies of a unit, as few as there can be."""
    places = zip(regions, offsets, parameters, strict=False)
    runs = (CopyRun(r.slab, r.offset, offset, p.nbytes) for r, offset, p in places)
    return joined_runs((run, True) for run in runs)


def empty_storage(num_bytes: int, device: torch.device) -> Tensor:
    """Allocates bytes on the lane to the device, whose later copies alone may have their memory."""
    with on_lane(lanes_of(device).h2d), callers_modes_off():
        return _device.unfilled_bytes(num_bytes, device)


def release(memory: Tensor, device: torch.device) -> None:
    """Takes a storage's bytes away; the lane comes behind all that reads them."""
    with on_lane(lanes_of(device).h2d):
        memory.untyped_storage().resize_(0)


def take(memory: Tensor, num_bytes: int, device: torch.device) -> None:
    """Gives a storage its bytes back."""
    with on_lane(lanes_of(device).h2d):
        memory.untyped_storage().resize_(num_bytes)
