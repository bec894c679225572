"""`TrainState` on one process; `dcp_training_worker.py` has it, and `PinnedStager`, with FSDP2."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import set_model_state_dict

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from dcp_training import (
    OPTIMIZERS,
    AppState,
    Run,
    layers,
    picture,
    states_of,
)
from same_values import assert_same
from worker_cases import allocated_peak

import residency
from residency import InvalidArgumentError, RefusedError
from residency.integrations.dcp import (
    ResidencyStorageReader,
    ResidencyStorageWriter,
    TrainState,
    TrainStatePlanner,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ENDS = [(True, True), (True, False), (False, True), (False, False)]


# ------------------------------------------------------------------------------- the training state


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("source", "target"), ENDS)
def test_a_resumed_run_ends_at_the_bits_of_an_uninterrupted_one(
    device: torch.device, tmp_path: Path, name: str, source: bool, target: bool
) -> None:
    expected = Run(device, name, offload=False)
    expected.train(range(5))
    saved = Run(device, name, offload=source)
    saved.train(range(3))
    dcp.save({"app": saved.state}, checkpoint_id=tmp_path)
    resumed = Run(device, name, offload=target)
    dcp.load({"app": resumed.state}, checkpoint_id=tmp_path)
    # At once, and not from the next step on: rates, counters of groups, the schedule.
    at_once, at_save = picture(resumed), picture(saved)
    for part in ("groups", "scheduler", "counters"):
        assert_same(at_once[part], at_save[part], part)
    resumed.train(range(3, 5))
    assert_same(picture(resumed), picture(expected))


def test_a_load_takes_no_device_memory_where_the_recipe_takes_four_times_the_parameters(
    device: torch.device, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    def wide() -> nn.Sequential:
        return layers(512)

    def loaded(target: Run, state: Any) -> tuple[int, int]:
        torch.accelerator.empty_cache()
        reserved = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
        peak = allocated_peak(lambda: dcp.load({"app": state}, checkpoint_id=tmp_path))
        after = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
        return peak, after - reserved

    def made(offload: bool) -> Run:
        return Run(device, "foreach", offload=offload, make=wide, num_in_first=3)

    saved = made(False)
    saved.train(range(2))
    num_bytes = sum(p.nbytes for p in saved.parameters)
    dcp.save({"app": saved.state}, checkpoint_id=tmp_path)
    stock = made(False)
    spike, left_over = loaded(stock, AppState(stock))
    record_property("spike_in_parameter_bytes", spike / num_bytes)
    assert 3.9 < spike / num_bytes < 4.2  # gradients, two moments, a temporary of all parameters
    for offload in (True, False):
        run = made(offload)
        assert loaded(run, run.state) == (0, 0)
        assert all(p.grad is None for p in run.parameters)
        moments = [t for t in states_of(run) if t.dim()]
        assert all(t.is_cpu for t in moments)  # a plain one's wait for its first step
        run.train(range(2, 3))
        assert all(t.is_cpu == offload for t in states_of(run) if t.dim())
    assert left_over > 1.9 * num_bytes


def test_nothing_holds_the_state_after_a_load(device: torch.device, tmp_path: Path) -> None:
    saved = Run(device, offload=False)
    saved.train(range(2))
    dcp.save({"app": saved.state}, checkpoint_id=tmp_path)
    run = Run(device, offload=False)
    seen: list[weakref.ref[Tensor]] = []
    made = run.state.state_dict

    def state_dict() -> dict[str, Any]:
        given = made()
        for values in given["optimizer"]["state"].values():
            seen.extend(weakref.ref(v) for v in values.values() if v.dim())
        return given

    run.state.state_dict = state_dict  # type: ignore[method-assign]
    asked = {"app": run.state}
    dcp.load(asked, checkpoint_id=tmp_path)
    assert len(seen) == 6
    run.train(range(2, 3))  # what waited on the host is on the device now
    gc.collect()
    assert [ref() for ref in seen] == [None] * 6


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize(("source", "target"), ENDS)
def test_what_had_no_state_at_the_save_has_none_after_the_load(
    device: torch.device, tmp_path: Path, name: str, source: bool, target: bool
) -> None:
    expected, saved = Run(device, name, offload=False), Run(device, name, offload=source)
    for run in (expected, saved):
        run.train(range(2), but=[1])
    dcp.save({"app": saved.state}, checkpoint_id=tmp_path / "part")
    resumed = Run(device, name, offload=target)
    dcp.load({"app": resumed.state}, checkpoint_id=tmp_path / "part")
    fresh = Run(device, name, offload=source)
    dcp.save({"app": fresh.state}, checkpoint_id=tmp_path / "none")
    begun = Run(device, name, offload=target)
    dcp.load({"app": begun.state}, checkpoint_id=tmp_path / "none")
    for run in (expected, resumed, saved):  # the save has changed nothing, either
        run.train(range(2, 4))
    assert_same(picture(resumed), picture(expected))
    assert_same(picture(saved), picture(expected))
    for run in (fresh, begun):
        run.train(range(2))
    assert_same(picture(begun), picture(fresh))


def test_torchs_recipe_reads_these_checkpoints_and_its_own_are_read(
    device: torch.device, tmp_path: Path
) -> None:
    saved = Run(device, offload=True)
    saved.train(range(3))
    dcp.save({"app": saved.state}, checkpoint_id=tmp_path / "ours")
    dcp.save({"app": AppState(saved)}, checkpoint_id=tmp_path / "torchs")
    stock = Run(device, offload=False)
    dcp.load({"app": AppState(stock)}, checkpoint_id=tmp_path / "ours")
    bare = TrainState((ours := Run(device, offload=True)).model, ours.optimizer)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint .*about this state"):
        dcp.load({"app": bare}, checkpoint_id=tmp_path / "torchs")
    dcp.load({"app": bare}, checkpoint_id=tmp_path / "torchs", planner=TrainStatePlanner())
    for run in (stock, ours):
        run.scheduler.load_state_dict(saved.scheduler.state_dict())
        run.state.counters["step"] = 3
        assert_same(picture(run), picture(saved))


def test_counters_that_a_load_in_place_loses_are_kept(device: torch.device, tmp_path: Path) -> None:
    """prime-rl #3561: tensors are read in place, and groups stay as the constructor made them."""

    class InPlace(AppState):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            set_model_state_dict(self.run.model, state_dict["model"])

    saved = Run(device, offload=True)
    saved.train(range(5))
    dcp.save({"app": saved.state}, checkpoint_id=tmp_path)
    lost, kept = (Run(device, offload=True) for _ in range(2))
    lost.optimizer.prime()
    dcp.load({"app": InPlace(lost)}, checkpoint_id=tmp_path)
    dcp.load({"app": kept.state}, checkpoint_id=tmp_path)
    counts = [run.optimizer.param_groups[1]["count"] for run in (saved, lost, kept)]
    rates = [run.optimizer.param_groups[0]["lr"] for run in (saved, lost, kept)]
    assert counts == [5, 0, 5]
    assert rates[0] == rates[2] != rates[1]


def test_counters_may_be_objects_and_files_of_this_librarys_format(
    device: torch.device, tmp_path: Path
) -> None:
    class Loader:
        position = 0

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    run, loader = Run(device, offload=True), Loader()
    run.train(range(2))
    loader.position = 7
    state = TrainState(run.model, run.optimizer, data=loader, note="half way", tokens=10**12)
    path = tmp_path / "step-00000002"
    dcp.save({"app": state}, storage_writer=ResidencyStorageWriter(path))
    other, fresh = Run(device, offload=True), Loader()
    resumed = TrainState(other.model, other.optimizer, data=fresh, note="", tokens=0)
    dcp.load({"app": resumed}, storage_reader=ResidencyStorageReader(path))
    assert (fresh.position, resumed.counters["note"], resumed.counters["tokens"]) == (
        7,
        "half way",
        10**12,
    )
    for part in ("parameters", "states", "groups"):
        assert_same(picture(other)[part], picture(run)[part], part)


# ----------------------------------------------------------------------------------------- mistakes


def _other_class(device: torch.device) -> Run:
    return Run(device, "Adam", offload=True)


def _no_scheduler(device: torch.device) -> Run:
    run = Run(device, offload=True)
    run.state = TrainState(run.model, run.optimizer, step=0)
    return run


def _other_counters(device: torch.device) -> Run:
    run = Run(device, offload=False)
    run.state.counters["tokens"] = 0
    return run


def _other_model(device: torch.device) -> Run:
    def shorter() -> nn.Sequential:
        return nn.Sequential(*layers()[:1], nn.Linear(64, 64))

    return Run(device, offload=True, make=shorter)


def _other_groups(device: torch.device) -> Run:
    run = Run(device, offload=False)
    first, second = run.optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    return run


MISTAKES = {
    "class": (_other_class, "there the optimizer is AdamW of .* here the optimizer is Adam of"),
    "scheduler": (_no_scheduler, "there the scheduler is LambdaLR, here the scheduler is none"),
    "counter": (_other_counters, r"there besides \['step'\], here besides \['step', 'tokens'\]"),
    "model": (_other_model, r"there the model has 3 tensors .* here the model has 4 tensors"),
    "groups": (_other_groups, r"AdamW of 2 \+ 1 parameters .* AdamW of 1 \+ 2 parameters"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("planner", [TrainStatePlanner, lambda: None], ids=["ours", "torchs"])
def test_a_state_of_other_parts_is_refused_before_anything_is_read(
    device: torch.device, tmp_path: Path, mistake: str, planner: Callable[[], Any]
) -> None:
    saved = Run(device, offload=True)
    saved.train(range(2))
    dcp.save({"app": saved.state}, checkpoint_id=tmp_path)
    make, message = MISTAKES[mistake]
    run = make(device)
    run.train(range(1))
    before = picture(run)
    plan = planner()
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"app": run.state}, checkpoint_id=tmp_path, planner=plan)
    [(error, _)] = caught.value.failures.values()
    if plan is None:
        assert "Missing key in checkpoint state_dict: app.about this state." in str(error)
    else:
        assert isinstance(error, RefusedError)
        assert re.search(message, str(error)), str(error)
    assert_same(picture(run), before)


def test_a_part_that_is_misspelt_is_noticed(device: torch.device) -> None:
    run = Run(device, offload=False)
    with pytest.warns(UserWarning, match="sheduler= is a counter.*did you mean scheduler="):
        TrainState(run.model, run.optimizer, sheduler=3)
    TrainState(run.model, run.optimizer, optimizer_steps=3, epoch=1, mode="slow")


def test_parts_that_do_not_belong_together_are_refused(device: torch.device) -> None:
    run, stranger = Run(device, offload=True), Run(device, offload=False)
    with pytest.raises(RefusedError, match=r"3 parameters of the optimizer.* not in the model"):
        TrainState(run.model, stranger.optimizer)
    with pytest.raises(InvalidArgumentError, match="about this state is the name of a part"):
        TrainState(run.model, run.optimizer, **{"about this state": 3})
    with pytest.raises(InvalidArgumentError, match=r"expected a torch.optim.Optimizer"):
        TrainState(run.model, object())  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="offloaded already"):
        residency.offload_optimizer(run.optimizer)
