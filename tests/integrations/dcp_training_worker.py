"""One rank of test_dcp_training_ranks.py: FSDP2 models through the parts for DCP and for XTuner."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

import xtuner_published
from dcp_training import AppState, Run, layers, picture
from same_values import assert_same
from worker_cases import Cases, GatedWriter, allocated_peak

from residency import RefusedError, sim
from residency.integrations.dcp import (
    PinnedStager,
    ResidencyStorageReader,
    ResidencyStorageWriter,
    TrainState,
    TrainStatePlanner,
)

NUM_RANKS, PHASE = int(sys.argv[2]), sys.argv[3]
FOLDER = Path(sys.argv[4])
cases = {name: Cases() for name in ("one", "two", "back")}
one, two, back = cases.values()
ENDS = [(True, True), (True, False), (False, True)]


def sharded(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("sim", (NUM_RANKS,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def made(name: str = "AdamW", *, offload: bool, **settings: Any) -> Run:
    return Run("sim", name, offload=offload, shard=sharded, **settings)


def resumes(folder: Path, name: str, offload: bool) -> None:
    """Resumes what was saved after three steps, and compares after five."""
    expected = made(name, offload=False)
    expected.train(range(5))
    run = made(name, offload=offload)
    dcp.load({"app": run.state}, checkpoint_id=folder)
    assert run.state.counters == {"step": 3}
    assert run.optimizer.param_groups[1]["count"] == 3
    assert run.scheduler.last_epoch == 3
    assert run.optimizer.param_groups[0]["lr"] == expected.scheduler.base_lrs[0] * 0.9**3
    run.train(range(3, 5))
    assert_same(picture(run), picture(expected))


@one
@two
def a_resumed_run_ends_at_the_bits_of_an_uninterrupted_one() -> None:
    for name in ("AdamW", "SGD", "NAdam"):
        for source, target in ENDS:
            folder = FOLDER / f"{NUM_RANKS}-{name}-{source}-{target}"
            run = made(name, offload=source)
            run.train(range(3))
            state = {"app": run.state}
            assert allocated_peak(lambda s=state, f=folder: dcp.save(s, checkpoint_id=f)) == 0
            resumes(folder, name, target)


@two
def checkpoints_of_one_rank_are_resumed_on_two() -> None:
    for source, target in ENDS:
        resumes(FOLDER / f"1-AdamW-{source}-{target}", "AdamW", target)


@back
def checkpoints_of_two_ranks_are_resumed_on_one() -> None:
    for source, target in ENDS:
        resumes(FOLDER / f"2-AdamW-{source}-{target}", "AdamW", target)


@one
@two
def an_asynchronous_save_is_that_of_its_call() -> None:
    for offload in (True, False):
        folder = FOLDER / f"{NUM_RANKS}-asynchronous-{offload}"
        with PinnedStager() as stager:
            run = made(offload=offload)
            run.train(range(3))
            writer = GatedWriter(folder)
            saving = dcp.async_save({"app": run.state}, storage_writer=writer, async_stager=stager)
            run.train(range(3, 5))
            writer.may_write.set()
            saving.upload_completion.result(timeout=60)
            pinned = stager.pinned_bytes
            for number in range(2):
                again = FOLDER / f"{folder.name}-{number}"

                def save(again: Path = again, run: Run = run, by: PinnedStager = stager) -> None:
                    state = {"app": run.state}
                    saving = dcp.async_save(state, checkpoint_id=again, async_stager=by)
                    saving.upload_completion.result(timeout=60)

                assert allocated_peak(save) == 0
                assert stager.pinned_bytes == pinned
        resumes(folder, "AdamW", True)


@two
def shards_go_through_this_librarys_format() -> None:
    path = FOLDER / "step-00000003"
    run = made(offload=True)
    run.train(range(3))
    dcp.save({"app": run.state}, storage_writer=ResidencyStorageWriter(path))
    other = made(offload=True)
    dcp.load({"app": other.state}, storage_reader=ResidencyStorageReader(path))
    assert_same(picture(other), picture(run))


@two
def a_load_takes_no_device_memory_where_the_recipe_takes_four_times_the_shards() -> None:
    def wide() -> nn.Sequential:
        return layers(512)

    def wide_run(offload: bool) -> Run:
        return made("foreach", offload=offload, make=wide, num_in_first=3)

    folder = FOLDER / "wide"
    saved = wide_run(False)
    saved.train(range(1))
    num_bytes = sum(p.to_local().nbytes for p in saved.parameters)
    dcp.save({"app": saved.state}, checkpoint_id=folder)
    stock = wide_run(False)
    spike = allocated_peak(lambda: dcp.load({"app": AppState(stock)}, checkpoint_id=folder))
    assert 3.9 < spike / num_bytes < 4.2
    for offload in (True, False):
        run = wide_run(offload)
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_reserved()
        assert allocated_peak(lambda r=run: dcp.load({"app": r.state}, checkpoint_id=folder)) == 0
        assert torch.accelerator.memory_reserved() == before


@two
def a_state_of_other_parts_is_refused_on_both_ranks() -> None:
    folder = FOLDER / "2-AdamW-True-True"
    run = made(offload=True)
    run.train(range(1))
    before = picture(run)
    bare = TrainState(run.model, run.optimizer, step=0)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"app": bare}, checkpoint_id=folder, planner=TrainStatePlanner())
    for error, _ in caught.value.failures.values():
        assert isinstance(error, RefusedError)
        assert "there the scheduler is LambdaLR, here the scheduler is none" in str(error)
    assert_same(picture(run), before)


@one
def a_process_writes_what_was_staged() -> None:
    run = made(offload=True)
    run.train(range(3))
    with PinnedStager() as stager:
        saving = dcp.async_save(
            {"app": run.state},
            checkpoint_id=FOLDER / "process",
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        run.train(range(3, 5))
        saving.upload_completion.result(timeout=120)
    resumes(FOLDER / "process", "AdamW", True)


# ----------------------------------------------------------------------------------------- XTuner


def engine() -> xtuner_published.TrainEngine:
    from residency.integrations.xtuner import OffloadedAdamWConfig

    model = sharded(xtuner_published.Model(*layers()).to("sim"))
    return xtuner_published.TrainEngine(model, OffloadedAdamWConfig(lr=1e-2, bucket="16KiB"))


def step(engine: xtuner_published.TrainEngine, steps: range) -> None:
    for number in steps:
        torch.manual_seed(number)
        engine.model(torch.randn(4, 64).to("sim")).square().sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def whole(engine: xtuner_published.TrainEngine) -> list[Tensor]:
    """Returns parameters and states as they are over all ranks, from the local shards."""
    found = []
    for parameter in engine.model.parameters():
        for value in (parameter, *engine.optimizer.state[parameter].values()):
            if isinstance(value, DTensor):
                local = value.to_local().detach()
                value = DTensor.from_local(
                    local.to("sim"),
                    value.device_mesh,
                    value.placements,
                    shape=value.shape,
                    stride=value.stride(),
                    run_check=False,
                ).full_tensor()
            found.append(value.detach().cpu().clone())
    return found


@two
def xtuners_round_trip_keeps_the_shards_of_both_ranks() -> None:
    """What ``SwapAdamW`` fails: of its plain tensors one rank loads another rank's."""
    xtuner_published.install()
    saved, resumed = engine(), engine()
    step(saved, range(3))
    saved.save_dcp(FOLDER / "xtuner")
    if dist.get_rank() == 0:
        torch.save(whole_saved := whole(saved), FOLDER / "xtuner.pt")
    else:
        whole_saved = whole(saved)
    resumed.load_dcp(FOLDER / "xtuner")
    for parameter in resumed.model.parameters():
        moments = resumed.optimizer.state[parameter]["exp_avg"]
        assert isinstance(moments, DTensor)
        assert moments.to_local().is_cpu
    assert all(map(torch.equal, whole(resumed), whole_saved))
    for each in (saved, resumed):
        step(each, range(3, 6))
    assert all(map(torch.equal, whole(resumed), whole(saved)))


@back
def xtuners_checkpoint_of_two_ranks_is_loaded_on_one() -> None:
    xtuner_published.install()
    resumed = engine()
    resumed.load_dcp(FOLDER / "xtuner")
    expected = torch.load(FOLDER / "xtuner.pt")
    assert all(map(torch.equal, whole(resumed), expected))


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sim.enable("1GiB", schedule="late", check_races=True)
    store = dist.FileStore(str(FOLDER / f"store-{PHASE}"), NUM_RANKS)
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=rank, world_size=NUM_RANKS)
    cases[PHASE].run(FOLDER / f"{PHASE}{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
