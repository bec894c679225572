"""The case "hand-off": two real processes on one simulated device, 50 steps."""

from importlib.util import find_spec

import pytest

from residency import _demo

pytestmark = [
    pytest.mark.sim,
    pytest.mark.whole,
    # Not imported here: each process collects every test.
    pytest.mark.skipif(find_spec("transformers") is None, reason="the demo needs transformers"),
]


@pytest.fixture(scope="module")
def report() -> _demo.Report:
    return _demo.run_case("hand-off", _demo.Settings(), lambda *state: None)


def test_every_promise_holds(report: _demo.Report) -> None:
    assert [promise for promise in report.promises if not promise.held] == []
    assert [promise.name.split()[0] for promise in report.promises] == [
        "the",
        "computes",
        "the",
        "the",
    ]


def test_stock_the_engine_is_out_of_memory_and_with_a_hand_off_never(report: _demo.Report) -> None:
    alone, stock, guarded = report.rows
    assert stock.outcome == "out of memory"
    assert 1 < (stock.step or 0) < 50
    assert guarded.outcome == alone.outcome == "finished"
    assert guarded.capacity_bytes == stock.capacity_bytes == alone.peak_bytes


def test_the_trainer_computes_what_it_computes_alone(report: _demo.Report) -> None:
    alone, _, guarded = report.rows
    assert guarded.identical
    assert (guarded.first_loss, guarded.last_loss) == (alone.first_loss, alone.last_loss)


def test_the_cache_is_emptied_on_some_steps_and_not_on_others(report: _demo.Report) -> None:
    detail = report.promises[3].detail
    num_emptied = int(detail.split()[1])
    assert 0 < num_emptied < 50
    assert detail.endswith(" 0 of them needlessly")
