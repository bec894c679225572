"""Whatever breaks in a save or a restore: a clear error, training as it was, and a next save that
works, with nothing lent or pinned meanwhile.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import threading
import weakref

import pytest
import torch
from limits import WORKER_SECONDS
from torch import nn

import residency
from residency import CheckpointError, CorruptSaveError, RefusedError
from residency._checkpoint._capture import _capture
from residency._checkpoint._capture._capture import Held
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._disk._system import System
from residency._checkpoint._job import Job

FORKING = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # Python 3.12's


@pytest.fixture
def run(lab):
    """An offloaded run, so that a save borrows its states."""
    made = lab.run(offload=True)
    made.step()
    return made


@pytest.fixture
def goes_on(lab, run, no_loans, pinned_bytes):
    """Demands that nothing changed, and that the next save and its restore work."""
    expected = run.copy()

    def check(checkpointer):
        lab.same(run.copy(), expected)
        assert no_loans()
        checkpointer.save(90, run.state).wait()
        pinned = pinned_bytes()
        run.step()
        checkpointer.save(91, run.state).wait()
        assert pinned_bytes() == pinned
        assert no_loans()
        assert checkpointer.restore(run.state, step=90) == 90
        lab.same(run.copy(), expected)
        assert not [p for p in checkpointer._directory.path.iterdir() if "saving" in p.name]

    return check


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, SystemExit, KeyboardInterrupt])
def test_a_thread_that_dies_while_it_waits_for_bytes_fails_one_save(
    tmp_path, run, goes_on, monkeypatch, kind
):
    def die(self):
        raise kind("died")

    with residency.Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(Held, "acquire", die)
            with pytest.raises(CheckpointError, match="died"):
                checkpointer.save(0, run.state).wait()
        assert checkpointer.steps() == []
        goes_on(checkpointer)


def test_an_error_that_is_kept_keeps_nothing_of_the_state(tmp_path, lab, monkeypatch):
    def die(self):
        raise RuntimeError("died")

    monkeypatch.setattr(Held, "acquire", die)
    value = torch.ones(100)
    kept = weakref.ref(value.untyped_storage())
    with residency.Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(0, {"x": value, "y": torch.ones(3, device=lab.device)})
        with pytest.raises(CheckpointError, match="died") as caught:
            save.wait()
        assert caught.value.__cause__ is not None
        del value
        assert kept() is None


def test_a_save_that_is_over_keeps_no_home_of_an_optimizer(
    tmp_path, run, pinned_bytes, monkeypatch
):
    finish = Job.finish
    is_looked_at = threading.Event()

    def finish_and_linger(self):
        finish(self)  # who waits for the save goes on from here
        is_looked_at.wait(WORKER_SECONDS)

    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"model": run.model}).wait()
        without_state = pinned_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(Job, "finish", finish_and_linger)
            try:
                checkpointer.save(1, run.state).wait()
                residency.onload_optimizer(run.optimizer)
                gc.collect()
                num_bytes = pinned_bytes()
            finally:
                is_looked_at.set()
        assert num_bytes <= without_state - 2 * sum(p.nbytes for p in run.model.parameters())


def test_a_count_of_bytes_that_fails_is_logged_and_the_save_goes_on(
    tmp_path, run, goes_on, monkeypatch, caplog
):
    monkeypatch.setattr(Job, "count", lambda self, num_bytes: 1 // 0)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, run.state).wait()
        assert "progress callback of a save failed" in caplog.text
        goes_on(checkpointer)


@pytest.mark.parametrize("call", ["fallocate", "pwritev", "fsync", "rename", "mkdir"])
def test_a_disk_that_fills_up_or_breaks_in_a_save_fails_that_one(
    tmp_path, run, goes_on, monkeypatch, call
):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, run.state).wait()
        with monkeypatch.context() as patch:
            patch.setattr(System, call, full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                checkpointer.save(1, run.state).wait()
        assert checkpointer.steps() == [0]
        goes_on(checkpointer)


def test_a_disk_without_room_is_known_before_a_save_begins(tmp_path, run, goes_on, monkeypatch):
    with residency.Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(System, "room_bytes", lambda *_: 3 * 512)
            with pytest.raises(RefusedError, match=r"1\.50 KiB left .* 1536 of \d+ bytes"):
                checkpointer.save(0, run.state)
        goes_on(checkpointer)


def test_a_directory_that_cannot_be_written_any_more_is_refused(
    tmp_path, run, goes_on, monkeypatch
):
    def read_only(*arguments):
        raise OSError(errno.EROFS, "Read-only file system")

    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, run.state).wait()
        with monkeypatch.context() as patch:
            patch.setattr(System, "open", read_only)
            with pytest.raises(RefusedError, match="Read-only file system"):
                checkpointer.save(1, run.state)
        goes_on(checkpointer)


def test_a_directory_that_was_removed_is_made_again_and_is_locked(tmp_path, run, goes_on):
    folder = tmp_path / "saves"
    with residency.Checkpointer(folder) as checkpointer:
        checkpointer.save(0, run.state).wait()
        shutil.rmtree(folder)
        checkpointer.save(1, run.state).wait()
        assert checkpointer.steps() == [1]
        with pytest.raises(RefusedError, match=str(os.getpid())):
            residency.Checkpointer(folder).save(2, run.state)
        goes_on(checkpointer)


def test_a_directory_that_became_a_file_is_refused_until_it_is_one_again(tmp_path, run, goes_on):
    folder = tmp_path / "saves"
    with residency.Checkpointer(folder) as checkpointer:
        checkpointer.save(0, run.state).wait()
        shutil.rmtree(folder)
        folder.write_text("mine")
        with pytest.raises(RefusedError, match="saves"):
            checkpointer.save(1, run.state)
        with pytest.raises(RefusedError, match="is a file"):
            checkpointer.restore(run.state)
        assert folder.read_text() == "mine"
        folder.unlink()
        goes_on(checkpointer)


def test_a_save_of_another_model_is_refused_with_nothing_changed(tmp_path, run, goes_on, lab):
    other = nn.Sequential(nn.Linear(16, 41), nn.Tanh()).to(lab.device)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {**run.state, "model": other})
        with pytest.raises(RefusedError, match=r"(?s)does not fit.*model\.3\.bias.*model\.0\.bias"):
            checkpointer.restore(run.state)
        goes_on(checkpointer)


def flip(file, offset):
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_a_damaged_save_is_named_and_the_newest_whole_one_is_taken(tmp_path, lab, no_loans):
    run = lab.run(offload=True)
    expected = {}
    with residency.Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            run.step()
            expected[step] = run.copy()
            checkpointer.save(step, run.state).wait()
        flip(tmp_path / "step-00000002" / "model.safetensors", -1)
        with pytest.raises(CorruptSaveError, match=r"model\.safetensors") as caught:
            checkpointer.restore(run.state, step=2)
        size = (tmp_path / "step-00000002" / "model.safetensors").stat().st_size
        assert caught.value.file == "model.safetensors"
        assert caught.value.tensor.startswith("model.")
        assert 0 <= caught.value.offset < size
        with pytest.warns(UserWarning, match=r"model\.safetensors.*An older save is tried"):
            assert checkpointer.restore(run.state) == 1
        lab.same(run.copy(), expected[1])
        (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
        flip(tmp_path / "step-00000000" / "optimizer.safetensors", -1)
        with (
            pytest.warns(UserWarning, match="An older save is tried"),
            pytest.raises(CorruptSaveError),
        ):
            checkpointer.restore(run.state)
        assert no_loans()
        run.step()
        checkpointer.save(3, run.state).wait()
        latest = run.copy()
        run.step()
        assert checkpointer.restore(run.state) == 3
        lab.same(run.copy(), latest)


@pytest.mark.parametrize("where", ["before", "copies", "after"])
def test_an_interrupt_in_a_save_leaves_nothing_behind(tmp_path, run, goes_on, monkeypatch, where):
    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    module, name = {
        "before": (_capture, "describe"),
        "copies": (_capture, "_copy_group"),
        "after": (CheckpointDirectory, "check_writable"),
    }[where]
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(run.state)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(0, run.state)
        goes_on(checkpointer)


def test_closing_twice_and_using_what_is_closed(tmp_path, run):
    checkpointer = residency.Checkpointer(tmp_path)
    checkpointer.save(0, run.state)
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.steps() == [0]
    for use in (lambda: checkpointer.save(1, run.state), lambda: checkpointer.restore(run.state)):
        with pytest.raises(RefusedError, match="closed"):
            use()


def test_a_checkpointer_that_nobody_closed_ends_its_save_and_leaves_nothing(
    tmp_path, run, no_loans, pinned_bytes, lab
):
    before, num_threads = pinned_bytes(), threading.active_count()
    expected = run.copy()
    save = residency.Checkpointer(tmp_path).save(0, run.state)
    save.wait()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("residency-save"):
            thread.join(20)
    assert threading.active_count() <= num_threads
    assert pinned_bytes() <= before + run.optimizer.statistics().pinned_bytes
    assert no_loans()
    with residency.Checkpointer(tmp_path) as checkpointer:  # the lock is free
        run.step()
        assert checkpointer.restore(run.state) == 0
        lab.same(run.copy(), expected)
        checkpointer.save(1, run.state)


class Numbers(torch.utils.data.Dataset):
    """Has the checkpointer of its parent, as a dataset that keeps its trainer has."""

    def __init__(self, checkpointer):
        self.checkpointer = checkpointer

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with pytest.raises(RefusedError, match="from which this one was forked"):
            self.checkpointer.save(9, {"x": 1})
        self.checkpointer.close()
        return index


@FORKING
def test_workers_that_are_forked_in_a_save_leave_it_alone(
    tmp_path, run, goes_on, held_writer, monkeypatch
):
    with residency.Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(0, run.state)
        loader = torch.utils.data.DataLoader(
            Numbers(checkpointer), num_workers=2, multiprocessing_context="fork"
        )
        assert [int(each) for each in loader] == [0, 1, 2, 3]
        with pytest.raises(RefusedError, match="being written"):
            residency.Checkpointer(tmp_path).save(1, {"x": 1})
        held_writer.set()
        save.wait()
        goes_on(checkpointer)


@FORKING
def test_a_forked_process_waits_for_no_loan_of_its_parent(tmp_path, run, held_writer):
    from residency._transfer import lending

    with residency.Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(0, run.state)
        assert lending
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a wait would last for good
            lending.wait_until(lambda: not lending)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        held_writer.set()
        save.wait()


def test_what_dead_writers_left_goes_at_the_first_save_and_other_files_stay(tmp_path, run):
    (tmp_path / ".saving-00000007-dead-1").mkdir()
    (tmp_path / ".saving-00000007-dead-1" / ".writers").touch()
    (tmp_path / ".saving-00000007-dead-1" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "step-00000003").mkdir()  # without a manifest it is no save
    (tmp_path / "notes.txt").write_text("mine")
    checkpointer = residency.Checkpointer(tmp_path, keep=1)
    assert checkpointer.steps() == []
    assert (tmp_path / ".saving-00000007-dead-1").is_dir()
    with checkpointer:
        checkpointer.save(8, run.state).wait()
        assert checkpointer.steps() == [8]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "latest", "notes.txt", "step-00000003", "step-00000008"}


def test_a_save_of_a_lower_step_stays_and_one_of_the_same_step_is_replaced(tmp_path, lab):
    model = nn.Linear(2, 2).to(lab.device)
    state = {"model": model}
    with residency.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(5, state)
        checkpointer.save(3, state)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 5]
        with torch.no_grad():
            model.weight.fill_(7)
        checkpointer.save(5, state)
        checkpointer.wait()
        assert checkpointer.steps() == [5]
        with torch.no_grad():
            model.weight.zero_()
        assert checkpointer.restore(state, step=5) == 5
        assert model.weight.eq(7).all()
        with pytest.raises(RefusedError, match=r"no save of step 4; it has \[5\]"):
            checkpointer.restore(state, step=4)


def test_a_failed_save_removes_none_of_those_that_a_retention_would(tmp_path, run, monkeypatch):
    def fail(self, request, **settings):
        raise CheckpointError("no")

    with residency.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(0, run.state).wait()
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "save", fail)
            with pytest.raises(CheckpointError):
                checkpointer.save(1, run.state).wait()
        assert checkpointer.steps() == [0]
        checkpointer.save(2, run.state)
        checkpointer.wait()
        assert checkpointer.steps() == [2]
