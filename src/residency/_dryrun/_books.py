"""The books of the device: how much each kind of owner held at every moment, phase by phase.

The simulator's journal says which blocks were handed out and taken back, in order. At the end of a
phase its blocks get their kinds: what modules and optimizers own by then, and of the rest, what
forward and backward passes made is activations. What is made and let go inside a phase has a kind
of its own only where the call that makes it is known (`Books.making`). A kind stays that of the
block, whatever has its address later: `tests/dryrun/test_books.py` uses addresses again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from residency._dryrun._owners import GRADIENTS, PARAMETERS, STATE

GATHERED, ACTIVATIONS, OTHER = "gathered parameters", "activations", "other"
KINDS: tuple[str, ...] = (PARAMETERS, GATHERED, GRADIENTS, STATE, ACTIVATIONS, OTHER)
_ENTRY = struct.Struct("5q")  # address, bytes, bytes asked for, bytes reserved, stream
_MOST_POINTS = 150  # of the timeline, for one visit
STEP, BETWEEN = "optimizer step", "between phases"
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
    __slots__ = ("free_pass", "kind", "loaded_at", "num_bytes", "num_steps", "round")

    def __init__(self, num_bytes: int, number: int, free_pass: int) -> None:
        self.num_bytes = num_bytes
        self.round = number  # of the training loop
        self.free_pass = free_pass
        self.kind = -1  # an index of KINDS, once it is known
        self.loaded_at = -1  # where in the timeline a load has made it
        self.num_steps = 0  # those of optimizers that it has outlived, as an activation


_Event = tuple[_BlockOfDevice, int, int]  # what was made or let go, its bytes, bytes reserved
_INDEX = {kind: index for index, kind in enumerate(KINDS)}
_GATHERED, _ACTIVATIONS, _OTHER = _INDEX[GATHERED], _INDEX[ACTIVATIONS], _INDEX[OTHER]


class Books:
    """The bytes that were held, by kind, from the first allocation on.

    Attributes:
        phases: The phases by name, in the order of their first visit.
        timeline: ``[number of allocations and frees so far, bytes of each kind..., reserved]``.
        marks: Where in the timeline each visit ends, as ``[number, name]``.
        round: The round of the training loop that is under way, as who counts them says.
        free_pass: The forward pass without gradients that comes next or is under way.
        owned: What a load brought, and what it became when it was put into place: ``[number when it
            was made, number when it had an owner, index of the kind before, of that of the owner,
            bytes]``. In between the timeline has it as the kind before.
    """

    def __init__(self, take_journal: Callable[[], bytes]) -> None:
        """Takes the function that returns the journal since its last call."""
        self.phases: dict[str, Phase] = {}
        self.timeline: list[list[int]] = []
        self.marks: list[tuple[int, str]] = []
        self.owned: list[tuple[int, int, int, int, int]] = []
        self.round = 0
        self.free_pass = 0
        self._take_journal = take_journal
        self._live: dict[int, _BlockOfDevice] = {}
        self._events: list[_Event] = []  # of the phase that is open
        # Of what was held at the peak of a load: what it is for shows when it is put into place.
        self._loaded: dict[_BlockOfDevice, Phase] = {}
        self._held = 0  # when it began
        self._reserved = 0
        self._position = 0
        self._last: Phase | None = None  # that ended, but for what lies between phases
        self._between: Phase | None = None  # what lay between that one and the one of now

    @property
    def held(self) -> int:
        """Bytes that tensors held when the last phase ended."""
        return self._held

    def made_in(
        self, rounds: range, *, but: str, are_free_passes: bool = False
    ) -> dict[int, dict[int, int]]:
        """Returns what there still is of some rounds: bytes by address, by round.

        Args:
            rounds: The numbers of the rounds.
            but: A kind that is left out.
            are_free_passes: Whether they are those of passes without gradients.
        """
        found: dict[int, dict[int, int]] = {number: {} for number in rounds}
        for address, block in self._live.items():
            number = block.free_pass if are_free_passes else block.round
            if number in found and block.kind != _INDEX[but]:
                found[number][address] = block.num_bytes
        return found

    def end_free_pass(self) -> None:
        """Takes in that a forward pass without gradients has ended: what comes is of the next."""
        self._read()
        self.free_pass += 1

    @contextmanager
    def making(self, kind: str, blocks: Iterable[int] = ()) -> Iterator[None]:
        """Gives a kind to all that is made inside, and to the blocks that begin at addresses.

        What is made in a `making` inside of this one keeps the kind that it got there.
        """
        self._read()
        index, first = _INDEX[kind], len(self._events)
        for address in blocks:
            if address in self._live:
                self._live[address].kind = index
        try:
            yield
        finally:
            self._read()
            for block, num_bytes, _ in self._events[first:]:
                if num_bytes > 0 and block.kind < 0:
                    block.kind = index

    def close(
        self, name: str, kinds: Callable[[], dict[int, str]], num_optimizers: int = 1
    ) -> None:
        """Books what happened since the last call under a phase.

        Args:
            name: The phase that ends here.
            kinds: Says what the blocks of modules and optimizers are; called where there is
                something to book.
            num_optimizers: How many there are: of a GAN the one steps while the passes of the
                other are under way.
        """
        phase = self.phases.setdefault(name, Phase(name))
        self._count(phase)
        self._read()
        events, self._events = self._events, []
        is_pass = name.endswith(_PASSES)
        if events or not phase.at_peak:
            self._name_blocks(is_pass, kinds())
        if name.endswith(STEP):
            self._age(num_optimizers)
        held = list(accumulate((event[1] for event in events), initial=self._held))
        peak = max(held)
        self._held = held[-1]
        reserved = max((event[2] for event in events), default=0)
        phase.peak_reserved = max(phase.peak_reserved, self._reserved, reserved)
        if events:
            self._reserved = events[-1][2]
        is_load = name.endswith("load")
        at_peak = self._draw(events, held.index(peak) - 1, is_pass=is_pass, is_load=is_load)
        if peak > phase.peak_allocated or not phase.at_peak:
            phase.peak_allocated = peak
            phase.at_peak = dict(zip(KINDS, at_peak, strict=True))
            if is_load:
                self._note_loaded(phase, events[held.index(peak) :])
        self.marks.append((self._position, name))

    def _count(self, phase: Phase) -> None:
        """Counts a visit; steps of several optimizers, one right after the other, are one."""
        if phase.name == BETWEEN:
            self._between = phase
        elif phase.name.endswith(STEP) and self._last is phase:
            if self._between is not None:
                self._between.visits -= 1
            phase.visits -= 1
        phase.visits += 1
        if phase.name != BETWEEN:
            self._last, self._between = phase, None

    def _note_loaded(self, phase: Phase, after_peak: list[_Event]) -> None:
        """Remembers what was held at the peak of a load, and has no owner yet."""
        loaded = set(self._live.values())
        for block, num_bytes, _ in reversed(after_peak):
            if num_bytes > 0:
                loaded.discard(block)
            else:
                loaded.add(block)
        self._loaded = {each: of for each, of in self._loaded.items() if of is not phase}
        self._loaded |= {each: phase for each in loaded if each.kind == _OTHER}

    def _own(self, block: _BlockOfDevice, owner: str) -> None:
        """Gives a block the kind of its owner, in the load that brought it, too."""
        phase = self._loaded.pop(block, None)
        if phase is not None:
            phase.at_peak[OTHER] -= block.num_bytes
            phase.at_peak[owner] += block.num_bytes
        if block.kind == _OTHER and block.loaded_at >= 0:
            self.owned.append(
                (block.loaded_at, self._position, _OTHER, _INDEX[owner], block.num_bytes)
            )
        block.kind = _INDEX[owner]

    def _read(self) -> None:
        live, events = self._live, self._events
        for address, num_bytes, _, reserved, _ in _ENTRY.iter_unpack(self._take_journal()):
            if num_bytes > 0:
                block = live[address] = _BlockOfDevice(num_bytes, self.round, self.free_pass)
            else:  # of no bytes: what a card of plenty would do (`_workspaces`)
                known = live.pop(address, None) if num_bytes else None
                if known is None:  # from before the journal
                    continue
                block = known
            events.append((block, num_bytes, reserved))

    def _name_blocks(self, is_pass: bool, kinds: dict[int, str]) -> None:
        # Blocks of a pass without an owner are activations.
        unknown = _ACTIVATIONS if is_pass else _OTHER
        for address, block in self._live.items():
            kind = block.kind
            owner = kinds.get(address)
            if owner is not None:
                if kind != _GATHERED:  # a module has them as its own, for the moment
                    self._own(block, owner)
            elif kind < 0:
                block.kind = unknown

    def _age(self, num_steps: int) -> None:
        # What is left of activations after a step of each optimizer is something else: workspaces,
        # buckets.
        for block in self._live.values():
            if block.kind == _ACTIVATIONS:
                block.num_steps += 1
                if block.num_steps >= num_steps:
                    block.kind = _OTHER

    def _draw(
        self, events: list[_Event], peak_at: int, *, is_pass: bool, is_load: bool
    ) -> list[int]:
        """Adds the visit to the timeline; returns the bytes of each kind at its peak."""
        held = [0] * len(KINDS)
        for block in self._live.values():
            held[block.kind] += block.num_bytes
        unknown = _ACTIVATIONS if is_pass else _OTHER
        for block, num_bytes, _ in events:
            if block.kind < 0:  # made and let go in this visit
                block.kind = unknown
            held[block.kind] -= num_bytes
        at_peak = list(held)
        last = len(events) - 1
        stride = max(1, len(events) // _MOST_POINTS)
        for index, (block, num_bytes, reserved) in enumerate(events):
            held[block.kind] += num_bytes
            if is_load and num_bytes > 0:
                block.loaded_at = self._position + index
            if index == peak_at:
                at_peak = list(held)
            if index % stride == 0 or index in (peak_at, last):
                self.timeline.append([self._position + index, *held, reserved])
        self._position += len(events)
        return at_peak
