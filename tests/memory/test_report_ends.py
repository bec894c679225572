"""How a report says that a run ended, and how it puts two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from residency._cli import main
from residency._units import MIB

FIGURES = {"returnable": 0, "stuck": 0, "draining": 0, "pooled": 0, "outside": 0}
OUT_OF_MEMORY = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity "
    "of 23.64 GiB of which 8.00 MiB is free."
)
# Every line that a recording wrote before it said its command, versions, and how the run ended.
OLD = """\
{"kind":"header","format":"residency-ledger","version":1,"peaks":"bounds","rank":0,"world_size":1,\
"pid":7,"started_at":1795499071.7,"t":0.0}
{"kind":"begin","phase":"save","visit":0,"thread":1,"device":"cuda:0","held":1048576,\
"returnable":0,"stuck":0,"draining":0,"outside":0,"free":9437184,"capacity":10485760,"pooled":0,\
"num_retries":0,"num_out_of_memory":0,"t":1.5}
{"kind":"end","phase":"save","visit":0,"thread":1,"device":"cuda:0","held":2097152,"returnable":0,\
"stuck":0,"draining":0,"outside":0,"free":8388608,"capacity":10485760,"pooled":0,"num_retries":0,\
"num_out_of_memory":1,"peak":3145728,"is_peak_exact":true,"seconds":0.5,"error":ERROR,"t":2.0}
{"kind":"close","t":2.5}
"""


class Run:
    """The lines of a record."""

    def __init__(self, **header: Any) -> None:
        self.t = 0.0
        first = {"kind": "header", "format": "residency-ledger", "version": 1, **header}
        self.lines: list[dict[str, Any]] = [first]

    def boundary(self, kind: str, phase: str, held: int, **more: Any) -> Run:
        self.t += 1.0
        visit = sum((line["kind"], line.get("phase")) == (kind, phase) for line in self.lines)
        place = {"kind": kind, "phase": phase, "visit": visit, "thread": 1, "t": self.t}
        sizes = {**FIGURES, "held": held * MIB, "free": 0, "capacity": 64 * MIB}
        self.lines.append({**place, **sizes, **more})
        return self

    def begin(self, phase: str) -> Run:
        return self.boundary("begin", phase, 0)

    def end(self, phase: str, peak: int, *, error: str | None = None, failed: int = 0) -> Run:
        outcome = {"peak": peak * MIB, "is_peak_exact": True, "seconds": 1.0, "error": error}
        return self.boundary("end", phase, peak // 2, **outcome, num_out_of_memory=failed)

    def whole(self, phase: str, peak: int) -> Run:
        return self.begin(phase).end(phase, peak)

    def close(self, **more: Any) -> Run:
        self.lines.append({"kind": "close", "t": self.t, **more})
        return self

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return path


@pytest.fixture
def told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Returns what `residency report` prints of some runs, line by line."""
    monkeypatch.setattr("residency._report._table._WIDTH", 400)

    def report(*runs: Run) -> list[str]:
        names = ("before.jsonl", "after.jsonl")[2 - len(runs) :]
        files = [run.write(tmp_path / name) for run, name in zip(runs, names, strict=True)]
        assert main(["report", *map(str, files)]) == 0
        return capsys.readouterr().out.splitlines()

    return report


# ------------------------------------------------------------------------------- how a run ended


def test_a_run_that_ran_to_its_end_is_told_without_a_word_of_errors(told: Any) -> None:
    out = "\n".join(told(Run().whole("save", 8).close()))
    assert "error" not in out
    assert "failed" not in out
    assert "no end" not in out


def test_an_error_that_ended_the_run_is_told_with_its_phase_and_the_bytes_asked_for(
    told: Any,
) -> None:
    run = Run().begin("train").begin("train/forward")
    run.end("train/forward", 8, error=OUT_OF_MEMORY, failed=1).end("train", 8, error=OUT_OF_MEMORY)
    assert (
        "after.jsonl: the run ended in an error, in train/forward: 20.00 MiB were asked for. "
        + OUT_OF_MEMORY
    ) in told(run.close(error=OUT_OF_MEMORY, phase="train/forward"))


def test_an_error_outside_of_every_phase_is_told_with_the_phase_before_it(told: Any) -> None:
    run = Run().whole("load", 8).whole("save", 8).close(error="KeyError: 'x'", phase=None)
    line = "after.jsonl: the run ended in an error, outside of every phase, after save: "
    assert f"{line}KeyError: 'x'" in told(run)
    early = Run().close(error=OUT_OF_MEMORY, phase=None)
    assert any("outside of every phase: 20.00 MiB were asked for" in line for line in told(early))


def test_a_killed_run_is_told_with_the_phase_that_it_was_in(told: Any) -> None:
    killed = "after.jsonl: the record has no end: the process was killed, or left by os._exit, or "
    killed += "still runs; it was "
    assert f"{killed}in train/save (visit 0)" in told(
        Run().whole("load", 8).begin("train").begin("train/save")
    )
    assert f"{killed}outside of every phase, after load" in told(Run().whole("load", 8))
    assert f"{killed}outside of every phase" in told(Run())


def test_an_error_that_the_script_caught_is_told_with_the_innermost_phase(told: Any) -> None:
    run = Run().begin("step").begin("step/forward")
    run.end("step/forward", 8, error=OUT_OF_MEMORY, failed=1)
    run.end("step", 8, error=OUT_OF_MEMORY, failed=1).whole("save", 8).close(num_out_of_memory=1)
    out = told(run)
    assert (
        "after.jsonl: 2 visits of phases ended in an error, the last in step/forward (visit 0): "
        f"20.00 MiB were asked for. {OUT_OF_MEMORY}"
    ) in out
    assert "after.jsonl: 1 allocation failed, out of memory" in out


def test_failed_allocations_after_the_last_phase_are_told(told: Any) -> None:
    run = Run().whole("save", 8).close(num_out_of_memory=3)
    assert "after.jsonl: 3 allocations failed, out of memory" in told(run)


def test_a_record_from_before_this_is_read_and_its_out_of_memory_run_does_not_look_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    for error, is_told in (("null", False), (json.dumps(OUT_OF_MEMORY), True)):
        path.write_text(OLD.replace("ERROR", error))
        assert main(["report", str(path)]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "peak 3.00 MiB in save, capacity 10.00 MiB" in out
        assert ("visit of phases ended in an error" in out) == is_told
        assert ("20.00 MiB were asked for" in out) == is_told
        assert "1 allocation failed" in out


def test_a_long_error_is_cut(told: Any) -> None:
    out = told(Run().close(error="ValueError: " + "x" * 5000, phase=None))
    assert max(map(len, out)) < 400


# --------------------------------------------------------------------------------- the whole run


def test_the_peak_of_the_run_is_that_of_its_highest_phase_or_of_what_came_after(told: Any) -> None:
    run = Run().whole("load", 8).whole("save", 12)
    assert "peak 12.00 MiB in save, capacity 64.00 MiB" in told(run.close(peak=12 * MIB))
    del run.lines[-1]
    late = told(run.close(peak=20 * MIB))
    assert "peak 20.00 MiB after the last phase, capacity 64.00 MiB" in late


def test_phases_are_compared_by_their_last_name_where_their_paths_differ(told: Any) -> None:
    before = Run().whole("load", 8).whole("save", 10).whole("eval", 2).close()
    after = Run().begin("train")
    after.whole("train/save", 6).whole("train/load", 4).whole("last/save", 12)
    after.whole("load", 4).end("train", 14).close()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in told(before, after)[2:]]
    assert rows == [
        ["whole run", "10.00 MiB", "14.00 MiB"],
        ["load", "8.00 MiB", "4.00 MiB"],
        ["save (after: train/save, last/save)", "10.00 MiB", "12.00 MiB"],
        ["eval", "2.00 MiB", "-"],
        ["train", "-", "14.00 MiB"],
        ["train/load", "-", "4.00 MiB"],
    ]


def test_a_comparison_says_which_of_the_runs_failed(told: Any) -> None:
    out = told(
        Run().whole("save", 8).close(error=OUT_OF_MEMORY, phase="save"),
        Run().whole("save", 4).close(),
    )
    failed = [line for line in out if "ended in an error" in line]
    assert [line.split(" in an error")[0] for line in failed] == [
        "before: before.jsonl: the run ended"
    ]
