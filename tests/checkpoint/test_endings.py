"""Saves while the process ends are made, or refused; none is lost with status 0, and none hangs.

``tests/torture/test_signals.py`` does the same in random orders.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from limits import WORKER_SECONDS

import residency

PROGRAM = """
    import atexit, sys, threading
    early = []  # is called after all exit handlers of what is imported below
    atexit.register(lambda: [call() for call in early])
    import torch, residency
    from residency._checkpoint._disk._publish import CheckpointDirectory
    folder, fails = sys.argv[1], "fails" in sys.argv
    used, unused, last, closed = (
        residency.Checkpointer(f"{folder}/{name}") for name in ("used", "unused", "last", "closed")
    )
    def fail(self, request, **kwargs):
        raise OSError(28, "No space left on device")
    def outlive():
        threading.main_thread().join()
        if fails:
            CheckpointDirectory.save = fail
        used.save(2, {"x": torch.ones(9)}).wait() if not fails else used.save(2, {"x": 1})
    def refused():
        try:
            closed.save(2, {"x": 1})
        except residency.RefusedError as error:
            print("refused:", error)
    used.save(1, {"x": torch.ones(9)})
    closed.save(1, {"x": torch.ones(9)})
    threading.Thread(target=outlive).start()
    if not fails:
        atexit.register(lambda: used.save(3, {"x": torch.ones(9)}))
        atexit.register(lambda: unused.save(1, {"x": torch.ones(9)}).wait())
    atexit.register(refused)
    atexit.register(closed.close)
    class Late:
        def __init__(self):
            self.used = used
        def __del__(self):
            try:
                self.used.save(9, {"x": 1})
            except Exception as error:
                print("too late:", error)
            self.used.close()
    late = Late()
    early.append(lambda: last.save(1, {"x": torch.ones(9)}))
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(residency.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS,
        check=False,
    )


def test_saves_of_exit_handlers_and_of_threads_that_outlive_the_main_one_are_made(tmp_path):
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    assert "refused: this checkpointer" in ended.stdout
    assert "too late: save was called while Python takes its modules apart" in ended.stdout
    expected = {"used": [1, 2, 3], "unused": [1], "last": [1], "closed": [1]}
    for name, steps in expected.items():
        checkpointer = residency.Checkpointer(tmp_path / name)
        assert checkpointer.steps() == steps, name
        found = {"x": torch.zeros(9)}
        checkpointer.restore(found)
        assert bool((found["x"] == 1).all())


def test_a_save_that_fails_while_the_process_ends_ends_it_with_an_error(tmp_path):
    ended = run(tmp_path, "fails")
    assert ended.returncode == 1
    assert "the save of step 2" in ended.stderr
    assert "No space left on device" in ended.stderr
    assert residency.Checkpointer(tmp_path / "used").steps() == [1]


@pytest.mark.parametrize("has_told", [False, True])
def test_a_failure_after_the_last_word_of_the_process_is_raised_by_the_save(
    tmp_path, monkeypatch, has_told
):
    from residency._checkpoint import _background, _save
    from residency._checkpoint._disk._publish import CheckpointDirectory

    def fail(self, request, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_save._exit, "has_told", has_told)
    monkeypatch.setattr(_background._interpreter, "is_ending", True)
    monkeypatch.setattr(CheckpointDirectory, "save", fail)
    checkpointer = residency.Checkpointer(tmp_path)
    if has_told:
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save(1, {"x": 1})
        checkpointer.close()
        return
    save = checkpointer.save(1, {"x": 1})
    assert "failed" in repr(save)
    with pytest.raises(OSError, match="No space left"):
        checkpointer.close()
