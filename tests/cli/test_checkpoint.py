"""``residency checkpoint`` says what a directory holds, and answers every wrong one in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from residency._checkpoint._disk._manifest import Record
from residency._checkpoint._disk._parts import FilePlan, Part
from residency._checkpoint._disk._publish import CheckpointDirectory, SaveRequest
from residency._cli import main

LOSSES = {1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.3}


def save(path: Path, step: int, loss: float) -> None:
    data = memoryview(bytearray(b"weights!" * 1000))
    record = Record("model.weight", "U8", (data.nbytes,), data.nbytes)
    files = [FilePlan("model.safetensors", [Part(record, lambda: data, lambda: None)])]
    request = SaveRequest(step, files, {"tree": {}}, {"loss": loss}, 0, 1, f"token-{step}")
    CheckpointDirectory(path).save(request, timeout_seconds=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for step, loss in LOSSES.items():
        save(tmp_path / "saves", step, loss)
    return tmp_path / "saves"


def damage(path: Path, step: int) -> None:
    file = path / f"step-{step:08d}" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)


def test_list_shows_each_save(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(path)]) == 0
    output = capsys.readouterr().out
    assert "4 saves" in output
    assert "loss=0.1" in output
    assert "loss=nan" in output
    assert "11.81 KiB" in output


def test_list_says_which_save_cannot_be_opened(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path / "step-00000002" / "model.safetensors").unlink()
    assert main(["checkpoint", "list", "--json", str(path)]) == 0
    rows = {row["step"]: row for row in json.loads(capsys.readouterr().out)["saves"]}
    assert "model.safetensors is missing" in rows[2]["damage"]
    assert rows[1]["damage"] is None
    assert rows[1]["metrics"] == {"loss": 0.5}
    assert rows[3]["metrics"] == {"loss": "nan"}


def test_list_shows_what_the_manifest_knows_of_a_damaged_save(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "list", "--json", str(path)]) == 0
    before = {row["step"]: row for row in json.loads(capsys.readouterr().out)["saves"]}
    (path / "step-00000001" / "model.safetensors").write_bytes(b"")
    (path / "step-00000002" / "manifest.json").write_text("{")
    assert main(["checkpoint", "list", "--json", str(path)]) == 0
    rows = {row["step"]: row for row in json.loads(capsys.readouterr().out)["saves"]}
    assert "model.safetensors is truncated" in rows[1].pop("damage")
    assert rows[1] == {name: value for name, value in before[1].items() if name != "damage"}
    assert rows[1]["num_bytes"] == 12096
    assert "manifest.json" in rows[2]["damage"]
    assert rows[2]["num_bytes"] is None
    assert rows[2]["saved_at"] is not None


def test_the_bar_of_verify_counts_to_the_size_of_damaged_saves_too(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in LOSSES:
        (path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert "/47.2 KiB" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_verify_returns_zero_for_whole_saves_and_one_for_a_damaged_one(
    path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["checkpoint", "verify", str(path), *options]) == 0
    damage(path, 2)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(path), *options]) == 1
    captured = capsys.readouterr()
    assert "model.weight" in captured.out
    assert "model.safetensors" in captured.out
    assert "verifying" in captured.err
    assert main(["checkpoint", "verify", str(path), "--step", "1", *options]) == 0


def test_verify_as_json_names_file_tensor_and_offset(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(path, 2)
    assert main(["checkpoint", "verify", str(path), "--step", "2", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["whole"] is False
    (found,) = document["saves"][0]["damages"]
    assert found["file"] == "model.safetensors"
    assert found["tensors"] == ["model.weight"]
    assert found["offset"] == 0


@pytest.mark.parametrize(
    ("options", "removed"),
    [
        (["--keep", "2"], [1, 2]),
        (["--keep", "1", "--best", "1", "--metric", "loss"], [1, 3]),
        (["--best", "1", "--metric", "loss", "--greatest"], [2, 3]),
        (["--keep", "9"], []),
        (["--above", "2"], [3, 4]),
        (["--above", "4"], []),
    ],
)
def test_prune_removes_what_is_not_kept(
    path: Path, capsys: pytest.CaptureFixture[str], options: list[str], removed: list[int]
) -> None:
    directory = CheckpointDirectory(path)
    assert main(["checkpoint", "prune", str(path), "--dry-run", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == removed
    assert directory.steps() == list(LOSSES)
    assert main(["checkpoint", "prune", str(path), *options]) == 0
    assert directory.steps() == [step for step in LOSSES if step not in removed]
    assert f"{len(removed)} removed" in capsys.readouterr().out


def test_prune_is_refused_while_someone_writes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = CheckpointDirectory(path)
    writer.lock()
    assert main(["checkpoint", "prune", str(path), "--keep", "1"]) == 2
    assert "is being written by process" in capsys.readouterr().err
    writer.unlock()
    assert writer.steps() == list(LOSSES)


@pytest.mark.parametrize("task", ["list", "verify", "prune"])
def test_a_wrong_directory_is_one_clear_line(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    options = ["--keep", "1"] if task == "prune" else []
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, words in {
        "nowhere": "does not exist",
        "empty": "holds no saves",
        "file": "is a file",
        "saves/step-00000001": "is one save; give the directory that holds it",
    }.items():
        assert main(["checkpoint", task, str(tmp_path / name), *options]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--step", "7"], "has no save of step 7"),
        (["prune"], "give prune --keep N"),
        (["prune", "--keep", "0"], "expected at least 1"),
        (["prune", "--above", "0"], "none would stay. The lowest step is 1"),
        (["prune", "--above", "2", "--keep", "1"], "or --above STEP alone"),
        (["prune", "--best", "2"], "give both, or neither"),
        (["prune", "--keep", "1", "--metric", "loss"], "give both, or neither"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["checkpoint", arguments[0], str(path), *arguments[1:]]) == 2
    assert words in capsys.readouterr().err


def test_the_verb_and_the_layer_below_it_import_no_torch(path: Path) -> None:
    code = (
        "import pkgutil, sys, importlib\n"
        "from residency._cli import main\n"
        f"assert main(['checkpoint', 'verify', {str(path)!r}]) == 0\n"
        f"assert main(['checkpoint', 'list', {str(path)!r}]) == 0\n"
        "import residency._checkpoint._disk as disk\n"
        "for module in pkgutil.iter_modules(disk.__path__, disk.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert 'numpy' not in sys.modules, 'numpy was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
