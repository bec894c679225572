"""The cases that run apart, with the real code of frameworks, for some of which sim is CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from residency import _demo

pytestmark = [pytest.mark.sim, pytest.mark.whole]
Run = Callable[[str], _demo.Report]

# What stock code was doing when it ran out of memory.
PHASES = {
    "resume": ("load of the checkpoint",),
    "async-save": ("save", "training step"),
    "best-adapter": ("_load_best_model",),
    "evaluation": ("evaluate",),
}


@pytest.fixture(scope="module")
def run() -> Run:
    """Runs a case, once."""
    found: dict[str, _demo.Report] = {}

    def run(name: str) -> _demo.Report:
        pytest.importorskip("transformers", reason="the demo trains a model from transformers")
        if name not in found:
            with _demo.Apart(_demo.Settings()) as apart:
                found[name] = apart.run(name, lambda *_: None)
        return found[name]

    return run


@pytest.mark.parametrize("name", PHASES)
def test_every_promise_holds(run: Run, name: str) -> None:
    assert [promise for promise in run(name).promises if not promise.held] == []


@pytest.mark.parametrize("name", PHASES)
def test_stock_runs_out_of_memory_where_ours_finishes(run: Run, name: str) -> None:
    report = run(name)
    assert report.stock.outcome == "out of memory"
    assert report.stock.phase in PHASES[name]
    assert report.ours.outcome == "finished"
    assert report.ours.identical
    assert report.stock.capacity_bytes == report.ours.capacity_bytes
    assert report.ours.peak_bytes <= (report.ours.capacity_bytes or 0)
    assert ("in CUDA's place" in report.device) == (name != "resume")
