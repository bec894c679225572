"""The bytes of a state tree as they were at one call, as host tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from residency._checkpoint._capture._capture import (
    Capture,
    capture_described,
    check_verify,
    view_of,
)
from residency._checkpoint._capture._walk import describe
from residency._checkpoint._document._state_dicts import state_dicts
from residency._dtensor import local_of, wrapped_like
from residency._modes import callers_modes_off
from residency._transfer import SlabArena


class Snapshot:
    """The copies on the host that ``snapshot`` returns, under way or complete."""

    def __init__(self, captured: Capture, arena: SlabArena) -> None:
        self._capture = captured
        self._arena = arena
        self._tree: object = None
        self._is_complete = False
        # A snapshot whose tree is never asked for leaves no loan behind.
        self._end = weakref.finalize(self, captured.release)
        self._end.atexit = False

    def wait(self) -> Snapshot:
        """Blocks the host until the copies are complete; returns the snapshot.

        Raises:
            CheckpointError: With ``verify="full"``, code outside of ``residency.mutating`` wrote to
                a tensor during its copy.
            RefusedError: The host has no room for a copy of an offloaded optimizer's state that
                another save or snapshot reads, too.
        """
        if not self._is_complete:
            spans = {id(held.block): held.final() for held in self._capture.held}
            self._tree = self._build(spans)
            self._end()  # the tensors keep the memory from here on
            self._is_complete = True
        return self

    def is_done(self) -> bool:
        """Returns whether the copies are complete; does not wait."""
        return self._is_complete or all(held.is_done() for held in self._capture.held)

    @property
    def tree(self) -> Any:
        """The tree: modules, optimizers and the like as their state dicts, ties kept; waits
        for the copies.

        Sharded tensors are ``DTensor`` around host tensors, with their mesh and placements.
        """
        return self.wait()._tree

    def _build(self, spans: dict[int, Tensor]) -> object:
        tensors = {
            id(held.block): held.hand_over(spans[id(held.block)]) for held in self._capture.held
        }
        return tree_of(self._capture, tensors)


@callers_modes_off()
def tree_of(captured: Capture, spans: Mapping[int, Tensor]) -> Any:
    """Returns what was captured as state dicts over host memory.

    Args:
        captured: The capture.
        spans: The final bytes of each block, by the block's ``id``.
    """
    tensors: dict[str, Tensor] = {}
    for held in captured.held:
        for name, layout in held.block.layouts.items():
            tensors[name] = view_of(spans[id(held.block)], layout)
    for name, leaf in captured.description.leaves.items():  # those of shards alone
        found = tensors.get(name)
        if found is None:  # no element of it is on this rank
            local = local_of(leaf.value)
            found = torch.empty(local.shape, dtype=local.dtype)
        tensors[name] = wrapped_like(found, leaf.value)
    return state_dicts(captured.description.tree, tensors.__getitem__)


def snapshot(tree: object, *, verify: str = "gate", pin: bool = True) -> Snapshot:
    """Copies a state tree to the host as it is now, without stopping training.

    Returns when the copies are queued. Training may go on at once: the current stream waits for the
    copies of buffers; the next optimizer step waits, on the device, for the copies of its own
    parameters and states; the host does not wait. Code that writes in other ways must use
    ``residency.mutating``.

    Args:
        tree: Modules, optimizers, LR schedulers, ``GradScaler``, whatever has ``state_dict`` and
            ``load_state_dict``, tensors, arrays, plain values, and containers of all these.
        verify: ``"full"`` compares sums over all bytes of device tensors before and after the
            copies, and so finds writes outside of ``residency.mutating``; ``"gate"`` does not.
        pin: Whether copies from a device go to page-locked memory; if not, they block the host.

    Returns:
        The snapshot; its tensors are yours, and keep their memory as long as they live.

    Raises:
        InvalidArgumentError: ``verify`` is neither.
        RefusedError: Something in the tree, which the message names, cannot be in it; or the host
            has no room.

    Memory:
        Device: none; with ``verify="full"``, 8 bytes per 16 KiB and up to 32 KiB for each tensor.
        Host: the bytes of the tree (overlapping tensors: their common span once), each rounded up
        to 512, plus the unused end of each slab. An offloaded optimizer gets a second set of homes:
        its next step moves there, and the snapshot keeps the first set. If ``wait`` or ``tree``
        comes before a step, the host copies the state there for the snapshot. The first call of a
        size page-locks this memory, and the host waits for that: seconds for gigabytes on CUDA.
        Torch keeps the memory after the snapshot is deleted, and the next snapshot of the same
        sizes uses it. ``torch.accelerator.empty_host_cache()`` (torch 2.12 and later) gives it back
        to the system; so does any call of this library that finds too little host memory.
    """
    is_verified = check_verify(verify)
    arena = SlabArena(pin=pin)
    described = describe(tree, is_lasting=True)
    captured = capture_described(described, arena=arena, verify=is_verified)
    return Snapshot(captured, arena)
