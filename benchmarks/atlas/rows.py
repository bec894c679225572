"""Measures the requests that an operator makes of the allocator, on a card or in a dry run.

A row names its case by ``op`` and further words, and has ``fw`` and ``bw``, of the forward and the
backward pass: requests, bytes asked for, peak above the start, bytes that stay, and the requests of
64 KiB and more in order, a free as a negative number. Each is the second run of two: the first
makes what a process makes once. ``bw`` is None where nothing asks for a gradient, and ``error``
stands in the place of both where the case failed.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.nn import functional

from residency import sim

DEVICE = "cuda"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RESULTS = ("fw", "bw", "error", "refusals")  # of a row; everything else names its case
LARGE_BYTES = 1 << 16
_MOST_LARGE = 40  # of one pass
_MOST_EVENTS = 100_000
_MOST_LETTERS = 120  # of an error
EXIT_BROKEN = 3  # a context is of no use after such an error

Figures = list[Any]


@dataclass
class Atlas:
    """The rows of a run, written as they come.

    Attributes:
        file: Gets a line for each.
    """

    file: TextIO
    _start: tuple[int, ...] = field(default=(), init=False)

    def row(
        self,
        op: str,
        function: Callable[[], object],
        inputs: Sequence[Tensor] = (),
        *,
        rooms: tuple[int, int] | None = None,
        **words: object,
    ) -> dict[str, Any]:
        """Writes the row of a case and returns it.

        Args:
            op: The operator's name.
            function: Computes the case.
            inputs: What gets a gradient; each begins without one.
            rooms: The bytes that each of the two passes may reserve beyond the reserved ones.
            words: What tells the case from others of the operator.
        """
        row: dict[str, Any] = {"op": op}
        before = torch.cuda.memory_stats().get("num_ooms", 0)
        gc.collect()
        gc.disable()  # what an earlier case left in a cycle is not given back in a pass of this one
        try:
            row["fw"], row["bw"] = self._measure(function, inputs, rooms)
        except Exception as error:  # a case that an operator refuses is a row, too
            row = {"op": op, "error": f"{type(error).__name__}: {str(error)[:_MOST_LETTERS]}"}
        finally:
            gc.enable()
        if rooms is not None:
            torch.cuda.set_per_process_memory_fraction(1.0)
            row["refusals"] = torch.cuda.memory_stats()["num_ooms"] - before
        return self.write({**row, **words})

    def write(self, row: dict[str, Any]) -> dict[str, Any]:
        """Writes a row as it is; ends the process where a card's context is broken."""
        print(json.dumps(row), file=self.file, flush=True)
        if "CUDA error" in row.get("error", "") and not sim.is_enabled():
            sys.exit(EXIT_BROKEN)
        return row

    def start(self) -> None:
        """Begins a pass."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # A private name: nothing public lists requests in their order.
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MOST_EVENTS)
        self._start = _stats()

    def stop(self) -> Figures:
        """Returns the figures of the pass that ends here."""
        requests, asked, current, _ = self._start
        end = _stats()
        figures = [end[0] - requests, end[1] - asked, end[3] - current, end[2] - current]
        # A snapshot takes longer than the pass: one whose requests and frees are small needs none.
        are_small = max(figures[1], figures[1] - figures[3]) < LARGE_BYTES
        events = [] if are_small else torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        return [*figures, list(_large(events))[:_MOST_LARGE]]

    def _measure(
        self,
        function: Callable[[], object],
        inputs: Sequence[Tensor],
        rooms: tuple[int, int] | None,
    ) -> tuple[Figures, Figures | None]:
        for _ in range(2):
            for tensor in inputs:
                tensor.grad = None
            if rooms is not None:
                _leave_room(rooms[0])
            self.start()
            result = function()
            forward, backward = self.stop(), None
            if rooms is not None:
                torch.cuda.set_per_process_memory_fraction(1.0)
            outputs = [o for o in tensors_of(result) if o.requires_grad and o.grad_fn is not None]
            if outputs:
                gradients = [torch.ones_like(output) for output in outputs]
                if rooms is not None:
                    _leave_room(rooms[1])
                self.start()
                torch.autograd.backward(outputs, gradients)
                backward = self.stop()
                del gradients
            del result, outputs
        return forward, backward


def tensor(
    *shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, scale: float = 1.0
) -> Tensor:
    """Returns random numbers on the device."""
    values = torch.randn(*shape, device=DEVICE, dtype=torch.float32).mul_(scale).to(dtype)
    return values.requires_grad_(grad)


def tensors_of(value: object) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dictionaries."""
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for part in value for found in tensors_of(part)]
    return tensors_of(list(value.values())) if isinstance(value, dict) else []


def under_autocast(function: Callable[[], object]) -> Callable[[], object]:
    """Returns the function under autocast to bfloat16."""

    def run() -> object:
        with torch.autocast(DEVICE, torch.bfloat16):
            return function()

    return run


def warm() -> None:
    """Runs products and a convolution, whose workspaces a process keeps; freezes all objects."""
    gc.freeze()
    for dtype in DTYPES.values():
        a = tensor(256, 256, dtype=dtype)
        (a @ a).sum().backward()
        functional.linear(a, a, a[0]).sum().backward()
    functional.conv2d(tensor(1, 8, 8, 8), tensor(8, 8, 3, 3)).sum().backward()


def _stats() -> tuple[int, ...]:
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    asked = "requested_bytes.all"
    names = ("allocation.all.allocated", f"{asked}.allocated", f"{asked}.current", f"{asked}.peak")
    return tuple(stats[name] for name in names)


def _large(events: list[dict[str, Any]]) -> Iterator[int]:
    signs = {"alloc": 1, "free_completed": -1}
    for event in events:
        if event["action"] in signs and event["size"] >= LARGE_BYTES:
            yield signs[event["action"]] * event["size"]


def _leave_room(num_bytes: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + num_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
