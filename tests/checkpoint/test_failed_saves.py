"""A failure of a save is told once, to whoever asks first, and the next save works."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch

import residency
from residency._checkpoint._disk._publish import CheckpointDirectory


@pytest.fixture
def failing_writer(monkeypatch):
    """Lets the writes of the steps in the list that it returns fail."""
    steps: list[int] = []
    save = CheckpointDirectory.save

    def fail_or_save(self, request, **kwargs):
        if request.step in steps:
            raise OSError(28, "No space left on device")
        return save(self, request, **kwargs)

    monkeypatch.setattr(CheckpointDirectory, "save", fail_or_save)
    return steps


def test_a_failure_is_told_by_the_next_save_once_and_the_one_after_works(
    lab, tmp_path, failing_writer
):
    run = lab.run(offload=True)
    run.step()
    expected = run.copy()
    failing_writer.append(1)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, run.state).wait()
        checkpointer.save(1, run.state)
        checkpointer._background.drain()
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save(2, run.state)
        lab.same(run.copy(), expected)
        checkpointer.save(3, run.state)
        checkpointer.wait()
    assert checkpointer.steps() == [0, 3]


@pytest.mark.parametrize("where", ["save.wait", "wait", "close", "with"])
def test_a_failure_is_told_wherever_somebody_asks_first(lab, tmp_path, failing_writer, where):
    run = lab.run(offload=False)
    failing_writer.append(0)
    checkpointer = residency.Checkpointer(tmp_path)
    save = checkpointer.save(0, run.state)
    ask = {
        "save.wait": save.wait,
        "wait": checkpointer.wait,
        "close": checkpointer.close,
        "with": lambda: checkpointer.__exit__(None, None, None),
    }[where]
    with pytest.raises(OSError, match="No space left"):
        ask()
    assert "failed" in repr(save)
    checkpointer.close()


def test_the_error_of_a_failed_save_keeps_nothing_of_the_state(lab, tmp_path, monkeypatch):
    held = []

    def fail(self, request, **kwargs):
        on_the_host = torch.zeros(1000)  # as a writer has, in frames that the error remembers
        held.append(weakref.ref(on_the_host))
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            inner = torch.zeros(1000)
            held.append(weakref.ref(inner))
            raise RuntimeError("the save cannot be written") from error

    monkeypatch.setattr(CheckpointDirectory, "save", fail)
    checkpointer = residency.Checkpointer(tmp_path)
    save = checkpointer.save(0, lab.run(offload=False).state)
    checkpointer._background.drain()
    assert save.is_done()
    assert [reference() for reference in held] == [None, None]
    with pytest.raises(RuntimeError, match="cannot be written"):
        checkpointer.close()


def test_an_error_of_the_body_is_not_hidden_by_a_failed_save(lab, tmp_path, failing_writer):
    run = lab.run(offload=False)
    failing_writer.append(0)

    def train():
        with residency.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(0, run.state)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        train()
    assert any("No space left" in note for note in caught.value.__notes__)


def test_a_failure_that_nobody_was_told_ends_the_process_with_an_error(tmp_path):
    script = textwrap.dedent(
        """
        import sys, torch, residency
        from residency._checkpoint._disk._publish import CheckpointDirectory
        def fail(self, request, **kwargs):
            raise OSError(28, "No space left on device")
        if "fail" in sys.argv:
            CheckpointDirectory.save = fail
        model = torch.nn.Linear(3, 3)
        residency.Checkpointer(sys.argv[1]).save(5, {"model": model})
        print("trained", end="")
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(residency.__file__).parents[1])}

    def run(*arguments):
        command = [sys.executable, "-c", script, str(tmp_path), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    failed = run("fail")
    assert failed.returncode == 1
    assert failed.stdout == "trained"
    assert "the save of step 5" in failed.stderr
    assert "No space left on device" in failed.stderr
    passed = run()
    assert (passed.returncode, passed.stdout, passed.stderr) == (0, "trained", "")
    assert residency.Checkpointer(tmp_path).steps() == [5]
