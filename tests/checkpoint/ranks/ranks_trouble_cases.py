"""Saves and restores that fail on some of the ranks, and a rank that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_lab import (
    DEVICE,
    NUM_RANKS,
    Run,
    sharded,
)
from ranks_lab import (
    FOLDER,
    after,
    assert_equal,
    dying,
    picture,
    scrambled,
    state_of,
    threads,
    two,
    waiting,
)

import residency
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._disk._system import System
from residency._transfer import lending

# --------------------------------------------------------------------------------------- failures


@waiting
def a_rank_that_cannot_begin_fails_the_save_for_all_and_the_next_one_works() -> None:
    for rank in range(NUM_RANKS):
        folder = FOLDER / f"cannot-begin-{rank}"
        state = {
            "x": torch.ones(3, device=DEVICE),
            "bad": object() if dist.get_rank() == rank else 1,
        }
        with residency.Checkpointer(folder, timeout_seconds=60) as checkpointer:
            checkpointer.save(0, {"x": state["x"]}).wait()
            if dist.get_rank() == rank:
                with pytest.raises(residency.RefusedError, match="bad is a builtins"):
                    checkpointer.save(1, state)
            else:
                save = checkpointer.save(1, state)
                with pytest.raises(residency.CheckpointError, match=f"rank {rank} failed to save"):
                    save.wait()
            checkpointer.save(2, {"x": state["x"]}).wait()
            assert checkpointer.steps() == [0, 2]
            dist.barrier()
            assert [each.name for each in folder.glob(".saving-*")] == []


@waiting
def a_rank_that_left_a_save_out_agrees_when_the_step_is_saved_again() -> None:
    x = {"x": torch.ones(3, device=DEVICE)}
    for absent in range(NUM_RANKS):
        folder = FOLDER / f"left-out-{absent}"
        with residency.Checkpointer(folder, timeout_seconds=1) as checkpointer:
            checkpointer.save(1, x).wait()
            if dist.get_rank() != absent:
                with pytest.raises(residency.CheckpointError, match="within 1 s"):
                    checkpointer.save(2, x).wait()
            dist.barrier()
            checkpointer._timeout_seconds = 60  # the ranks are in step from here on
            for step in (2, 2, 3):
                checkpointer.save(step, x).wait()
            assert checkpointer.steps() == [1, 2, 3]
            dist.barrier()
        dist.barrier()
        assert not list(folder.glob(".saving-*"))


@waiting
def a_step_that_one_rank_refused_is_saved_again_at_once_by_all() -> None:
    x = torch.ones(3, device=DEVICE)
    for refusing in range(NUM_RANKS):
        is_mine = dist.get_rank() == refusing
        with residency.Checkpointer(FOLDER / f"again-{refusing}", timeout_seconds=40) as saver:
            if is_mine:
                with pytest.raises(residency.RefusedError, match="bad is a builtins"):
                    saver.save(1, {"x": x, "bad": object()})
                again = saver.save(1, {"x": x})
            else:
                saver.save(1, {"x": x})
                with pytest.raises(residency.CheckpointError, match="bad is a builtins"):
                    saver.save(1, {"x": x})  # is begun all the same
                saver.wait()
            if is_mine:
                again.wait()
            assert saver.steps() == [1]
            dist.barrier()


@waiting
def a_failure_that_ranks_are_told_of_at_different_calls_leaves_them_in_step() -> None:
    save = CheckpointDirectory.save

    def fail_once(self: CheckpointDirectory, request: Any, **kwargs: Any) -> Any:
        if request.step == 1 and request.rank == 1:
            self.give_up(request, OSError("the disk is gone"))
            raise OSError("the disk is gone")
        return save(self, request, **kwargs)

    CheckpointDirectory.save = fail_once  # type: ignore[method-assign]
    try:
        x = {"x": torch.ones(3, device=DEVICE)}
        folder = FOLDER / "told-apart"
        with residency.Checkpointer(folder, max_in_flight=2, timeout_seconds=60) as checkpointer:
            failed = checkpointer.save(1, x)
            if dist.get_rank() == 0:
                with pytest.raises(residency.CheckpointError, match="the disk is gone"):
                    failed.wait()
                checkpointer.save(2, x)
            else:
                failed._outcome.wait()
                with pytest.raises(OSError, match="the disk is gone"):
                    checkpointer.save(2, x)
            checkpointer.save(3, x)
            checkpointer.wait()
            assert checkpointer.steps() == [2, 3]
            dist.barrier()
    finally:
        CheckpointDirectory.save = save  # type: ignore[method-assign]


@two
def damage_that_one_rank_finds_takes_all_ranks_to_the_save_before() -> None:
    folder = FOLDER / "damaged"
    run = Run(sharded, offload=True)
    with residency.Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            run.train([step])
            checkpointer.save(step, state_of(run)).wait()
            if step == 1:
                expected = picture(run)
        dist.barrier()
        if dist.get_rank() == 0:
            flip(folder / "step-00000002" / "optimizer-rank-00001-of-00002.safetensors")
        dist.barrier()
        with pytest.warns(UserWarning, match=r"optimizer-rank-00001.* is tried"):
            assert checkpointer.restore(state_of(run)) == 1
        assert_equal(picture(run), expected)
        with pytest.raises(residency.CorruptSaveError, match="rank-00001") as caught:
            checkpointer.restore(state_of(run), step=2)
        assert caught.value.tensor.startswith("optimizer.state.")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@two
def a_state_that_does_not_fit_one_rank_changes_nothing_on_the_others() -> None:
    x = torch.ones(3, device=DEVICE)
    with residency.Checkpointer(FOLDER / "misfit") as checkpointer:
        checkpointer.save(0, {"x": x}).wait()
        x.zero_()
        if dist.get_rank() == 1:
            with pytest.raises(residency.RefusedError, match="does not fit"):
                checkpointer.restore({"x": torch.ones(4, device=DEVICE)})
        else:
            with pytest.raises(residency.CheckpointError, match="rank 1 could not restore step 0"):
                checkpointer.restore({"x": x})
        assert not x.any()


@two
def ranks_that_ask_for_different_saves_are_refused_by_both_steps() -> None:
    x = torch.ones(3, device=DEVICE)
    with residency.Checkpointer(FOLDER / "asked") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": x}).wait()
        x.zero_()
        asked = 1 + dist.get_rank()
        with pytest.raises(residency.ResidencyError, match="restores step 2, and rank 0 step 1"):
            checkpointer.restore({"x": x}, step=asked)
        assert not x.any()
        with pytest.raises(residency.ResidencyError, match="step"):
            checkpointer.restore({"x": x}, step=None if dist.get_rank() else 1)
        assert not x.any()
        assert checkpointer.restore({"x": x}, step=2) == 2
        assert x.all()


@two
def a_rank_that_makes_a_checkpointer_or_restores_alone_names_the_other() -> None:
    folder, x = FOLDER / "alone", {"x": torch.ones(3, device=DEVICE)}
    is_first = dist.get_rank() == 0
    if is_first:
        with pytest.raises(residency.CheckpointError, match=r"of 2 ranks, 1 did not come to make"):
            residency.Checkpointer(folder, timeout_seconds=0.1)
    dist.barrier()
    with residency.Checkpointer(folder, timeout_seconds=60) as checkpointer:
        checkpointer.save(1, x).wait()
        if is_first:
            checkpointer._ranks._timeout_seconds = 0.1
            with pytest.raises(residency.CheckpointError, match=r"1 did not come to restore with"):
                checkpointer.restore(x)
            checkpointer._ranks._timeout_seconds = 60
        dist.barrier()
        x["x"].zero_()
        assert checkpointer.restore(x) == 1
        assert x["x"].all()


@two
def no_thread_of_a_save_speaks_to_other_ranks() -> None:
    calls = threads.callers
    assert any(name.startswith("group.") for name in calls), calls
    callers = set().union(*calls.values())
    assert "MainThread" in callers
    # Backward passes have a thread of torch's own.
    assert not [name for name in callers if name.startswith("residency")], calls
    assert {name.split("_")[0] for name in threads.savers} == {"residency-save"}


# -------------------------------------------------------------------- a rank that is really killed


@dying
def a_rank_that_is_killed_in_a_save_leaves_the_one_before_and_an_error() -> None:
    run = Run(sharded, offload=True)
    checkpointer = residency.Checkpointer(FOLDER / "killed", timeout_seconds=2.0)
    run.train([0])
    checkpointer.save(0, state_of(run)).wait()
    run.train([1])
    dist.barrier()
    if dist.get_rank() == 1:
        System.fsync = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with pytest.raises(residency.CheckpointError, match=r"of 2 ranks, 1 did not report within 2 s"):
        checkpointer.save(1, state_of(run)).wait()
    assert checkpointer.steps() == [0]
    assert not lending


@after
def a_new_job_finds_the_save_before_and_saves_on() -> None:
    folder = FOLDER / "killed"
    assert any(path.name.startswith(".saving-") for path in folder.iterdir())
    run = scrambled(sharded, offload=False)
    with residency.Checkpointer(folder) as checkpointer:
        with pytest.warns(UserWarning, match="another number of ranks"):
            assert checkpointer.restore(state_of(run)) == 0
        run.train([1])
        checkpointer.save(1, state_of(run)).wait()
        assert checkpointer.steps() == [0, 1]
        assert not [path for path in folder.iterdir() if path.name.startswith(".saving-")]
