"""Files that were there before a dry run are there after it, and what it saved is gone."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.dryrun.processes import be_like_any_user, in_dry_run
from tests.dryrun.trees import (
    ANY_CHANGES,
    BEGIN,
    CHANGES,
    OPENED,
    UNDO,
    is_of_older,
    is_save,
    logs_of_older,
    make_tree,
    open_folders_of_run,
    tree,
)

from residency._dryrun._files import JOURNAL
from residency._dryrun._undo import undo


def changed(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in the folder ``user`` as a process of a dry run."""
    return in_dry_run(folder, [sys.executable, "-c", BEGIN + textwrap.dedent(script), *arguments])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_is_as_it_was_though_it_was(change: str, tmp_path: Path) -> None:
    make_tree(tmp_path / "user")
    before = tree(tmp_path / "user")
    done = changed(tmp_path, change)
    assert not done.returncode, done.stderr
    assert tree(tmp_path / "user") != before
    assert undo(str(tmp_path / "run"), has_saves=False) == []
    after = tree(tmp_path / "user")
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize("seed", range(18))
def test_nothing_that_a_script_does_loses_a_file(seed: int, tmp_path: Path) -> None:
    before = be_like_any_user if seed % 3 == 0 else None
    leaves_new = seed % 2 == 0
    for number in range(3):
        folder = tmp_path / str(number)
        make_tree(folder / "user")
        there = tree(folder / "user")
        words = [sys.executable, "-c", BEGIN + ANY_CHANGES, str(3 * seed + number)]
        done = in_dry_run(folder, words, before=before)
        assert not done.returncode, done.stderr
        words = [sys.executable, "-c", UNDO, str(folder / "run"), str(leaves_new)]
        assert subprocess.run(words, preexec_fn=before, check=False).returncode == 0
        open_folders_of_run(folder / "user", there)
        after = tree(folder / "user")
        assert {name: after.get(name) for name in there} == there
        new = [folder / "user" / name for name in set(after) - set(there)]
        assert leaves_new or all(map(is_of_older, new))
        saves = [each for each in (folder / "user").rglob("*") if each.is_file() and is_save(each)]
        assert saves == []
        assert logs_of_older(folder / "user", there) == []


def test_a_script_opens_a_file_by_any_flags_as_always(tmp_path: Path) -> None:
    told = []
    for folder in (tmp_path / "plain", tmp_path / "dry"):
        user = folder / "user"
        (user / "a").mkdir(parents=True)
        for name in ("old", "private", "two names"):
            (user / name).write_text("the user's")
        (user / "private").chmod(0o600)
        (user / "empty").touch()
        (user / "link").symlink_to("old")
        os.link(user / "two names", user / "a" / "other")
        before = tree(user)
        if folder.name == "plain":
            words = [sys.executable, "-c", "import os\n" + OPENED]
            done = subprocess.run(words, cwd=user, capture_output=True, text=True, check=True)
        else:
            done = changed(folder, OPENED)
            assert undo(str(folder / "run"), has_saves=False) == []
            assert tree(user) == before
        told.append(done.stdout.splitlines())
        assert len(told[-1]) == 3 * 2**7 * 7, done.stderr
    assert told[0] == told[1]


def test_what_is_written_to_where_the_output_goes_stays(tmp_path: Path) -> None:
    make_tree(tmp_path / "user")
    command = f'exec {sys.executable} -c \'open("/dev/stdout", "a").write("run")\' >> 1'
    done = in_dry_run(tmp_path, ["sh", "-c", command])
    assert not done.returncode, done.stderr
    assert undo(str(tmp_path / "run"), has_saves=False) == []
    assert (tmp_path / "user" / "1").read_text() == "the user's 1run"


def test_a_socket_of_the_run_stays_away(tmp_path: Path) -> None:
    done = changed(tmp_path, "socket.socket(socket.AF_UNIX).bind('here'); os.remove('here')")
    assert not done.returncode, done.stderr
    assert undo(str(tmp_path / "run"), has_saves=False) == []
    assert tree(tmp_path / "user") == {}


def test_what_is_too_large_to_copy_is_named_where_it_was_changed(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    for name in ("read", "written", "cut", "longer"):
        with (tmp_path / "user" / name).open("wb") as file:
            file.truncate(65 << 20)
    script = """
    open("read", "r+b").read(1)
    open("written", "r+b").write(b"x")
    open("cut", "ab").truncate(1)
    open("longer", "ab").write(b"x")
    """
    done = changed(tmp_path, script)
    assert not done.returncode, done.stderr
    failures = undo(str(tmp_path / "run"), has_saves=False)
    assert [Path(each.split()[0]).name for each in failures] == ["cut", "written"]
    assert (tmp_path / "user" / "longer").stat().st_size == 65 << 20


def test_saves_go_with_the_folders_that_were_made_for_them_and_results_stay(tmp_path: Path) -> None:
    (tmp_path / "user" / "old").mkdir(parents=True)
    done = changed(
        tmp_path,
        """
        def save(name):
            files.note_save(name)
            open(name, "wb").truncate(9)
        os.makedirs("new/checkpoint-1~"), os.makedirs("new/logs")
        for name in ("new/checkpoint-1~/state.json", "new/logs/1", "old/1", "1"):
            open(name, "w").write("x")
        save("here.pt"), save("old/there.pt")
        save("new/checkpoint-1~/model.pt")
        open("old/latest", "w").write("there.pt")
        os.rename("new/checkpoint-1~", "new/checkpoint-1")
        shutil.copytree("new/checkpoint-1", "best/deep")
        os.symlink("checkpoint-1", "new/last")
        os.mkdir("out"), save("out/model.pt")
        files.note_result("out/memory.pickle"), open("out/memory.pickle", "w").write("x")
        """,
    )
    assert not done.returncode, done.stderr
    assert undo(str(tmp_path / "run"), has_saves=False) == []
    files = {name for name in tree(tmp_path / "user") if (tmp_path / "user" / name).is_file()}
    assert files == {"1", "old/1", "new/logs/1", "out/memory.pickle"}
    assert {path.name for path in (tmp_path / "user").iterdir()} == {"1", "new", "old", "out"}
    assert [path.name for path in (tmp_path / "user" / "new").iterdir()] == ["logs"]


def test_what_is_kept_elsewhere_cannot_be_removed_with_its_folder(tmp_path: Path) -> None:
    make_tree(tmp_path / "user")
    before = tree(tmp_path / "user")
    done = changed(
        tmp_path,
        """
        # As if the run's folder were on another disk, and all above this one another's.
        files._aside.folders = lambda place: iter([str(Path("a/kept").resolve())])
        os.remove("a/1")
        for change in (lambda: os.rename("a", "d"), lambda: shutil.rmtree("a")):
            try:
                change()
            except PermissionError as error:
                print(error)
        """,
    )
    assert "here the dry run keeps" in done.stdout.splitlines()[-1], done.stderr
    assert undo(str(tmp_path / "run"), has_saves=False) == []
    assert tree(tmp_path / "user") == before


REPLACING = """
import io, os, pathlib, shutil, signal, sqlite3, torch
pathlib.Path("seen").touch()
kept = torch.load("checkpoint.pt", map_location="cuda")
assert kept["weight"].shape == (1024, 1024)
model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(8, 1024, device="cuda")).sum().backward()
optimizer.step()
torch.save(model.state_dict(), "checkpoint.pt")
torch.save({"epoch": 3, "optimizer": optimizer.state_dict()}, open("other.pt", "wb"))
shutil.copyfile("other.pt", "best.pt")
buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
pathlib.Path("of_buffer.pt").write_bytes(buffer.getvalue())
assert torch.load("best.pt")["epoch"] == 3
model.load_state_dict(torch.load("checkpoint.pt"))
assert pathlib.Path("checkpoint.pt").stat().st_size > 4 << 20
shutil.rmtree("old")
study = sqlite3.connect("study.db")
study.execute("delete from t")
study.commit()
os.chmod("study.db", 0o600)
pathlib.Path("seen").write_text("all")
for process in {"child": [os.getpid()], "parent": [os.getppid()]}.get(os.environ.get("KILLED"), []):
    os.kill(process, signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "killed", ["", *(pytest.param(each, marks=pytest.mark.whole) for each in ("child", "parent"))]
)
def test_a_checkpoint_that_the_script_overwrites_is_the_same_afterwards(
    killed: str, dry_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"weight": torch.rand(1024, 1024)}
    torch.save(weights, tmp_path / "checkpoint.pt")
    (tmp_path / "old").mkdir()
    torch.save(weights, tmp_path / "old" / "1.pt")
    with closing(sqlite3.connect(tmp_path / "study.db")) as study:
        study.execute("create table t(a)")
        study.execute("insert into t values (1)")
        study.commit()
    monkeypatch.setenv("KILLED", killed)
    before = tree(tmp_path)
    if killed == "parent":
        # Its output ends with the process that puts the files back.
        assert "Traceback" not in dry_run_to_its_end(tmp_path)
    else:
        outcome = dry_run(REPLACING, options=("--capacity", "4GiB"))
        assert outcome.status == (3 if killed else 0), outcome.errors
        assert outcome.answer["files_seen_by"] == "audit events"
    found = tree(tmp_path)
    assert (tmp_path / "seen").read_text() == "all"
    assert {name: found.get(name) for name in before} == before
    assert not {"best.pt", "of_buffer.pt", "other.pt"} & found.keys()


def dry_run_to_its_end(folder: Path) -> str:
    (folder / "script.py").write_text(REPLACING)
    command = [sys.executable, "-m", "residency", "dry-run", "--capacity", "4GiB", "--"]
    with subprocess.Popen(
        [*command, sys.executable, "script.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        told, _ = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL
    return told


def test_a_process_that_is_left_behind_changes_nothing(tmp_path: Path) -> None:
    make_tree(tmp_path / "user")
    before = tree(tmp_path / "user")
    script = f"""
    os.rename({str(tmp_path / "run" / JOURNAL)!r}, {str(tmp_path / "run" / "ended")!r})
    os.remove("a/1")
    """
    done = changed(tmp_path, script)
    assert "the dry run has ended" in done.stderr
    assert tree(tmp_path / "user") == before


ROTATING = """
import torch
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}
trainer = Trainer(
    Model(),
    TrainingArguments("out", max_steps=5, save_steps=1, save_total_limit=1, report_to=[],
                      disable_tqdm=True, per_device_train_batch_size=1),
    train_dataset=[{"x": torch.ones(1024), "labels": torch.tensor(0)}] * 8,
)
trainer.train(resume_from_checkpoint=True)
trainer.save_model("out")
"""


@pytest.mark.whole
def test_checkpoints_that_a_trainer_rotates_away_are_back_afterwards(
    dry_run, tmp_path: Path
) -> None:
    options = ("--capacity", "4GiB", "--real")
    script = ROTATING.replace("max_steps=5", "max_steps=2")
    outcome = dry_run(script.replace("resume_from_checkpoint=True", ""), options=options)
    assert outcome.status == 0, outcome.errors
    before = tree(tmp_path / "out")
    assert {"checkpoint-2", "model.safetensors"} <= before.keys()
    outcome = dry_run(ROTATING, options=("--capacity", "4GiB"))
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["steps"] > 1
    # It saved at the end of these steps, too, as the Trainer was told to.
    assert outcome.answer["steps"] == 2
    assert outcome.answer["files"] > 4
    assert tree(tmp_path / "out") == before
