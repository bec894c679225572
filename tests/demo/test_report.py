"""The table, the JSON and the exit status say the same thing."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from residency._demo import CASES, CaseRow, Promise, Report, render_report, reports_to_json
from residency._demo._render import row_cells, summary_cells
from residency._demo._report import report_from

FINISHED = CaseRow(
    case="a-case",
    setting="with [brackets]",
    capacity_bytes=None,
    peak_bytes=3 * 2**19,
    outcome="finished",
    phase=None,
    step=None,
    asked_bytes=None,
    first_loss=5.5,
    last_loss=2.25,
    heldout_loss=3.0,
    identical=True,
    seconds=1.5,
)
FAILED = dataclasses.replace(
    FINISHED,
    capacity_bytes=2**30,
    outcome="out of memory",
    phase="backward",
    step=2,
    asked_bytes=2**20,
    heldout_loss=None,
    identical=None,
)


def make_report(*, held: bool = True) -> Report:
    promises = (Promise("first", True, "as said"), Promise("second", held, "measured"))
    return Report("a-case", "a device", {"model": "small"}, (FINISHED, FAILED), promises, "code()")


def rendered(report: Report) -> str:
    console = Console(file=io.StringIO(), width=120)
    render_report(report, "What it is.", console)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_a_report_begins_with_the_case_and_what_it_is() -> None:
    first, second = rendered(make_report()).split("\n")[:2]
    assert first == "a-case on a device"
    assert second == "What it is."
    assert all(case.summary.count(". ") >= 1 for case in CASES.values())  # two sentences


def test_the_table_shows_every_cell_in_binary_units() -> None:
    text = rendered(make_report())
    for row in (FINISHED, FAILED):
        for cell in row_cells(row):
            assert all(line in text for line in cell.split("\n"))
    assert "1.50 MiB" in text
    assert "1.00 GiB" in text


def test_a_phase_that_ran_out_of_memory_is_named() -> None:
    assert "out of memory:\nbackward" in row_cells(FAILED)


@pytest.mark.parametrize(("identical", "word"), [(True, "yes"), (False, "no"), (None, "-")])
def test_identity_is_yes_no_or_not_compared(identical: bool | None, word: str) -> None:
    assert row_cells(dataclasses.replace(FINISHED, identical=identical))[-1] == word


def test_the_json_gives_back_the_rows_of_the_table() -> None:
    report = make_report()
    document = json.loads(reports_to_json([report]))
    (loaded,) = document["reports"]
    rows = [CaseRow(**row) for row in loaded["rows"]]
    assert rows == list(report.rows)
    assert [row_cells(row) for row in rows] == [row_cells(row) for row in report.rows]
    assert [Promise(**promise) for promise in loaded["promises"]] == list(report.promises)
    assert loaded["snippet"] == report.snippet


@pytest.mark.parametrize("held", [True, False])
def test_one_broken_promise_breaks_the_report(held: bool) -> None:
    report = make_report(held=held)
    assert report.is_held() == held
    assert json.loads(reports_to_json([report]))["held"] == held
    assert ("BROKEN" in rendered(report)) != held


def test_the_summary_has_a_row_for_each_case_with_the_stock_run_and_ours() -> None:
    free = dataclasses.replace(FINISHED, setting="no limit")
    ours = dataclasses.replace(FINISHED, capacity_bytes=2**30, peak_bytes=2**29)
    report = dataclasses.replace(make_report(), rows=(free, FAILED, ours))
    assert report.stock is FAILED
    assert report.ours is ours
    cells = summary_cells(report)
    assert cells[:3] == ("a-case", "1.00 GiB", "out of memory:\nbackward")
    assert cells[3:] == ("finished,\npeak 512.00 MiB", "yes", "yes")
    assert (
        summary_cells(dataclasses.replace(report, promises=make_report(held=False).promises))[-1]
        == "NO"
    )


def test_a_report_survives_the_way_through_json() -> None:
    report = make_report(held=False)
    assert report_from(json.loads(json.dumps(dataclasses.asdict(report)))) == report
