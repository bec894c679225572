"""Python processes that a script starts are part of its dry run, however they are started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from residency._dryrun._children import not_isolated

TRAIN = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.Adam(net.parameters())
for _ in range(3):
    net(torch.randn(4, 64, device=device)).pow(2).mean().backward()
    optimizer.step()
torch.save(net.state_dict(), "model.pt")
print("end on", device)
"""
ENVIRONMENT = "env={'PATH': os.environ['PATH'], 'HOME': os.environ.get('HOME', '')}"
STARTS = {
    "run": f"subprocess.run([sys.executable, 'train.py'], {ENVIRONMENT}, check=True)",
    "isolated": "subprocess.run([sys.executable, '-I', 'train.py'], check=True)",
    "combined": "subprocess.run([sys.executable, '-uE', 'train.py'], check=True)",
    "path": "subprocess.run([sys.executable, 'train.py'], env={**os.environ, 'PYTHONPATH': 'x'})",
    "shell": f"subprocess.run(sys.executable + ' train.py', shell=True, {ENVIRONMENT}, check=True)",
    "spawned": f"os.waitpid(os.posix_spawn(sys.executable, [sys.executable, 'train.py'], "
    f"{ENVIRONMENT[4:]}), 0)",
    "executed": f"os.execve(sys.executable, [sys.executable, 'train.py'], {ENVIRONMENT[4:]})",
    "cleared": "os.environ.clear(); subprocess.run([sys.executable, 'train.py'], check=True)",
}


def _dry_run(
    folder: Path, words: list[str], script: str = TRAIN
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    (folder / "model.pt").write_text("kept")
    command = [sys.executable, "-m", "residency", "dry-run", "--capacity=4GiB", "--", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize("start", ["run", "isolated"])
def test_a_process_with_an_environment_of_its_own_is_simulated(tmp_path: Path, start: str) -> None:
    _is_simulated(tmp_path, start)


@pytest.mark.whole
@pytest.mark.parametrize("start", STARTS)
def test_however_a_process_is_started_it_is_simulated(tmp_path: Path, start: str) -> None:
    _is_simulated(tmp_path, start)


def _is_simulated(folder: Path, start: str) -> None:
    (folder / "outer.py").write_text(f"import os, subprocess, sys\n{STARTS[start]}\n")
    done = _dry_run(folder, [sys.executable, "outer.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on cuda" in done.stdout
    assert (folder / "model.pt").read_text() == "kept"


SHELLS = {
    "env": ["env", "PYTHONPATH=.", sys.executable, "train.py"],
    "emptied": ["env", "-i", sys.executable, "train.py"],
    "script": ["sh", "-c", f"export PYTHONPATH=. ; {sys.executable} train.py; true"],
    "isolated": ["sh", "-c", f"{sys.executable} -I train.py; true"],
}
LONG = TRAIN.replace("range(3)", "range(10**9)").replace("    optimizer.step()", "    pass")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux alone has /proc")
@pytest.mark.parametrize("words", SHELLS.values(), ids=SHELLS)
def test_a_process_that_does_not_hear_of_the_dry_run_is_ended(
    tmp_path: Path, words: list[str]
) -> None:
    done = _dry_run(tmp_path, words, LONG)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "it was ended before it trains" in done.stderr
    assert (tmp_path / "model.pt").read_text() == "kept"


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-uI"])
def test_a_python_that_would_ignore_the_dry_run_is_refused(tmp_path: Path, option: str) -> None:
    done = _dry_run(tmp_path, [sys.executable, option, "train.py"])
    assert done.returncode == 2
    assert "would really train" in done.stderr
    assert (tmp_path / "model.pt").read_text() == "kept"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["python", "-I", "a.py", "-E"], ["python", "a.py", "-E"]),
        (["/bin/python3.11", "-uEB", "-m", "x", "-I"], ["/bin/python3.11", "-uB", "-m", "x", "-I"]),
        (["python3", "-Ic", "print(1)", "-S"], ["python3", "-c", "print(1)", "-S"]),
        (["python", "-W", "ignore", "-S", "a"], ["python", "-W", "ignore", "a"]),
        (["python", "-X", "dev", "-WI", "a", "-I"], ["python", "-X", "dev", "-WI", "a", "-I"]),
        (["bash", "-E", "a"], ["bash", "-E", "a"]),
        (["python"], ["python"]),
        (["torchrun", "-I"], ["torchrun", "-I"]),
        ([b"python", b"-I", b"a"], [b"python", b"a"]),
        ([b"python", b"-B", b"-u", b"-c", b"x"], [b"python", b"-B", b"-u", b"-c", b"x"]),
    ],
)
def test_what_isolates_a_python_is_taken_from_its_own_options(words: list, left: list) -> None:
    assert not_isolated(words) == left
