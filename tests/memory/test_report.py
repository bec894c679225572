"""Reports: the table, the comparison, the page in a browser, exports, and files that are broken."""

from __future__ import annotations

import html
import html.parser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limits import WORKER_SECONDS

import residency
from residency._cli import main
from residency._report import read_run, read_runs, summarise

MIB = 1 << 20
CLASSES = {"returnable": 14 * MIB, "stuck": 3 * MIB, "draining": 0, "outside": 0, "pooled": 0}
Write = Callable[..., Path]


def _line(kind: str, phase: str, visit: int, t: float, held: int, **more: Any) -> str:
    place = {"kind": kind, "phase": phase, "visit": visit, "thread": 7, "device": "sim:0"}
    figures = {**CLASSES, "held": held, "free": 256 * MIB - held - 17 * MIB, "capacity": 256 * MIB}
    return json.dumps({**place, **figures, "t": t, **more})


def _run(num_visits: int, growth: int = 0, **header: Any) -> list[str]:
    start = {"kind": "header", "format": "residency-ledger", "version": 1, "started_at": 1.0e9}
    lines = [json.dumps({**start, "rank": 0, "world_size": 1, "peaks": "bounds", **header, "t": 0})]
    for i in range(num_visits):
        end = {"peak": 90 * MIB, "is_peak_exact": False, "seconds": 0.5, "error": None}
        step = {**end, "peak": 100 * MIB + i * growth, "is_peak_exact": True}
        step["error"] = "ValueError: <b>bad</b> | worse" if i == 1 else None
        held = 40 * MIB + i * growth
        lines += [
            _line("begin", "step", i, i, held),
            _line("begin", "step/save", i, i + 0.1, held),
            _line("end", "step/save", i, i + 0.6, held, **end),
            _line("end", "step", i, i + 0.9, held, **step),
        ]
    return [*lines, json.dumps({"kind": "close", "t": num_visits})]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(name: str, lines: list[str]) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return to_file


def _report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    assert main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr()


# --------------------------------------------------------------------------------------- the table


def test_the_table_has_a_row_a_phase_and_says_what_grows(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = _report(capsys, write("run.jsonl", _run(10, growth=3 * MIB)))
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert re.search(r"10 \(1 failed\)\s+127.00 MiB\s+67.00 MiB\s+14.00 MiB", rows["step"])
    assert re.search(r"10\s+<= 90.00 MiB", rows["step/save"])
    assert "+3.00 MiB held" in rows["step"]
    assert "growing at the end of step (rank 0): held +3.00 MiB per visit over 5 visits" in out
    assert "an upper bound" in out
    assert "capacity 256.00 MiB" in out
    assert err == ""


def test_a_flat_run_grows_nowhere(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _report(capsys, write("run.jsonl", _run(10)))
    assert "growing" not in out
    assert out.count(" none") == 2


def test_stuck_bytes_that_are_unknown_are_shown_as_such(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.replace(f'"stuck": {3 * MIB}', '"stuck": null') for line in _run(2)]
    out, _ = _report(capsys, write("run.jsonl", lines))
    assert "unknown" in out


def test_two_records_make_a_markdown_table(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write("before.jsonl", _run(10, growth=3 * MIB))
    out, _ = _report(capsys, before, write("after.jsonl", _run(10)))
    lines = out.splitlines()[:5]
    assert {line.count("|") for line in lines} == {10}
    assert lines[2] == (
        "| whole run | 127.00 MiB | 100.00 MiB | 67.00 MiB | 40.00 MiB | 84.00 MiB | 57.00 MiB "
        "| - | - |"
    )
    assert lines[3] == (
        "| step | 127.00 MiB | 100.00 MiB | 67.00 MiB | 40.00 MiB | 84.00 MiB | 57.00 MiB "
        "| +3.00 MiB held | none |"
    )


def test_all_ranks_are_in_one_table_and_a_missing_one_is_named(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 2):
        write(f"run.rank{rank}.jsonl", _run(3, rank=rank, world_size=4))
    write("run.ranked.jsonl", _run(3))  # another run
    out, err = _report(capsys, tmp_path / "run.jsonl")
    assert "the run had 4 ranks; no file of rank 1, 3 is there" in err
    assert "rank" in out
    assert [run.rank for run in read_runs(tmp_path / "run.jsonl")] == [0, 2]


# --------------------------------------------------------------------------------------- bad input


def test_broken_and_foreign_lines_are_named_and_the_rest_is_shown(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _run(3)
    lines[1:1] = ['{"kind": "begin", "pha', "[1]", '{"loss": 3}', '{"kind": "end"}', "\udcff"[:0]]
    lines[-1] = _line("end", "never begun", 0, 3.0, 0, peak=0, is_peak_exact=True, seconds=0)
    lines.append('{"kind": "be')
    out, err = _report(capsys, write("run.jsonl", lines))
    assert "run.jsonl:2: is broken: not JSON" in err
    assert "run.jsonl:3: is no line of a recording" in err
    assert "run.jsonl:4: is no line of a recording (KeyError: 'kind')" in err
    assert "run.jsonl:5: is no line of a recording (KeyError: 'phase')" in err
    assert "phase 'never begun' ends and never began" in err
    assert f"run.jsonl:{len(lines)}: is broken" in err
    assert "the recording was cut off" in err
    assert re.search(r"step/save\s+3", out)


def test_a_phase_that_was_left_open_is_named_with_its_line(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _run(2)
    del lines[-2]
    _, err = _report(capsys, write("run.jsonl", lines))
    assert "run.jsonl:6: phase 'step' begins and never ends" in err


def test_a_file_that_is_not_text_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(bytes(range(256)) * 20)
    with pytest.raises(residency.InvalidArgumentError, match="is no record"):
        read_run(path)


def test_a_newer_format_is_not_guessed_at(write: Write) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="is no record"):
        read_run(write("run.jsonl", _run(0, version=99)[:1]))


def test_what_is_not_there_is_an_error_with_a_cure(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    record = write("run.jsonl", _run(1))
    for arguments, message in (
        ([tmp_path / "no.jsonl"], "residency record -o FILE"),
        ([tmp_path], "is a directory"),
        ([record, "--html", tmp_path / "no" / "x.html"], "cannot be written"),
        ([record, "--trace", tmp_path / "no" / "x.json"], "cannot be written"),
        ([record, "--tensorboard", record], "cannot be written"),
        ([record, record, "--html", tmp_path / "x.html"], "one record to an export"),
    ):
        assert main(["report", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = write("run.jsonl", _run(1))
    for name in ("plotly.offline", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    for option in ("--html", "--tensorboard"):
        assert main(["report", str(record), option, str(tmp_path / "x")]) == 2
        assert "pip install 'residency[report]'" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- exports


def test_the_trace_has_slices_and_counters(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _report(capsys, write("run.jsonl", _run(2)), "--trace", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in slices] == ["step", "save", "step", "save"]
    assert (slices[1]["ts"], slices[1]["dur"]) == (pytest.approx(1e5), pytest.approx(5e5))
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == 8
    assert counters[0]["args"]["held"] == 40 * MIB


def test_tensorboard_reads_the_scalars(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _report(capsys, write("run.jsonl", _run(3, growth=MIB)), "--tensorboard", tmp_path / "tb")
    events = EventAccumulator(str(tmp_path / "tb" / "rank0")).Reload()
    assert [s.value for s in events.Scalars("step/held")] == [40 * MIB, 41 * MIB, 42 * MIB]
    assert [s.step for s in events.Scalars("step/peak")] == [0, 1, 2]


# ---------------------------------------------------------------------------------------- the page


@pytest.fixture
def page(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    pytest.importorskip("plotly")
    _report(capsys, write("run.jsonl", _run(10, MIB)), "--html", tmp_path / "run.html")
    return tmp_path / "run.html"


class _Links(html.parser.HTMLParser):
    """Collects what a page asks the network for, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        links = [value or "" for name, value in attrs if name in ("src", "href")]
        self.links += [link for link in links if not link.startswith("data:")]


def test_the_page_asks_for_nothing_and_escapes_what_it_shows(page: Path) -> None:
    text = page.read_text()
    links = _Links()
    links.feed(text)
    assert links.links == []
    assert "<b>bad</b>" not in text


def test_a_browser_draws_the_page_without_an_error(page: Path, tmp_path: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *("--virtual-time-budget=10000", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=WORKER_SECONDS,
    )
    assert re.findall(r".*CONSOLE.*", done.stderr) == []
    assert 'id="timeline-rank0"' in done.stdout
    # Drawn by the script: an area a class, a bar a visit.
    assert len(re.findall(r'class="[^"]*fills', done.stdout)) >= 1
    # And a cross at the visit that an error ended.
    assert done.stdout.count('class="point"') == 21
    # Beside its lane each phase has its name.
    assert re.findall(r"<text[^>]*>(step(?:/save)?)</text>", done.stdout) == ["step", "step/save"]


def test_the_page_says_above_the_timeline_what_must_not_be_missed(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    about = {"command": "python train.py --name '<i>'", "torch": "2.13.0", "residency": "0.2"}
    lines = _run(10, growth=3 * MIB, **about)
    last = {"kind": "close", "t": 10, "error": "KeyError: 'x'", "phase": "step/save"}
    record = write("run.jsonl", [*lines[:-1], json.dumps(last)])
    _report(capsys, record, "--html", tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    title = re.search(r"<title>(.*?)</title>", text)
    assert title
    assert title[1].startswith("run.jsonl 2001-09-09 01:46 UTC")
    body = text[text.rindex("<body>") :]
    above = html.unescape(re.sub(r"<[^>]*>", "", body[: body.index("timeline-rank0")]))
    assert above.strip().splitlines()[:6] == [
        "Device memory of run.jsonl",
        "python train.py --name '<i>'",
        "2001-09-09 01:46 UTC, 9.9 s, torch 2.13.0, residency 0.2",
        "peak 127.00 MiB in step, capacity 256.00 MiB",
        "run.jsonl: the run ended in an error, in step/save: KeyError: 'x'",
        "growing at the end of step (rank 0): held +3.00 MiB per visit over 5 visits",
    ]


def test_a_long_run_is_thinned_to_what_a_browser_can_draw(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    record = write("run.jsonl", _run(6000))
    _report(capsys, record, "--html", tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size < 8 * MIB
    assert "A long run" in (tmp_path / "run.html").read_text()
    assert [row.count for row in summarise(read_run(record))] == [6000, 6000]
