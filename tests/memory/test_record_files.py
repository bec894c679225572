"""What a recording may remove or replace: files that carry its own mark, and no others."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

import residency
from residency._cli import _record_verb, main
from residency._memory._ledger import Ledger

FOREIGN = {
    "run.ranking.jsonl": '{"rank": 1}\n',
    "run.rank_table.jsonl": "precious\n",
    "run.pids.jsonl": "[1, 2]\n",
    "run.rank0.jsonl": '{"kind": "header", "format": "theirs"}\n',
    "exp.rank0.safetensors": "weights",
    "exp.rank1.pt": "weights",
    "exp.rank2": "weights",
    "exp.pid7": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FOREIGN.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def record_at(path: Path) -> str:
    with residency.record(path):
        pass
    return path.read_text()


@pytest.mark.parametrize("name", ["run.jsonl", "exp", "exp.safetensors", "run.rank0", "[r]*.jsonl"])
def test_a_recording_removes_nothing_that_is_no_record(folder: Path, name: str) -> None:
    assert main(["record", "-o", str(folder / name), "--", "true"]) == 0
    assert contents(folder) == FOREIGN


def test_the_records_of_an_earlier_run_are_removed(folder: Path) -> None:
    for name in ("run.jsonl", "run.rank1.jsonl", "run.pid12.jsonl", "run.rank1.pid3.jsonl"):
        record_at(folder / name)
    other = record_at(folder / "run.rank.jsonl")
    assert main(["record", "-o", str(folder / "run.jsonl"), "--", "true"]) == 0
    assert contents(folder) == {**FOREIGN, "run.rank.jsonl": other}


def test_earlier_records_stay_where_the_command_cannot_be_started(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = record_at(folder / "run.jsonl")
    program = folder / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    assert main(["record", "-o", str(folder / "run.jsonl"), "--", str(program)]) == 2
    assert "cannot be started" in capsys.readouterr().err
    assert (folder / "run.jsonl").read_text() == text


def test_a_record_that_the_command_has_written_already_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record_at(path)
    earlier = _record_verb._earlier_records(path)
    text = record_at(path)
    _record_verb._remove(earlier)
    assert path.read_text() == text


def test_a_file_that_is_no_record_is_not_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("exp.rank1.pt", "run.rank0.jsonl"):
        with (
            pytest.raises(residency.InvalidArgumentError, match="is no record"),
            residency.record(folder / name),
        ):
            pass
        assert main(["record", "-o", str(folder / name), "--", "true"]) == 2
        assert "is no record; name another file" in capsys.readouterr().err
    assert contents(folder) == FOREIGN
    record_at(folder / "exp.pid7")  # an empty one has nothing to lose
    (folder / "a.jsonl").mkdir()
    assert main(["record", "-o", str(folder / "a.jsonl"), "--", "true"]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_the_first_boundaries_of_two_threads_go_to_one_file(tmp_path: Path) -> None:
    begun: list[threading.Thread] = []

    def ranks() -> tuple[int, int]:
        """Is asked while the file is made; the other thread has its boundary just then."""
        if not begun:
            begun.append(threading.Thread(target=ledger.write, args=({"kind": "begin"},)))
            begun[0].start()
            begun[0].join(0.2)  # it may wait for this one, and then does not end here
        return 0, 1

    ledger = Ledger(tmp_path / "run.jsonl", peaks="bounds", ranks=ranks, is_shared=True)
    ledger.write({"kind": "begin"})
    begun[0].join(30)
    ledger.close()
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["header", "begin", "begin", "close"]


def test_a_boundary_that_comes_as_the_record_closes_leaves_the_record_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.jsonl"
    ledger = Ledger(file, peaks="bounds", ranks=lambda: (0, 1), is_shared=False)
    ledger.write({"kind": "begin"})

    def close_first() -> float:
        monkeypatch.undo()
        ledger.close()  # as another thread does, when this one has begun to write
        return time.perf_counter()

    monkeypatch.setattr(time, "perf_counter", close_first)
    ledger.write({"kind": "end"})
    lines = file.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["header", "begin", "close"]
