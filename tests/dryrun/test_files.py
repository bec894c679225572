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

from residency._dryrun._files import JOURNAL
from residency._dryrun._undo import undo

# What a process of a dry run does without torch, in the folder of the user.
BEGIN = """
import os, random, shutil, socket, sqlite3, sys
from contextlib import closing
from pathlib import Path
from residency._dryrun._files import files_of_run
files = files_of_run()
def write_row(name):
    with closing(sqlite3.connect(name)) as database:
        database.execute("create table if not exists t(a)")
        database.execute("insert into t values (2)")
        database.commit()
"""


def changed(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in the folder ``user`` as a process of a dry run."""
    return in_dry_run(folder, [sys.executable, "-c", BEGIN + textwrap.dedent(script), *arguments])


def tree(folder: Path) -> dict[str, object]:
    """Returns what a folder has: bytes, times and modes of files, and where links lead.

    The time of a folder is that of the last name in it, and new files stay.
    """
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = (str(path.readlink()), path.lstat().st_mtime_ns)
        elif path.is_dir():
            found[name] = path.stat().st_mode
        else:
            facts = path.stat()
            content = path.read_bytes() if path.is_file() else None
            attributes = {each: os.getxattr(path, each) for each in os.listxattr(path)}
            found[name] = (content, facts.st_mtime_ns, facts.st_mode, attributes)
    return found


def is_save(path: Path) -> bool:
    return path.read_bytes() == bytes(9)


def open_folders_of_run(folder: Path, before: dict[str, object]) -> None:
    """Lets a test look into folders that the script made and closed, and that stay."""
    for outer, inner, _ in os.walk(folder):
        for path in (Path(outer, name) for name in inner):
            if str(path.relative_to(folder)) not in before and not path.is_symlink():
                path.chmod(0o700)


def make_tree(folder: Path) -> None:
    for name in ("a", "a/b", "c"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("1", "2", "a/1", "a/2", "a/b/1", "c/1"):
        (folder / name).write_text(f"the user's {name}")
    (folder / "a" / "2").chmod(0o600)
    (folder / "c").chmod(0o750)
    (folder / "empty").touch()
    (folder / "link").symlink_to("a/1")
    os.mkfifo(folder / "pipe")
    for name in ("db", "c/db"):
        with closing(sqlite3.connect(folder / name)) as database:
            database.execute("create table t(a)")
            database.commit()


CHANGES = {
    "overwritten": "open('a/1', 'w').write('x'); open('a/1', 'w').write('y')",
    "written through a link": "open('link', 'w').write('x')",
    "appended to": "open('a/1', 'a').write('x'); open('empty', 'a').write('x')",
    "changed in place": "open('a/1', 'r+').write('x'); os.truncate('a/2', 1)",
    "removed": "os.remove('a/1'); os.remove('link')",
    "removed with its folder": "shutil.rmtree('a'); os.makedirs('a'); open('a/1', 'w').write('x')",
    "renamed": "os.rename('a/1', '3'); open('a/1', 'w').write('x'); open('3', 'w').write('x')",
    "renamed onto another": "os.replace('a/1', 'a/2'); os.remove('a/2')",
    "renamed with its folder": (
        "os.rename('a', 'd'); open('d/1', 'w').write('x'); shutil.rmtree('d/b'); os.makedirs('a/b')"
    ),
    "moved into a folder that goes": (
        "os.mkdir('d'); shutil.move('a/1', 'd/1'); shutil.move('a/b', 'd/b'); shutil.rmtree('d')"
    ),
    "moved with a new folder": (
        "os.mkdir('d'); os.rename('a/1', 'd/1'); os.remove('1'); os.rename('d', '1')"
    ),
    "replaced by a file that was written beside it": (
        "open('t', 'w').write('x'); os.replace('t', 'a/1')"
    ),
    "replaced by a save": (
        "files.note_save('a/1'); os.open('a/1', os.O_WRONLY | os.O_CREAT); "
        "shutil.copyfile('a/1', 'a/2')"
    ),
    "given another name": (
        "os.link('a/1', 'd'); open('d', 'w').write('x'); "
        "os.link('a/2', 'e'); open('e', 'a').write('x')"
    ),
    "replaced by a folder": "os.remove('a/1'); os.mkdir('a/1'); open('a/1/2', 'w').write('x')",
    "replaced by a link": "os.remove('a/1'); os.symlink('2', 'a/1')",
    "changed by a descriptor of its folder": (
        "a = os.open('a', os.O_RDONLY); os.remove('1', dir_fd=a); "
        "os.rename('2', '1', src_dir_fd=a, dst_dir_fd=a)"
    ),
    "opened in a folder by its descriptor": (
        "a = os.open('a', os.O_RDONLY); "
        "os.write(os.open('1', os.O_WRONLY | os.O_TRUNC, dir_fd=a), b'x')"
    ),
    "made shorter by who appends": "f = open('a/1', 'a+'); f.truncate(3); f.write('x')",
    "given another mode": "os.chmod('a/1', 0o400); os.chmod('a', 0o700); os.chmod('link', 0o604)",
    "given another mode by a descriptor": "f = open('a/1'); os.fchmod(f.fileno(), 0o640)",
    "given another mode and removed": (
        "os.chmod('a', 0o701); os.chmod('a/1', 0); shutil.rmtree('a')"
    ),
    "given another mode and moved with its folder": (
        "os.chmod('a/b', 0o700); os.rename('a', 'd'); os.chmod('d', 0o711); os.rename('c', 'a')"
    ),
    "given another time": (
        "os.utime('a/1', (1, 1)); os.utime('link', (2, 2), follow_symlinks=False); "
        "Path('a/2').touch(); os.utime('a/b', ns=(3, 3))"
    ),
    "given another time by a descriptor": "f = open('a/1'); os.utime(f.fileno(), (1, 1))",
    "written as it was": "text = open('a/1').read(); open('a/1', 'r+').write(text)",
    "given the facts of another": "shutil.copystat('a/2', '1'); shutil.copymode('a/2', '2')",
    "changed by sqlite3": "write_row('db'); write_row(Path('c/db'))",
    "changed by sqlite3, named by a URI": (
        "d = sqlite3.connect('file:c/%64b?mode=rw', uri=True); "
        "d.execute('drop table t'); d.commit()"
    ),
    "left by sqlite3 in the middle": (
        "d = sqlite3.connect('db'); d.execute('pragma journal_mode=wal'); "
        "d.execute('insert into t values (1)'); d.commit(); sys.stdout.flush(); os._exit(0)"
    ),
    "a pipe that is removed": "os.remove('pipe'); os.mkfifo('pipe'); os.remove('pipe')",
    "a pipe in the way of a file": "os.remove('pipe'); open('pipe', 'w').write('x')",
}


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


UNDO = """
import sys
from residency._dryrun._undo import undo
lost = undo(sys.argv[1], has_saves=False, leaves_new=sys.argv[2] == "True")
sys.exit(str(lost) if lost else 0)
"""
ANY_CHANGES = """
names = ["1", "2", "a", "a/1", "a/2", "a/b", "a/b/1", "c", "c/1", "d", "d/1", "empty", "link"]
names += ["db", "c/db"]
FLAGS = [os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_EXCL, os.O_NOFOLLOW]
def open_by_flags(name):
    flags = random.choice([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]) | os.O_NONBLOCK
    for flag in FLAGS:
        flags |= flag * (random.random() < 0.4)
    folder = os.open(os.path.dirname(name) or ".", os.O_RDONLY)
    try:
        descriptor = os.open(os.path.basename(name), flags, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        os.write(descriptor, b"run")
        os.ftruncate(descriptor, 2)
        os.fchmod(descriptor, 0o640)
    finally:
        os.close(descriptor)
def cut_by_descriptor(name):
    with open(name, random.choice(["a+", "r+"])) as file:
        file.truncate(1)
        file.write("run")
random.seed(int(sys.argv[1]))
def save(name):
    files.note_save(name)
    with open(name, "wb") as file:
        file.truncate(9)
for _ in range(30):
    one, other = random.choice(names), random.choice(names)
    change = random.choice([
        lambda: open(one, random.choice(["w", "a", "r+", "x"])).write("run"),
        lambda: os.remove(one), lambda: shutil.rmtree(one), lambda: os.rename(one, other),
        lambda: shutil.move(one, other), lambda: os.mkdir(one), lambda: os.symlink(other, one),
        lambda: os.link(one, other), lambda: shutil.copyfile(one, other), lambda: save(one),
        lambda: shutil.copytree(one, other), lambda: os.truncate(one, 3),
        lambda: os.chmod(one, random.choice([0o600, 0o644, 0o751, 0o500, 0o400])),
        lambda: os.utime(one, (7, 7), follow_symlinks=random.random() < 0.5),
        lambda: Path(one).touch(), lambda: open_by_flags(one), lambda: open_by_flags(one),
        lambda: cut_by_descriptor(one), lambda: write_row(one), lambda: os.remove("pipe"),
        lambda: os.setxattr(one, "user.run", b"x"), lambda: shutil.copystat(one, other),
    ])
    try:
        change()
    except (OSError, shutil.Error, RecursionError, sqlite3.Error):  # a folder into itself
        pass
"""


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
        new = [(folder / "user" / name).lstat() for name in set(after) - set(there)]
        assert leaves_new or all(each.st_nlink > 1 for each in new)  # of an older file
        saves = [each for each in (folder / "user").rglob("*") if each.is_file() and is_save(each)]
        assert saves == []


OPENED = """
import itertools
access = [os.O_RDONLY, os.O_WRONLY, os.O_RDWR]
more = [os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_EXCL, os.O_NOFOLLOW, os.O_PATH, os.O_DIRECTORY]
for first in access:
    for chosen in itertools.product([False, True], repeat=len(more)):
        flags = first | sum(flag for flag, is_in in zip(more, chosen) if is_in)
        for name in ("old", "private", "link", "empty", "two names", "missing", "a"):
            told = []
            try:
                descriptor = os.open(name, flags)
                told.append("opened")
                os.write(descriptor, b"x")
            except OSError as error:
                told.append(error.errno)
            if told[0] == "opened":
                os.close(descriptor)
            if os.path.isfile(name):
                told += [open(name).read(), oct(os.stat(name).st_mode)]
                if name == "missing":
                    os.remove(name)
            print(flags, name, *told)
"""


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
        save("here.pt"), save("old/there.pt")
        os.makedirs("new/checkpoint-1~"), os.makedirs("new/logs")
        for name in ("new/checkpoint-1~/state.json", "new/logs/1", "old/1", "1"):
            open(name, "w").write("x")
        save("new/checkpoint-1~/model.pt")
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
        files._folders = lambda place: iter([str(Path("a/kept").resolve())])
        os.remove("a/1")
        for change in (lambda: os.rename("a", "d"), lambda: shutil.rmtree("a")):
            try:
                change()
            except PermissionError as error:
                print(error)
        """,
    )
    assert "what the dry run keeps" in done.stdout.splitlines()[-1], done.stderr
    assert undo(str(tmp_path / "run"), has_saves=False) == []
    assert tree(tmp_path / "user") == before


REPLACING = """
import io, os, pathlib, shutil, signal, sqlite3, torch
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
pathlib.Path("seen").touch()
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
    assert "seen" in found
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
