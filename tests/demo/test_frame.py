"""The frame of the cases: which runs fail, what is promised of them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import residency
from residency._demo import Report
from residency._demo._bench import open_bench
from residency._demo._frame import CaseRun, Frame, Words
from residency._units import MIB

pytestmark = pytest.mark.alone
WORDS = Words(snippet="code()", fits="fits where stock does not", fails_in="second phase")


@pytest.fixture
def frame(device: torch.device) -> Iterator[Frame]:
    with open_bench("sim", lambda *step: None) as bench:
        yield Frame("a-case", bench, lambda *step: None, WORDS, 2)


def take(run: CaseRun, num_bytes: int, phase: str = "second phase", value: float = 1.0) -> None:
    run.enter("first phase", 1)
    run.losses.append(value)
    run.enter(phase, 2)
    run.found["growth"] = run.growth_of(
        lambda: torch.empty(num_bytes, dtype=torch.uint8, device=run.device)
    )
    run.computed = {"value": value}


def report_on(frame: Frame, *, stock_phase: str = "second phase", ours: float = 1.0) -> Report:
    reference = frame.run("no limit", lambda run: take(run, 64 * MIB))
    frame.run("stock", lambda run: take(run, 64 * MIB, stock_phase), 40 * MIB)
    frame.run("ours", lambda run: take(run, MIB, value=ours), 40 * MIB)
    assert reference.found["growth"] == 64 * MIB
    return frame.report(reference, "1 value is equal", {"model": "small"})


def test_a_run_that_is_out_of_memory_is_a_row_and_what_it_had_goes_back(frame: Frame) -> None:
    report = report_on(frame)
    free, stock, ours = report.rows
    assert (free.outcome, stock.outcome, ours.outcome) == ("finished", "out of memory", "finished")
    assert (stock.phase, stock.step, stock.asked_bytes) == ("second phase", 2, 64 * MIB)
    assert (stock.first_loss, stock.peak_bytes, ours.peak_bytes) == (1.0, 0, MIB)
    assert [row.identical for row in report.rows] == [None, None, True]
    assert frame.left_bytes == [0, 0, 0]
    assert report.is_held()
    assert report.promises[0].detail == (
        "stock runs out of memory in the second phase of step 2; ours finishes"
    )
    assert report.promises[1].detail == "1 value is equal"


def test_stock_code_that_fails_elsewhere_or_another_value_breaks_a_promise(frame: Frame) -> None:
    report = report_on(frame, stock_phase="another phase", ours=2.0)
    assert [promise.held for promise in report.promises] == [False, False]
    assert report.promises[1].detail == "1 values differ, the first is value"
    assert report.ours.identical is False


def test_a_run_that_fails_without_a_limit_of_ours_is_refused(frame: Frame) -> None:
    with pytest.raises(residency.RefusedError, match="'no limit' runs out of memory in the second"):
        frame.run("no limit", lambda run: take(run, 1 << 40))


def test_what_libraries_keep_from_warming_up_counts_as_no_runs(frame: Frame) -> None:
    kept = []

    def keep(run: CaseRun) -> None:
        kept.append(torch.empty(2 * MIB, dtype=torch.uint8, device=run.device))

    frame.warm_up(keep)
    assert report_on(frame).is_held()
    assert len(kept) == 1
