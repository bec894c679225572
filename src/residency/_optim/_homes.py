"""Where the state of an offloaded optimizer lives: a tensor of host memory for each state.

Invariant: bytes go into a home only through ``Homes.fill``, a copy home of the step, or a restore,
and never while a save reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from residency._transfer import (
    Gate,
    Lanes,
    Region,
    SlabArena,
    align_up,
    gate_of,
    is_sharded,
    lanes_of,
    lending,
    local_of,
    wrapped_like,
)


@dataclass(slots=True)
class Home:
    """Is the place of one state tensor.

    Attributes:
        tensor: The bytes; of a sharded state, the local tensor.
        region: The range under them.
        value: What callers see: the tensor, or a ``DTensor`` around it.
    """

    tensor: Tensor
    region: Region
    value: Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Homes:
    """Makes and fills the homes of one optimizer.

    Attributes:
        device: The accelerator that the parameters are on.
        version: Changes whenever a home appears, moves or goes; plans are made for one version.
        newest: The event after the newest copy home, of whatever parameter.
        reserved: Homes for state that is not made yet, by parameter and key.
        spare_bytes: Room for states that are written while a save reads their homes.
    """

    def __init__(self, device: torch.device, *, pin: bool = True, spare_bytes: int = 0) -> None:
        self.device = device
        self.arena = SlabArena(pin=pin)
        self.lanes: Lanes = lanes_of(device)
        self.gate: Gate = gate_of(device)
        self.version = 0
        self.newest: torch.Event | None = None
        self.spare_bytes = spare_bytes
        self._num_spare_bytes_made = 0
        self.reserved: dict[Tensor, dict[str, Home]] = {}

    def allocate(
        self, like: Tensor, shape: torch.Size | None = None, *, shard_of: Tensor | None = None
    ) -> Home:
        """Makes an unfilled home for a tensor like this one.

        Args:
            like: Gives the dtype, what callers see and, unless ``shape`` is given, the shape and
                (dense) strides.
            shape: A contiguous shape instead.
            shard_of: The parameter whose mesh and placements callers see, instead of those of
                ``like``.
        """
        self.version += 1
        model = _model_of(local_of(like), shape)
        num_bytes = model.numel() * model.element_size()
        region = self.arena.allocate(num_bytes)
        return self._home_in(region, model, like if shard_of is None else shard_of)

    def make_spare(self, sizes: Sequence[int]) -> None:
        """Allocates the spare, once: as much as it may be, or as these entries take if less.

        Raises:
            RefusedError: The host has no room.
        """
        wanted = min(self.spare_bytes, sum(align_up(max(size, 1)) for size in sizes))
        if wanted > self._num_spare_bytes_made:
            self.arena.reserve([wanted - self._num_spare_bytes_made])
            self._num_spare_bytes_made = wanted
            self.arena.is_kept = True

    def writable(self, home: Home) -> Home:
        """Returns a home in place of one that a save reads: another one of the spare, or, where
        that is used up, the same one once the save has given it back; the host waits for that.
        """
        found: list[Home] = []

        def is_found() -> bool:
            if not lending.is_lent(home.tensor):
                found.append(home)
            else:
                region = self.arena.find_room(home.num_bytes)
                if region is None and lending.is_kept(home.tensor):
                    region = self.arena.allocate(home.num_bytes)
                if region is not None:
                    found.append(self._home_in(region, home.tensor, home.value))
            return bool(found)

        if not is_found():
            lending.wait_until(is_found)
        return found[0]

    def _home_in(self, region: Region, model: Tensor, like: Tensor) -> Home:
        tensor = self.arena.tensor(region, model.dtype, model.shape, model.stride())
        return Home(tensor, region, wrapped_like(tensor, like))

    def reserve(self, parameter: Tensor, schema: Mapping[str, Tensor]) -> None:
        """Makes homes for state to come, where there are none that fit."""
        reserved = self.reserved.setdefault(parameter, {})
        for key, like in schema.items():
            if not self.fits(reserved.get(key), like):
                reserved[key] = self.allocate(like)

    def fits(self, home: Home | None, like: Tensor, shape: torch.Size | None = None) -> bool:
        """Says whether a home is such as ``allocate`` would make, and may be written."""
        if home is None or lending.is_lent(home.tensor):
            return False
        tensor, model = home.tensor, _model_of(local_of(like), shape)
        return (tensor.dtype, tensor.shape, tensor.stride()) == (
            model.dtype,
            model.shape,
            model.stride(),
        )

    def takes(self, home: Home | None, value: Tensor) -> TypeGuard[Home]:
        """Says whether a value's bytes may go into a home: it is as large, and no save reads it."""
        return (
            home is not None
            and (home.tensor.shape, home.tensor.dtype) == (value.shape, value.dtype)
            and not lending.is_lent(home.tensor)
        )

    def fill(self, home: Home | None, value: Tensor) -> Home:
        """Copies a value home, blocking the host, into ``home`` where it fits and a new home
        otherwise.
        """
        local = local_of(value).detach()
        if not self.takes(home, local):
            home = self.allocate(value)
            # The range may have belonged to a tensor whose last copy home has not landed yet.
            if self.newest is not None:
                self.newest.synchronize()
        if home.tensor.data_ptr() != local.data_ptr() or local.numel() == 0:
            home.tensor.copy_(local)
        if is_sharded(value):
            home.value = wrapped_like(home.tensor, value)
        return home


def _model_of(like: Tensor, shape: torch.Size | None) -> Tensor:
    if shape is not None:
        return torch.empty(shape, dtype=like.dtype, device="meta")
    # What is not dense is copied row by row (raw_bytes), so its home is contiguous.
    if not torch.ops.aten.is_non_overlapping_and_dense.default(like):
        return torch.empty(like.shape, dtype=like.dtype, device="meta")
    return torch.empty_like(like, device="meta", memory_format=torch.preserve_format)
