"""The frame on which every case stands: runs one after another on a bench, and the report on them.

Running out of memory is an outcome here, not an error. A run owns no device state after it: it
holds host tensors and numbers only, so that the next one finds the device empty.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from residency import _device
from residency._demo._bench import Bench
from residency._demo._identity import different_values
from residency._demo._progress import Show
from residency._demo._report import CaseRow, Promise, Report
from residency._errors import RefusedError
from residency._memory import asked_bytes
from residency._units import format_bytes


@dataclass(kw_only=True)
class CaseRun:
    """One run of a case.

    Attributes:
        label: What distinguishes it from the case's other runs.
        capacity_bytes: Device bytes that it is allowed, or None for no limit of ours.
        num_steps: Its last step, for the progress.
        show: Is called with its progress.
        device: Where it is.
        folder: An empty folder that lives as long as the run.
        losses: Training loss of every step that gave one.
        heldout_loss: Loss on text that was not trained on, or None.
        peak_bytes: The most device bytes allocated at once.
        phase: What it is doing, or was as it ran out of memory; None when it has finished.
        step: The step of that, from 1, or None.
        asked_bytes: What the failing request asked for, or None when the error does not say.
        seconds: Wall time.
        computed: What must equal the reference's, bit for bit.
        found: What else the promises of the case look at.
    """

    label: str
    capacity_bytes: int | None
    num_steps: int
    show: Show
    device: torch.device
    folder: Path = Path()
    losses: list[float] = field(default_factory=list)
    heldout_loss: float | None = None
    peak_bytes: int = 0
    phase: str | None = "start"
    step: int | None = None
    asked_bytes: int | None = None
    seconds: float = 0.0
    computed: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    def enter(self, phase: str, step: int = 0) -> None:
        """Notes, and shows, that a phase begins; step 0 is before the first."""
        self.phase, self.step = phase, step or None
        self.show(self.label, phase, step, self.num_steps)

    def growth_of(self, work: Callable[[], object]) -> int:
        """Does the work and returns the most bytes that it had allocated beside those before."""
        self.note_peak()
        _device.reset_peak()
        before = _device.memory_allocated()
        work()
        _device.synchronize()
        return _device.max_memory_allocated() - before

    def note_peak(self) -> None:
        """Raises the run's peak to the device's."""
        self.peak_bytes = max(self.peak_bytes, _device.max_memory_allocated())

    def row(self, case: str, identical: bool | None) -> CaseRow:
        """Returns its row in the table of its case."""
        return CaseRow(
            case=case,
            setting=self.label,
            capacity_bytes=self.capacity_bytes,
            peak_bytes=self.peak_bytes,
            outcome="finished" if self.phase is None else "out of memory",
            phase=self.phase,
            step=self.step,
            asked_bytes=self.asked_bytes,
            first_loss=self.losses[0] if self.losses else None,
            last_loss=self.losses[-1] if self.losses else None,
            heldout_loss=self.heldout_loss,
            identical=identical,
            seconds=self.seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words of a case: its two first promises, and how it tells a run's end.

    Attributes:
        snippet: The lines of code that make the difference.
        fits: The promise that ours finishes under the capacity, and stock code does not.
        same: The promise that ours computes what the reference does.
        fails_in: The phase in which stock code must fail; None for any.
        fails: How a run ended that is out of memory, with ``{phase}``, ``{step}`` and ``{asked}``.
        finishes: How a run ended that is not.
        ours: What our run is called beside stock's.
    """

    snippet: str
    fits: str
    same: str = "computes the same"
    fails_in: str | None = None
    fails: str = "runs out of memory in the {phase} of step {step}"
    finishes: str = "finishes"
    ours: str = "ours"


class Frame:
    """The runs of one case, the last two of which are stock's and ours under one capacity.

    Attributes:
        left_bytes: What each run left allocated on the device.
    """

    def __init__(self, case: str, bench: Bench, show: Show, words: Words, num_steps: int) -> None:
        """Runs nothing yet.

        Args:
            case: The name of the case.
            bench: Where its runs are.
            show: Is called with their progress.
            words: The words of the case.
            num_steps: The last step of each.
        """
        self._case, self._bench, self._show = case, bench, show
        self._words, self._num_steps = words, num_steps
        self._runs: list[CaseRun] = []
        self.left_bytes: list[int] = []

    def begin(self, label: str, capacity_bytes: int | None) -> CaseRun:
        """Returns a new run, the next row of the table; the caller runs it."""
        run = CaseRun(
            label=label,
            capacity_bytes=capacity_bytes,
            num_steps=self._num_steps,
            show=self._show,
            device=self._bench.device,
        )
        self._runs.append(run)
        return run

    def run(
        self, label: str, work: Callable[[CaseRun], object], capacity_bytes: int | None = None
    ) -> CaseRun:
        """Runs ``work`` to its end, or until it is out of memory.

        Args:
            label: What distinguishes the run from the others.
            work: Does what is measured, and notes how far it is.
            capacity_bytes: Device bytes that it may have; None for no limit of ours.

        Raises:
            RefusedError: It was out of memory though it has no limit.
        """
        self._bench.limit(capacity_bytes)
        run = self.begin(label, capacity_bytes)
        started = time.perf_counter()
        _device.reset_peak()
        try:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # frameworks warn of what no case is about
                run.folder = Path(folder)
                work(run)
            run.phase = run.step = None
        except torch.OutOfMemoryError as error:
            run.asked_bytes = asked_bytes(str(error))
            error.__traceback__ = None  # its frames hold the model
        finally:
            run.note_peak()
            run.seconds = time.perf_counter() - started
            self.left_bytes.append(self._bench.settle())
        if run.phase is None:
            self._show(label, "eval", self._num_steps, self._num_steps)
        elif capacity_bytes is None:
            raise RefusedError(
                f"The run {label!r} {self._end_of(run)}, with no limit of ours, so nothing can be "
                "compared. Free the device or run on a larger one."
            )
        return run

    def warm_up(self, work: Callable[[CaseRun], object]) -> None:
        """Lets the device's libraries take what they keep while the process lives."""
        unseen = Frame(self._case, self._bench, lambda *_: None, self._words, self._num_steps)
        unseen.run("to warm up", work)
        self._bench.mark_empty()

    def report(
        self, reference: CaseRun, compared: str, facts: dict[str, str], *promises: Promise
    ) -> Report:
        """Returns the report, with the two promises that every case makes before its own.

        Args:
            reference: The run whose values ours must have.
            compared: What says that it has them.
            facts: What was run, by label.
            promises: What the case promises beside.
        """
        words, (stock, ours) = self._words, self._runs[-2:]
        different = different_values(reference.computed, ours.computed)
        if different:
            compared = f"{len(different)} values differ, the first is {different[0]}"
        fits = Promise(
            words.fits,
            stock.phase is not None
            and words.fails_in in (None, stock.phase)
            and ours.phase is None,
            f"stock {self._end_of(stock)}; {words.ours} {self._end_of(ours)}",
        )
        return Report(
            case=self._case,
            device=self._bench.describe(),
            facts=facts,
            rows=tuple(
                run.row(self._case, not different if run is ours else None) for run in self._runs
            ),
            promises=(fits, Promise(words.same, not different, compared), *promises),
            snippet=words.snippet,
        )

    def _end_of(self, run: CaseRun) -> str:
        if run.phase is None:
            return self._words.finishes
        asked = "" if run.asked_bytes is None else f", asking for {format_bytes(run.asked_bytes)}"
        step = "" if run.step is None else run.step
        return self._words.fails.format(phase=run.phase, step=step, asked=asked).rstrip()


FrameMaker = Callable[[Words, int], Frame]
"""Makes the frame of the case that runs, of its words and the last step of its runs."""
