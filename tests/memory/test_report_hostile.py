"""Records that somebody else wrote, damaged or hostile: each is a clear error, or a warning with
its line, and nothing of it is obeyed by a terminal or a page.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from residency._cli import main
from residency._memory import _format
from residency._units import MIB

HEADER = {"kind": "header", "format": _format.FORMAT, "version": _format.VERSION}
HEADER |= {"rank": 0, "world_size": 1, "started_at": 0.0}
FIGURES = {"held": 1, "returnable": 0, "stuck": 0, "draining": 0, "pooled": 0, "outside": 0}
FIGURES |= {"free": 9, "capacity": 10}
PLACE = {"phase": "a", "visit": 0, "thread": 1}
BEGIN = {"kind": "begin", **PLACE, "t": 0.0, **FIGURES}
END = {"kind": "end", **PLACE, "t": 1.0, **FIGURES, "peak": 1, "is_peak_exact": True}
END |= {"seconds": 1.0, "error": None}
INF, NAN = float("inf"), float("nan")


def lines(*parts: Any) -> bytes:
    text = [part if isinstance(part, str) else json.dumps(part) for part in parts]
    return ("\n".join([*text, json.dumps({"kind": "close"})]) + "\n").encode()


def header(**fields: Any) -> bytes:
    return lines({**HEADER, **fields}, BEGIN, END)


def begin(**fields: Any) -> bytes:
    return lines(HEADER, {**BEGIN, **fields}, {**BEGIN, "visit": 1}, {**END, "visit": 1})


def end(**fields: Any) -> bytes:
    return lines(HEADER, BEGIN, {**END, **fields}, END)


def phase(name: str) -> bytes:
    return lines(HEADER, {**BEGIN, "phase": name}, {**END, "phase": name, "error": name})


BAD_FIELDS = {
    "rank x": (1, "rank", header(rank="x")),
    "rank null": (1, "rank", header(rank=None)),
    "rank -1": (1, "rank", header(rank=-1)),
    "world many": (1, "world_size", header(world_size="many")),
    "world true": (1, "world_size", header(world_size=True)),
    "started null": (1, "started_at", header(started_at=None)),
    "format": (1, "format", header(format="theirs")),
    "held inf": (2, "held", begin(held=INF)),
    "held nan": (2, "held", begin(held=NAN)),
    "held -5": (2, "held", begin(held=-5)),
    "held 1.5": (2, "held", begin(held=1.5)),
    "held text": (2, "held", begin(held="7")),
    "held true": (2, "held", begin(held=True)),
    "held huge": (2, "held", begin(held=10**400)),
    "capacity list": (2, "capacity", begin(capacity=[1])),
    "phase null": (2, "phase", begin(phase=None)),
    "phase list": (2, "phase", begin(phase=["a"])),
    "phase long": (2, "phase", begin(phase="p" * 300_000)),
    "t nan": (2, "t", begin(t=NAN)),
    "t huge": (2, "t", begin(t=1e300)),
    "thread": (2, "thread", begin(thread=2**70)),
    "kind list": (2, "kind", begin(kind=["begin"])),
    "begins twice": (3, "begins twice", lines(HEADER, BEGIN, BEGIN, END)),
    "two headers": (2, "a second header", lines(HEADER, HEADER, BEGIN, END)),
    "peak inf": (3, "peak", end(peak=INF)),
    "peak 1e400": (3, "peak", lines(HEADER, BEGIN, json.dumps(END)[:-1] + ', "peak": 1e400}', END)),
    "seconds inf": (3, "seconds", end(seconds=INF)),
    "error dict": (3, "error", end(error={"a": 1})),
    "exact": (3, "is_peak_exact", end(is_peak_exact="no")),
    "deep": (2, "nested too deep", lines(HEADER, "[" * 200_000, BEGIN, END)),
    "long": (2, "longer than", lines(HEADER, '{"kind": "' + "x" * 3_000_000, BEGIN, END)),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_line_that_no_recording_wrote_is_named_and_the_rest_is_shown(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    number, said, data = BAD_FIELDS[name]
    path, trace = tmp_path / "run.jsonl", tmp_path / "trace.json"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        assert main(["report", str(path), "--trace", str(trace)]) == 0
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()
    out, err = capsys.readouterr()
    warnings = [line for line in err.splitlines() if f"run.jsonl:{number}: " in line]
    assert len(warnings) == 1, err
    assert said in warnings[0]
    assert len(warnings[0]) < 300
    assert any(line.split()[:2] == ["a", "1"] for line in out.splitlines()), out
    json.loads(trace.read_text(), parse_constant=pytest.fail)


def test_a_number_of_ranks_that_nobody_has_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.rank0.jsonl").write_bytes(header(world_size=10**9))
    (tmp_path / "run.rank1.jsonl").write_text("not a record")
    tracemalloc.start()
    try:
        assert main(["report", str(tmp_path / "run.jsonl")]) == 0
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()
    err = capsys.readouterr().err
    assert "of rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 999999989 more is there" in err
    assert "run.rank1.jsonl is no record" in err


NAMES = {
    "escape": "\x1b[31mred\x1b]0;title\x07",
    "c1": "a\x9b31m",
    "newline": "a\nb|c\u2028d\re",
    "bidi": "a\u202eb",
    "surrogate": "\ud800x",
    "nul": "a\0b",
    "script": "</script><script>alert(1)</script>",
    "markup": "[bold]x[/bold][/nope]",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown_and_not_obeyed(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    path.write_bytes(phase(NAMES[name]))
    for arguments in ([], ["--trace", str(tmp_path / "trace.json")], [str(path)]):
        assert main(["report", str(path), *arguments]) == 0
        out, err = capsys.readouterr()
        assert (out + err).replace("\n", "").isprintable()
        if arguments == [str(path)]:
            # The head, the whole run, the phase; and how each of the two ended.
            assert len([line for line in out.splitlines() if line]) == 6
    if name == "script":
        pytest.importorskip("plotly")
        assert main(["report", str(path), "--html", str(page)]) == 0
        assert "<script>alert" not in page.read_text()


@pytest.mark.parametrize("command", [[], ["--html", "page.html"], ["--trace", "trace.json"]])
def test_a_record_without_a_readable_visit_is_an_empty_report(
    tmp_path: Path,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--html" in command:
        pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    Path("run.jsonl").write_bytes(lines(HEADER, {**BEGIN, "held": NAN}))
    assert main(["report", "run.jsonl", *command]) == 0
    assert "run.jsonl:2: is no line of a recording" in capsys.readouterr().err
    assert main(["report", "run.jsonl", "run.jsonl"]) == 0


def test_a_later_version_is_named_and_what_it_wrote_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(header(version=99))
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "the version 99, and this residency knows those up to 1. Install a newer one" in err


def test_a_first_line_without_an_end_is_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "/dev/zero"]) == 2
    assert "is no record" in capsys.readouterr().err


def test_a_narrow_terminal_gets_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(lines(HEADER, BEGIN, {**END, "held": 37 * MIB, "peak": 41 * MIB}))
    monkeypatch.setattr("residency._report._table._WIDTH", 40)
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert [line.split()[:3] for line in out.splitlines() if line[:6] in ("  peak", "  held")] == [
        ["peak", "41.00", "MiB"],
        ["held", "37.00", "MiB"],
    ]


@pytest.mark.parametrize("width", range(66, 84))
def test_no_width_of_a_terminal_cuts_a_name_or_a_figure(
    tmp_path: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    name = "train/optimizer_step"
    path.write_bytes(
        lines(HEADER, {**BEGIN, "phase": name}, {**END, "phase": name, "peak": 41 * MIB})
    )
    monkeypatch.setattr("residency._report._table._WIDTH", width)
    assert main(["report", str(path)]) == 0
    words = capsys.readouterr().out.split("classes as at")[1].split()
    assert {name, "41.00", "growth", "visit", "-"} <= set(words)
