"""The case itself, on a model small enough for a test: stock fails, offloaded fits and is equal."""

import os
from importlib.util import find_spec

import pytest

from residency import _demo, sim
from residency._demo._settings import ModelShape
from residency._errors import InvalidArgumentError
from residency._units import MIB

# Not imported here: each process collects every test.
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the demo needs transformers"
)

CONFIGURED = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
SMALL = _demo.Settings(
    num_steps=3,
    num_rows=1,
    num_columns=16,
    bucket_bytes=4 * MIB,
    num_slots=2,
    model=ModelShape(
        # Smaller, and the allocator's 20 MiB segments weigh more than the optimizer's state.
        num_layers=8,
        hidden_size=256,
        intermediate_size=1280,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
)


@pytest.fixture(scope="module")
def shown() -> list[tuple[str, str, int, int]]:
    return []


@pytest.fixture(scope="module")
def report(shown: list[tuple[str, str, int, int]]) -> _demo.Report:
    sim.build()  # or its progress would be shown, too
    return _demo.run_case("optimizer-step", SMALL, lambda *state: shown.append(state))


def test_every_promise_holds(report: _demo.Report) -> None:
    assert [promise for promise in report.promises if not promise.held] == []
    assert len(report.promises) == 4


def test_stock_runs_out_of_memory_where_offloaded_finishes(report: _demo.Report) -> None:
    free, stock, offloaded = report.rows
    assert free.outcome == offloaded.outcome == "finished"
    assert stock.outcome == "out of memory"
    assert stock.phase == "optimizer step"
    assert stock.step == 1
    assert stock.asked_bytes
    assert stock.capacity_bytes == offloaded.capacity_bytes
    assert offloaded.peak_bytes <= (offloaded.capacity_bytes or 0) < free.peak_bytes


def test_the_losses_are_those_of_the_unlimited_run(report: _demo.Report) -> None:
    free, stock, offloaded = report.rows
    assert offloaded.identical
    assert offloaded.first_loss == free.first_loss == stock.first_loss
    assert (offloaded.last_loss, offloaded.heldout_loss) == (free.last_loss, free.heldout_loss)


def test_progress_names_each_run_and_its_phases(
    report: _demo.Report, shown: list[tuple[str, str, int, int]]
) -> None:
    assert list(dict.fromkeys(label for label, *_ in shown)) == [row.setting for row in report.rows]
    assert {phase for _, phase, *_ in shown} == {"forward", "backward", "optimizer step", "eval"}
    assert max(step for *_, step, _ in shown) == SMALL.num_steps


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match="optimizer-step"):
        _demo.run_case("nothing", SMALL, lambda *_: None)


@pytest.mark.parametrize("name", ["num_steps", "num_rows", "num_columns", "bucket_bytes"])
def test_a_count_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} is 0"):
        _demo.Settings(**{name: 0})


def test_a_case_leaves_the_environment_as_it_was(report: _demo.Report) -> None:
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == CONFIGURED
