"""Gives device bytes back that nothing needs, by the cheapest means that suffice.

The figures are looked at before anything is done, and again after each means: what is reported was
measured. Nothing here moves a byte in use; parking does, and is `_hand_off`'s.

[Note: what each means costs] Giving back whole free segments costs calls of the driver, and their
allocation anew by the next step. Blocks that drain make the host wait for a stream. A workspace of
the matrix library is made anew by the next product. A collection goes through every object of the
process and runs strangers' finalizers, so it is made only after a search found that cycles, and
nothing else, keep tensors of the device.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from residency import _device, _private_pools
from residency._errors import InvalidArgumentError, RefusedError
from residency._memory import (
    MemoryState,
    bytes_in_cycles,
    errors_kept,
    let_go_of_errors,
    measure,
)
from residency._units import format_bytes, parse_bytes

# With half a million objects the search takes 0.11 s where a collection takes 0.26 s, and 1.7 s
# where there are cycles; this is far above both.
_SEARCH_SECONDS = 10.0
_COLLECTOR_SECONDS = 1.0  # a collection takes 0.26 s with half a million objects
_MEANS = ("errors", "cache", "draining", "workspaces", "cycles", "parked")
_GRAPHS = "captured graphs or private pools are alive, and may use the matrix library's workspaces"
_UNSEARCHED = f"the search for reference cycles did not end in {_SEARCH_SECONDS:.0f} s of work"
_BUSY_COLLECTOR = "another thread's garbage collection did not end; ask again once it has"
_KEPT = (
    "the session keeps its last error, with the values of the functions that it left; "
    "errors=True lets go of these"
)
_NO_FREE = "its backend does not tell the free bytes of the device, so that nothing can be proven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed:
    """The bytes that went back to the device, by what freed them.

    Attributes:
        cache: Whole free segments of the allocator.
        draining: Freed blocks whose streams had to be waited for.
        workspaces: Workspaces of the matrix library, and segments that only they kept.
        cycles: Tensors that reference cycles kept, after a garbage collection.
        parked: The bytes that were moved to the host, by `hand_off` only.
        before: The memory before.
        after: The memory after.
        seconds: How long it took.
        notes: The means that were not tried, and why.
        errors: Tensors of functions that an earlier error had left, if the caller asked for them.
    """

    cache: int
    draining: int
    workspaces: int
    cycles: int
    parked: int
    before: MemoryState
    after: MemoryState
    seconds: float
    notes: tuple[str, ...] = ()
    errors: int = 0

    @property
    def total(self) -> int:
        """The bytes that went back to the device."""
        return sum(self.by_means().values())

    @property
    def free(self) -> int:
        """The bytes that are free on the device now, by its own figure."""
        return self.after.free

    def by_means(self) -> dict[str, int]:
        """Returns the bytes by the name of the means, in the order in which they are tried."""
        return {name: getattr(self, name) for name in _MEANS}

    def __str__(self) -> str:
        parts = [f"{name} {format_bytes(n)}" for name, n in self.by_means().items() if n]
        how = f" ({', '.join(parts)})" if parts else ""
        lines = [
            f"reclaimed {format_bytes(self.total)}{how} in {1000 * self.seconds:.1f} ms, "
            f"{format_bytes(self.free)} are free"
        ]
        return "\n  ".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # of a notebook
        printer.text(str(self))


class Effort:
    """The ways to free bytes of a device, one after another until it has enough.

    Attributes:
        device: The accelerator.
        need: The bytes that are to be free; None for as many as there are.
        state: The memory as it was last measured.
    """

    def __init__(self, device: torch.device, need: int | None, *, collect: bool) -> None:
        """Measures the memory.

        Raises:
            RefusedError: The current stream is being captured, or the device's free bytes are
                needed and not given.
        """
        if _device.is_capturing(device):
            raise RefusedError(
                "The current stream is being captured into a graph, in which no memory can be "
                "given back. Nothing was done; do it before or after the capture."
            )
        self.device = device
        self.need = need
        self.before = self.state = measure(device)
        if need is not None and _device.device_room(device) is None:
            raise RefusedError(f"{format_bytes(need)} are to be free on {device}, and {_NO_FREE}.")
        self._collect = collect
        self._freed: Counter[str] = Counter()
        self._notes: list[str] = []
        self._started = time.perf_counter()

    @property
    def missing(self) -> int:
        """The bytes that are not free yet and should be; 0 where it is for as many as there are."""
        return 0 if self.need is None else max(0, self.need - self.state.free)

    @property
    def is_enough(self) -> bool:
        """Whether the device has the bytes; never where it is for as many as there are."""
        return self.need is not None and self.state.free >= self.need

    def run(self) -> None:
        """Tries every means that moves nothing, and stops with the first that suffices."""
        if not self.is_enough:
            self.give_back("cache")
        if not self.is_enough:
            self._clear_workspaces()
        if not self.is_enough:
            self._collect_cycles()

    def let_go_of_errors(self, *, is_wanted: bool) -> None:
        """Empties the functions that kept errors left, or notes that there are some."""
        if not errors_kept() or not self.state.held:
            return
        if not is_wanted:
            self._notes.append(_KEPT)
            return
        let_go_of_errors()
        self.give_back("errors")

    def give_back(self, means: str) -> None:
        """Empties the cache if it has something to give."""
        before = self.state = measure(self.device)
        if not before.returnable and not before.draining:
            return
        _device.empty_cache(self.device)
        self.state = measure(self.device)
        given = max(0, before.reserved - self.state.reserved)
        # What exceeds the whole segments was waited for, or shared a segment with that.
        whole = min(given, before.returnable) if before.draining else given
        self._freed[means] += whole
        self._freed["draining"] += given - whole

    def result(self) -> Reclaimed:
        """Returns what was freed so far."""
        freed = {name: self._freed[name] for name in _MEANS}
        return Reclaimed(
            **freed,
            before=self.before,
            after=self.state,
            seconds=time.perf_counter() - self._started,
            notes=tuple(self._notes),
        )

    def _clear_workspaces(self) -> None:
        if _private_pools.may_have_graphs():
            self._notes.append(f"workspaces were left: {_GRAPHS}")
            return
        held = self.state.held
        _device.clear_workspaces(self.device)
        self.state = measure(self.device)
        if self.state.held < held:
            self.give_back("workspaces")

    def _collect_cycles(self) -> None:
        if not self._collect or not self.state.held:
            return
        found = bytes_in_cycles(self.device, seconds=_SEARCH_SECONDS)
        if found is None:
            self._notes.append(f"no garbage was collected: {_UNSEARCHED}")
        if not found:
            return
        held = self.state.held
        for generation in range(3):  # the youngest are quick, and have what the last steps left
            if not _collect(generation):
                self._notes.append(f"no garbage was collected: {_BUSY_COLLECTOR}")
                break
            self.state = measure(self.device)
            if held - self.state.held >= found:
                break
        self.give_back("cycles")


def _collect(generation: int) -> bool:
    """Collects garbage; returns whether it could.

    While another thread collects, `gc.collect` returns at once and does nothing (`collecting` in
    CPython's gc module); what it calls `gc.callbacks` for is a collection that begins.
    """
    thread = threading.get_ident()
    begun = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and threading.get_ident() == thread:
            begun.append(info)

    deadline = time.monotonic() + _COLLECTOR_SECONDS
    gc.callbacks.append(note)
    try:
        gc.collect(generation)
        while not begun and time.monotonic() < deadline:
            time.sleep(0.001)
            gc.collect(generation)
    finally:
        gc.callbacks.remove(note)
    return bool(begun)


def reclaim(
    need: int | str | None = None,
    *,
    device: torch.device | int | str | None = None,
    collect: bool = True,
    errors: bool = False,
) -> Reclaimed:
    """Gives back device memory that this process does not use, if the figures say that it pays.

    Tries, in this order and only as far as `need` asks for: the allocator's whole free segments,
    blocks that wait for a stream, the matrix library's workspaces, and tensors that reference
    cycles keep. Moves nothing and frees nothing that the program can still reach, except at the
    request of `errors`.

    Args:
        need: Bytes, or a size such as ``"2GiB"``, that must be free on the device by its own count.
            The search for more stops then. None gives back as much as possible.
        device: The accelerator, by default the current one.
        collect: Whether garbage may be collected. Even then it is collected only if a search found
            tensors that only cycles keep.
        errors: Whether to clear the variables of the functions that the last error of an
            interactive session left. A notebook, IPython or the prompt keeps this error, and with
            it their tensors. The error's text stays; a debugger no longer shows values.

    Returns:
        The bytes that went back to the device, by the means that freed them. Fewer than needed is
        no error: `residency.hand_off` raises if they are not enough.

    Raises:
        InvalidArgumentError: The size does not parse, or there is no such accelerator.
        RefusedError: The current stream is being captured into a graph, or a size is needed and
            the device does not tell its free bytes.
    """
    target = _device.resolve(device)
    num_bytes = None if need is None else parse_bytes(need, name="need")
    if target is None:
        raise InvalidArgumentError(
            "There is no accelerator on this machine to reclaim memory of; call it on a machine "
            "with one."
        )
    effort = Effort(target, num_bytes, collect=collect)
    if not effort.is_enough:
        effort.let_go_of_errors(is_wanted=errors)
    effort.run()
    return effort.result()
