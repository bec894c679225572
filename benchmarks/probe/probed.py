"""The device that the probes ask, and the lines in which they answer."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

from residency import _device

Value = TypeVar("Value")
_WIDTH = 44


@dataclass(slots=True)
class ProbedDevice:
    """The device under the probes, and the number of lines that say FAIL.

    Attributes:
        device: The accelerator.
        folder: An empty folder on a disk, for files.
        is_small: Whether sizes are such that a processor computes them in a moment.
        num_failed: How many lines have said FAIL.
    """

    device: torch.device
    folder: Path
    is_small: bool
    num_failed: int = field(default=0, init=False)

    @property
    def module(self) -> ModuleType:
        """What torch names after the device's type, such as ``cuda``."""
        module: ModuleType = torch.get_device_module(self.device)
        return module

    def pick(self, full: Value, small: Value) -> Value:
        """Returns the size, or what else is meant, for this run."""
        return small if self.is_small else full

    def info(self, what: str, text: str = "") -> None:
        """Prints a figure."""
        print(f"INFO  {what:{_WIDTH}} {text}", flush=True)

    def check(self, is_true: bool, what: str, text: str = "") -> None:
        """Prints whether what the library relies on is so."""
        self.num_failed += not is_true
        print(f"{'PASS' if is_true else 'FAIL'}  {what:{_WIDTH}} {text}", flush=True)

    def called(self, work: Callable[[], Value]) -> tuple[Value, float]:
        """Returns what the work does from a device at rest, and the seconds of the call alone."""
        _device.synchronize()
        start = time.perf_counter()
        return work(), time.perf_counter() - start

    def timed(self, work: Callable[[], Value]) -> tuple[Value, float, float]:
        """Returns what the work does, the seconds of its call, and those until it was done."""
        _device.synchronize()
        start = time.perf_counter()
        result, call_seconds = self.called(work)
        _device.synchronize()
        return result, call_seconds, time.perf_counter() - start

    def attempt(self, what: str, work: Callable[[], bool]) -> None:
        """Checks what ``work`` returns; one that raises is a FAIL, too."""
        try:
            is_true, text = work(), ""
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            is_true, text = False, f"raised {type(error).__name__}: {first_line}"
            traceback.print_exc()
        self.check(is_true, what, text)

    def run(self, name: str, probe: Callable[[ProbedDevice], None]) -> None:
        """Runs one probe. One that raises leaves the next ones to run."""
        start = time.perf_counter()
        try:
            probe(self)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            self.check(False, name, f"raised {type(error).__name__}: {first_line}")
            traceback.print_exc()
        gc.collect()
        self.info(f"-- {name}", f"{time.perf_counter() - start:.1f} s")


def milliseconds(seconds: float) -> str:
    """Writes a time as the lines do."""
    return f"{seconds * 1e3:.1f} ms"
