"""The books of the device: how much each kind of owner held at every moment, phase by phase.

The simulator's journal says which blocks were handed out and taken back, in order. At the end of a
phase its blocks get their kinds: what modules and optimizers own by then, and of the rest, what
forward and backward passes made is activations. A kind stays: it is that of the block's first
phase, at whose end it is known.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from residency._dryrun._owners import GRADIENTS, PARAMETERS, STATE

ACTIVATIONS, OTHER = "activations", "other"
KINDS: tuple[str, ...] = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, OTHER)
_ENTRY = struct.Struct("5q")  # address, bytes, bytes asked for, bytes reserved, stream
_MOST_POINTS = 150  # of the timeline, for one visit
_PASSES = ("forward", "backward", "evaluate", "generate")  # how the names of such phases end


@dataclass(slots=True)
class Phase:
    """The visits of a phase, added up.

    Attributes:
        name: What it is called.
        visits: How often it was entered.
        peak_allocated: The most bytes that tensors held in it.
        peak_reserved: The most bytes that the allocator had from the device.
        at_peak: Bytes of each kind at the moment of `peak_allocated`; they sum to it.
    """

    name: str
    visits: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)


class _BlockOfDevice:
    __slots__ = ("kind", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.kind = ""


class Books:
    """The bytes that were held, by kind, from the first allocation on.

    Attributes:
        phases: The phases by name, in the order of their first visit.
        timeline: ``[number of allocations and frees so far, bytes of each kind..., reserved]``.
        marks: Where in the timeline each visit ends, as ``[number, name]``.
    """

    def __init__(self, take_journal: Callable[[], bytes]) -> None:
        """Takes the function that returns the journal since its last call."""
        self.phases: dict[str, Phase] = {}
        self.timeline: list[list[int]] = []
        self.marks: list[tuple[int, str]] = []
        self._take_journal = take_journal
        self._live: dict[int, _BlockOfDevice] = {}
        self._held = 0
        self._reserved = 0
        self._position = 0
        self._is_pass = False

    @property
    def held(self) -> int:
        """Bytes that tensors hold, as far as the journal was read."""
        return self._held

    def has_unknown(self) -> bool:
        """Says whether a block is held whose kind is only guessed."""
        return any(block.kind in ("", ACTIVATIONS, OTHER) for block in self._live.values())

    def close(self, name: str, kinds: Callable[[], dict[int, str]]) -> None:
        """Books what happened since the last call under a phase.

        Args:
            name: The phase that ends here.
            kinds: Says what the blocks of modules and optimizers are; called where there is
                something to book.
        """
        phase = self.phases.setdefault(name, Phase(name))
        phase.visits += 1
        first_held, first_reserved = self._held, self._reserved
        events = self._read()
        if events or not phase.at_peak:
            self._name_blocks(name, kinds())
        peak, at = first_held, -1
        held, reserved = first_held, first_reserved
        for index, (_, num_bytes, now_reserved) in enumerate(events):
            held += num_bytes
            reserved = max(reserved, now_reserved)
            if held > peak:
                peak, at = held, index
        phase.peak_reserved = max(phase.peak_reserved, reserved)
        at_peak = self._draw(events, at)
        if peak > phase.peak_allocated or not phase.at_peak:
            phase.peak_allocated, phase.at_peak = peak, at_peak
        self.marks.append((self._position, name))

    def _read(self) -> list[tuple[_BlockOfDevice, int, int]]:
        events = []
        for address, num_bytes, _, reserved, _ in _ENTRY.iter_unpack(self._take_journal()):
            if num_bytes > 0:
                block = self._live[address] = _BlockOfDevice(num_bytes)
            else:
                known = self._live.pop(address, None)
                if known is None:  # from before the journal
                    continue
                block = known
            self._held += num_bytes
            self._reserved = reserved
            events.append((block, num_bytes, reserved))
        return events

    def _name_blocks(self, name: str, kinds: dict[int, str]) -> None:
        # What a pass made and nobody owns is activations, and what is left of them after the
        # optimizer's step something else: workspaces, buckets.
        is_pass = name.endswith(_PASSES)
        is_after_step = name.endswith("optimizer step")
        for address, block in self._live.items():
            owner = kinds.get(address)
            if owner is not None:
                block.kind = owner
            elif not block.kind:
                block.kind = ACTIVATIONS if is_pass else OTHER
            elif is_after_step and block.kind == ACTIVATIONS:
                block.kind = OTHER
        self._is_pass = is_pass

    def _draw(self, events: list[tuple[_BlockOfDevice, int, int]], peak_at: int) -> dict[str, int]:
        """Adds the visit to the timeline; returns the bytes of each kind at its peak."""
        held = dict.fromkeys(KINDS, 0)
        for block in self._live.values():
            held[block.kind or OTHER] += block.num_bytes
        for block, num_bytes, _ in events:
            if not block.kind:  # made and let go in this visit
                block.kind = ACTIVATIONS if self._is_pass else OTHER
            held[block.kind] -= num_bytes
        at_peak = dict(held)
        stride = max(1, len(events) // _MOST_POINTS)
        for index, (block, num_bytes, reserved) in enumerate(events):
            held[block.kind] += num_bytes
            if index == peak_at:
                at_peak = dict(held)
            if index % stride == 0 or index == peak_at or index == len(events) - 1:
                point = [self._position + index, *(held[kind] for kind in KINDS), reserved]
                self.timeline.append(point)
        self._position += len(events)
        return at_peak
