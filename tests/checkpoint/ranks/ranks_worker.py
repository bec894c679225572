"""One rank of test_ranks_save.py: saves with a Checkpointer, on the devices of several processes.

It shares the models and runs of the optimizers' worker, and its arguments. A phase finds what the
ones before it saved.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "optim"))
sys.path.insert(0, str(Path(__file__).parents[2] / "sim"))

from distributed_worker import (
    BACKEND,
    DEVICE,
    NUM_RANKS,
    Run,
    assert_same,
    layers,
    sharded,
    tensor_parallel,
    two_dimensional,
    whole_vectors,
)
from worker_cases import Cases, take_device

import residency
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._disk._system import System
from residency._transfer import lending

PHASE, FOLDER = sys.argv[3], Path(sys.argv[4])
cases = {name: Cases() for name in ("one", "two", "four", "dying", "after")}
one, two, four, dying, after = cases.values()
ACROSS = ((True, False), (False, True))  # from an offloaded run to a plain one, and back
BOTH_WAYS = ((False, False), (True, True), *ACROSS)


# ------------------------------------------------------------------------------- what cases share


def state_of(run: Run) -> dict[str, Any]:
    return {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}


def picture(run: Run) -> dict[str, Any]:
    """Returns copies of all that this rank has: parameters, states, groups and counters."""
    found: dict[str, Any] = {"scheduler": repr(run.scheduler.state_dict())}
    for index, parameter in enumerate(run.parameters):
        found[f"{index}"] = local(parameter)
        for key, value in run.optimizer.state.get(parameter, {}).items():
            found[f"{index}.{key}"] = local(value) if isinstance(value, Tensor) else value
    for name, buffer in run.model.named_buffers():
        found[name] = local(buffer)
    return found


def local(value: Tensor) -> Tensor:
    value = value.to_local() if isinstance(value, DTensor) else value
    return value.detach().cpu().clone()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def scrambled(make_model: Callable[[], nn.Module], *, offload: bool, steps: int = 0) -> Run:
    """A run of other values, which a restore must all replace."""
    run = Run(make_model, offload=offload)
    run.train(range(50, 50 + steps))
    with torch.no_grad():
        for tensor in (*run.model.parameters(), *run.model.buffers()):
            tensor.add_(3)
    return run


def saved_while_training(
    make_model: Callable[[], nn.Module], name: str, ways: tuple[tuple[bool, bool], ...] = BOTH_WAYS
) -> None:
    """Saves a run on its way and restores each save, {plain, offloaded} both ways.

    The run ends at the bits of one that nobody saved, and so do the resumed ones.
    """
    undisturbed = Run(make_model, offload=False)
    undisturbed.train(range(4))
    for saver, reader in ways:
        folder = FOLDER / f"{name}-{NUM_RANKS}-{saver}-{reader}"
        run = Run(make_model, offload=saver)
        expected = {}
        with residency.Checkpointer(folder) as checkpointer:
            for step in range(4):
                if step in (1, 3):
                    expected[step] = picture(run)
                    before = torch.accelerator.memory_allocated()
                    torch.accelerator.reset_peak_memory_stats()
                    checkpointer.save(step, state_of(run))
                    assert torch.accelerator.max_memory_allocated() == before
                run.train([step])
        assert_same(run, undisturbed)
        assert not lending
        resumed = scrambled(make_model, offload=reader, steps=2 * saver)
        with residency.Checkpointer(folder) as checkpointer:
            assert checkpointer.restore(state_of(resumed), step=1) == 1
            assert_equal(picture(resumed), expected[1])
            assert checkpointer.restore(state_of(resumed)) == 3
        assert_equal(picture(resumed), expected[3])
        resumed.train(range(3, 4))
        assert_same(resumed, undisturbed)


def wide() -> nn.Module:
    return sharded(make_layers=whole_vectors)


class Threads:
    """Remembers which threads called a function of torch.distributed."""

    def __init__(self) -> None:
        self.callers: dict[str, set[str]] = {}
        self.savers: set[str] = set()
        save = CheckpointDirectory.save

        def note_and_save(*args: Any, **kwargs: Any) -> Any:
            self.savers.add(threading.current_thread().name)
            return save(*args, **kwargs)

        CheckpointDirectory.save = note_and_save  # type: ignore[method-assign]
        for name in ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier"):
            setattr(dist, name, self._noting(name, getattr(dist, name)))
        for name in ("allreduce", "allgather", "broadcast", "barrier", "_allgather_base", "gather"):
            kind = dist.ProcessGroup
            setattr(kind, name, self._noting(f"group.{name}", getattr(kind, name)))

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.callers.setdefault(name, set()).add(threading.current_thread().name)
            return function(*args, **kwargs)

        return call


def published_files(folder: Path, step: int) -> set[str]:
    return {path.name for path in (folder / f"step-{step:08d}").iterdir()}


# ------------------------------------------------------------------------------------------ FSDP2


@two
def every_save_of_shards_is_its_moment_and_resumes_at_the_same_bits() -> None:
    saved_while_training(sharded, "fsdp")


@four
def replicas_of_shards_come_back_on_all_of_them() -> None:
    saved_while_training(lambda: sharded((2, 2)), "hsdp", ACROSS[:1])
    found = published_files(FOLDER / "hsdp-4-True-False", 3)
    written = {name for name in found if name.startswith("model-")}
    assert written == {f"model-rank-0000{rank}-of-00004.safetensors" for rank in (0, 1)}


@two
def tensor_parallel_parameters_come_back() -> None:
    saved_while_training(tensor_parallel, "tp", ACROSS)


@four
def shards_in_two_dimensions_come_back() -> None:
    saved_while_training(two_dimensional, "two-dimensional", ACROSS[1:])


@one
@two
def runs_are_saved_for_another_number_of_ranks() -> None:
    for offload in (False, True):
        run = Run(wide, offload=offload)
        run.feed(range(3))
        with residency.Checkpointer(FOLDER / f"wide-{NUM_RANKS}-{offload}") as checkpointer:
            checkpointer.save(3, state_of(run))
            run.feed(range(3, 5))


def _restores_from(num_ranks: int, ways: tuple[tuple[bool, bool], ...] = BOTH_WAYS) -> None:
    for saver, reader in ways:
        undisturbed = Run(wide, offload=False)
        undisturbed.feed(range(3))
        resumed = scrambled(wide, offload=reader)
        with (
            residency.Checkpointer(FOLDER / f"wide-{num_ranks}-{saver}") as checkpointer,
            pytest.warns(UserWarning, match="another number of ranks"),
        ):
            checkpointer.restore(state_of(resumed))
        assert_same(resumed, undisturbed)
        for run in (resumed, undisturbed):
            run.feed(range(3, 5))
        assert_same(resumed, undisturbed)


@two
def a_save_of_one_rank_is_restored_on_two() -> None:
    _restores_from(1)


@after
def a_save_of_two_ranks_is_restored_on_one() -> None:
    _restores_from(2)


@four
def a_save_of_two_ranks_is_restored_on_four() -> None:
    _restores_from(2, ACROSS[:1])


@after
def a_save_of_shards_fills_a_model_that_is_whole() -> None:
    whole, expected = whole_vectors(), Run(wide, offload=False)
    expected.feed(range(3))
    with residency.Checkpointer(FOLDER / "wide-2-True") as checkpointer:
        checkpointer.restore({"model": whole}, rng=False)
    for mine, other in zip(whole.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other.full_tensor().cpu())


@one
@two
def a_whole_save_fills_uneven_and_empty_shards() -> None:
    whole, folder = layers(), FOLDER / "whole"
    if PHASE == "one":
        with residency.Checkpointer(folder) as checkpointer:
            checkpointer.save(0, {"model": whole})
        return
    model = scrambled(sharded, offload=False).model
    with residency.Checkpointer(folder) as checkpointer:
        checkpointer.restore({"model": model}, rng=False)
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.full_tensor().cpu(), other.cpu())


# -------------------------------------------------------------------------------------------- DDP


def replicated(broadcast_buffers: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(33, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return DistributedDataParallel(
        nn.Sequential(*layers).to(DEVICE), broadcast_buffers=broadcast_buffers
    )


@two
def what_all_ranks_have_is_written_once() -> None:
    for offload in (False, True):
        folder = FOLDER / f"ddp-{offload}"
        undisturbed, run = (Run(replicated, offload=each) for each in (False, offload))
        undisturbed.train(range(4))
        run.train(range(2))
        with residency.Checkpointer(folder) as checkpointer:
            state = {**state_of(run), "own": torch.tensor([dist.get_rank()])}
            checkpointer.save(2, state)
        owned = {"own-rank-00001-of-00002.safetensors", "rng-rank-00001-of-00002.safetensors"}
        assert {name for name in published_files(folder, 2) if "-rank-00001" in name} == owned
        resumed = scrambled(replicated, offload=not offload)
        state = {**state_of(resumed), "own": torch.tensor([-1])}
        with residency.Checkpointer(folder) as checkpointer:
            checkpointer.restore(state)
        assert state["own"].item() == dist.get_rank()
        resumed.train(range(2, 4))
        assert_same(resumed, undisturbed)
        for mine, other in zip(resumed.model.buffers(), undisturbed.model.buffers(), strict=True):
            assert torch.equal(mine.cpu(), other.cpu())


@two
def buffers_that_ranks_do_not_share_are_written_by_each() -> None:
    run = Run(lambda: replicated(False), offload=False)
    run.train(range(2))
    expected = picture(run)
    means: list[Any] = [None, None]
    dist.all_gather_object(means, expected["module.1.running_mean"].tolist())
    assert means[0] != means[1], "the ranks have the same buffers; the case shows nothing"
    with residency.Checkpointer(FOLDER / "ddp-apart") as checkpointer:
        checkpointer.save(2, state_of(run))
        resumed = scrambled(lambda: replicated(False), offload=False)
        checkpointer.restore(state_of(resumed))
    assert_equal(picture(resumed), expected)


@after
def a_save_of_replicas_fills_a_model_that_is_not_wrapped() -> None:
    def plain() -> nn.Module:
        return replicated().module

    resumed = scrambled(plain, offload=False)
    state = {**state_of(resumed), "own": torch.tensor([-1])}
    with (
        residency.Checkpointer(FOLDER / "ddp-True") as checkpointer,
        pytest.warns(UserWarning, match="another number of ranks"),
    ):
        checkpointer.restore(state)
    assert state["own"].item() == 0
    assert resumed.scheduler.last_epoch == 2


# ----------------------------------------------------------------------------- each rank's own part


@two
def every_rank_has_its_own_random_numbers_back() -> None:
    torch.manual_seed(7 + dist.get_rank())
    torch.rand(3)
    with residency.Checkpointer(FOLDER / "rng") as checkpointer:
        checkpointer.save(0, {"step": 0})
        expected = torch.rand(5), torch.rand(5, device=DEVICE).cpu()
        checkpointer.restore({"step": 0})
        found = torch.rand(5), torch.rand(5, device=DEVICE).cpu()
    assert all(map(torch.equal, found, expected))
    drawn: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(drawn, expected[0].tolist())
    assert drawn[0] != drawn[1]


@two
def a_partial_sum_is_refused_on_every_rank_and_the_next_save_works() -> None:
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (NUM_RANKS,))
    value = DTensor.from_local(torch.ones(3, device=DEVICE), mesh, [Partial()])
    with residency.Checkpointer(FOLDER / "partial") as checkpointer:
        with pytest.raises(residency.RefusedError, match="x is a DTensor with partial sums"):
            checkpointer.save(0, {"x": value})
        checkpointer.save(1, {"x": value.redistribute(placements=[dist.tensor.Replicate()])})
    assert checkpointer.steps() == [1]


# --------------------------------------------------------------------------------- read by others


@two
def stock_and_own_readers_of_dcp_read_every_tensor() -> None:
    from residency.integrations.dcp import ResidencyStorageReader

    for make_model, name in ((sharded, "fsdp"), (tensor_parallel, "tp")):
        run = Run(make_model, offload=False)
        run.train(range(3))
        folder = FOLDER / f"{name}-2-True-False" / "step-00000003"
        expected = tensors_of(run)
        for reader in (dcp.HuggingFaceStorageReader(str(folder)), ResidencyStorageReader(folder)):
            found = tensors_of(run)
            for tensor in flat(found):
                tensor.detach().zero_()
            dcp.load(found, storage_reader=reader)
            for mine, other in zip(flat(found), flat(expected), strict=True):
                assert torch.equal(local(mine), local(other))


def tensors_of(run: Run) -> dict[str, Any]:
    """Returns copies of what the state dicts of torch's own functions hold, as DCP names it."""
    states = get_optimizer_state_dict(run.model, run.optimizer)["state"]
    return {
        "model": {n: v.clone() for n, v in get_model_state_dict(run.model).items()},
        "optimizer": {
            "state": {n: {k: v.clone() for k, v in s.items()} for n, s in states.items()}
        },
    }


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value.values() for t in flat(v)]


# --------------------------------------------------------------------------------------- failures


@two
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


@two
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


@two
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


@two
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
                failed._done.wait()
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


def main(own_rank: int) -> None:
    global threads
    torch.set_num_threads(1)
    take_device("1GiB", schedule="late", check_races=True)
    threads = Threads()
    store = dist.FileStore(str(FOLDER / f"store-{PHASE}"), NUM_RANKS)
    dist.init_process_group(
        f"cpu:gloo,{DEVICE}:{BACKEND}", store=store, rank=own_rank, world_size=NUM_RANKS
    )
    cases[PHASE].run(FOLDER / f"{PHASE}{own_rank}.json")
    if PHASE == "dying":
        os._exit(0)  # a group with a dead rank cannot be taken down
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
