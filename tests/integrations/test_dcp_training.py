"""`PinnedStager` and `TrainState` on one process; `dcp_training_worker.py` has FSDP2."""

from __future__ import annotations

import copy
import gc
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
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
    BrokenWriter,
    Run,
    layers,
    picture,
)
from same_values import assert_same
from worker_cases import GatedWriter, allocated_peak

import residency
from residency import InvalidArgumentError, RefusedError
from residency._transfer import lending
from residency.integrations.dcp import (
    PinnedStager,
    ResidencyStorageReader,
    ResidencyStorageWriter,
    TrainState,
    TrainStatePlanner,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ENDS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.fixture
def stager(device: torch.device) -> Iterator[PinnedStager]:
    with PinnedStager() as made:
        yield made


def finished(response: Any) -> None:
    response.upload_completion.result(timeout=60)


# ------------------------------------------------------------------------------------- the stager


@pytest.mark.parametrize("offload", [True, False], ids=["offloaded", "plain"])
def test_a_save_has_the_values_of_its_call_though_training_goes_on(
    device: torch.device, tmp_path: Path, stager: PinnedStager, offload: bool
) -> None:
    run = Run(device, offload=offload)
    run.train(range(3))
    writer = GatedWriter(tmp_path / "held")
    saving = dcp.async_save({"app": run.state}, storage_writer=writer, async_stager=stager)
    run.train(range(3, 7))
    writer.may_write.set()
    finished(saving)
    resumed = Run(device, offload=False)
    dcp.load({"app": resumed.state}, checkpoint_id=tmp_path / "held")
    assert resumed.state.counters == {"step": 3}
    resumed.train(range(3, 7))
    assert_same(picture(resumed), picture(run))


@pytest.mark.parametrize("offload", [True, False], ids=["offloaded", "plain"])
def test_saves_take_no_device_memory_and_share_one_set_of_slabs(
    device: torch.device,
    tmp_path: Path,
    stager: PinnedStager,
    pinned_bytes: Callable[[], int],
    offload: bool,
) -> None:
    run = Run(device, offload=offload)
    run.train(range(1))
    gc.disable()  # as trainers do: nothing may lie in a cycle
    try:
        pinned = []
        for number in range(4):

            def save(number: int = number) -> None:
                folder = tmp_path / str(number)
                finished(
                    dcp.async_save({"app": run.state}, checkpoint_id=folder, async_stager=stager)
                )

            assert allocated_peak(save) == 0
            run.train(range(number + 1, number + 2))
            pinned.append((stager.pinned_bytes, pinned_bytes()))
    finally:
        gc.enable()
    assert len(set(pinned)) == 1, pinned
    tensors = [*run.parameters] if offload else [*run.parameters, *states_of(run)]
    assert stager.pinned_bytes >= sum(t.nbytes for t in tensors)


def states_of(run: Run) -> list[Tensor]:
    return [
        v for p in run.parameters for v in run.optimizer.state[p].values() if isinstance(v, Tensor)
    ]


def test_the_homes_of_an_offloaded_optimizer_are_lent_and_come_back(
    device: torch.device, stager: PinnedStager
) -> None:
    run = Run(device, offload=True)
    run.train(range(2))
    homes = {t.data_ptr() for t in states_of(run) if t.dim()}
    staged = stager.stage({"app": run.state.state_dict()}).result()
    states = staged["app"]["optimizer"]["state"]
    of_save = [v for values in states.values() for v in values.values() if v.dim()]
    assert {t.data_ptr() for t in of_save} == homes
    before = copy.deepcopy(states)
    run.train(range(2, 3))
    assert_same(states, before)
    assert lending
    del states, of_save, staged
    assert not lending


def test_the_next_save_waits_for_the_one_before(
    device: torch.device, tmp_path: Path, stager: PinnedStager
) -> None:
    run = Run(device, offload=False)
    run.train(range(2))
    one_set = []
    savings = []
    for number in range(3):  # each is asked for while the one before may still be written
        folder = tmp_path / str(number)
        savings.append(
            dcp.async_save({"app": run.state}, checkpoint_id=folder, async_stager=stager)
        )
        assert all(s.upload_completion.done() for s in savings[:-1])
        one_set.append(stager.pinned_bytes)
    finished(savings[-1])
    assert len(set(one_set)) == 1


def test_a_failed_save_whose_error_is_kept_stops_neither_steps_nor_saves(
    device: torch.device, tmp_path: Path, stager: PinnedStager
) -> None:
    run = Run(device, offload=True)
    run.train(range(2))
    broken = BrokenWriter(tmp_path / "broken")
    saving = dcp.async_save({"app": run.state}, storage_writer=broken, async_stager=stager)
    with pytest.raises(CheckpointException, match="no space left") as kept:
        finished(saving)
    run.train(range(2, 8))  # more than the spare of a loan that lasts
    whole = tmp_path / "whole"
    finished(dcp.async_save({"app": run.state}, checkpoint_id=whole, async_stager=stager))
    resumed = Run(device, offload=True)
    dcp.load({"app": resumed.state}, checkpoint_id=whole)
    assert_same(picture(resumed), picture(run))
    assert kept.value.failures


def test_ties_views_buffers_and_values_are_those_of_the_call(
    device: torch.device, stager: PinnedStager
) -> None:
    weight = torch.arange(12.0).view(3, 4).to(device)
    norm = nn.BatchNorm1d(4).to(device)
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {
        "tied": [weight, weight],
        "row": weight[1],
        "norm": norm.state_dict(),
        "host": torch.ones(3),
        "value": {"steps": [1, 2], "kind": torch.float16},
    }
    expected = {key: _on_host(value) for key, value in given.items()}
    staged = stager.stage(given)
    norm(batch.to(device))
    with residency.mutating(weight):
        weight.zero_()
    given["host"].zero_()
    given["value"]["steps"].append(3)
    found = staged.result()
    for name in expected:
        assert_same(found[name], expected[name], name)
    one, two = found["tied"]
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    assert one.untyped_storage().data_ptr() == found["row"].untyped_storage().data_ptr()


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list):
        return [_on_host(each) for each in value]
    if isinstance(value, dict):
        return type(value)((key, _on_host(each)) for key, each in value.items())
    return value


def test_writes_that_no_optimizer_makes_wait_until_a_step_has_been_seen(
    device: torch.device, stager: PinnedStager
) -> None:
    unknown = torch.full((1000,), 2.0).to(device)  # a moving average, let us say
    staged = stager.stage({"average": unknown})
    unknown.mul_(3)
    assert staged.result()["average"].unique().tolist() == [2.0]


def test_one_thread_may_hold_what_it_staged_and_stage_again(
    device: torch.device, stager: PinnedStager
) -> None:
    first = stager.stage({"w": torch.ones(4).to(device)}).result()
    second = stager.stage({"w": torch.zeros(4).to(device)})
    stager.synchronize_staging()
    assert second.exception() is None
    assert first["w"].tolist() == [1, 1, 1, 1]
    assert second.result()["w"].tolist() == [0, 0, 0, 0]


@pytest.mark.timeout(60)
def test_what_somebody_keeps_of_a_state_is_neither_waited_for_nor_changed(
    device: torch.device, tmp_path: Path, stager: PinnedStager
) -> None:
    run = Run(device, offload=True)
    run.train(range(2))
    kept = residency.snapshot({"optimizer": run.optimizer}).wait()
    staged = stager.stage({"app": run.state.state_dict()}).result()
    again = stager.stage({"app": run.state.state_dict()}).result()
    before = copy.deepcopy((kept.tree, staged, again))
    other = Run(device, offload=False)
    other.train(range(5))
    dcp.save({"app": other.state}, checkpoint_id=tmp_path)
    dcp.load({"app": run.state}, checkpoint_id=tmp_path)  # into homes that are lent
    assert_same((kept.tree, staged, again), before)
    assert_same(picture(run), picture(other))
    for each in (run, other):
        each.train(range(5, 7))
    assert_same(picture(run), picture(other))
    assert_same((kept.tree, staged, again), before)


@pytest.mark.parametrize("settings", [{"master_weights": True}, {"resident": "20KiB"}], ids=str)
def test_masters_and_resident_state_resume(
    device: torch.device, tmp_path: Path, settings: dict[str, Any]
) -> None:
    def low() -> nn.Sequential:
        return layers().to(torch.bfloat16)

    def made() -> Run:
        return Run(device, offload=True, make=low, **settings)

    expected, saved, resumed = made(), made(), made()
    expected.train(range(5))
    saved.train(range(3))
    dcp.save({"app": saved.state}, checkpoint_id=tmp_path)
    dcp.load({"app": resumed.state}, checkpoint_id=tmp_path)
    resumed.train(range(3, 5))
    assert_same(picture(resumed), picture(expected))


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("a socket, let us say")


def test_what_cannot_be_staged_is_refused_and_nothing_is_held(
    device: torch.device, tmp_path: Path, pinned_bytes: Callable[[], int]
) -> None:
    before = pinned_bytes()
    stager = PinnedStager()
    run = Run(device, offload=True)
    run.train(range(1))
    state = {"app": run.state, "socket": {"s": _Unpicklable()}}
    with pytest.raises(RefusedError, match=r"cannot be pickled .*a socket, let us say"):
        dcp.async_save(state, checkpoint_id=tmp_path / "no", async_stager=stager)
    assert not lending
    dropped = stager.stage({"app": run.state.state_dict()})  # and never asked for
    del dropped
    assert not lending
    finished(dcp.async_save({"app": run.state}, checkpoint_id=tmp_path / "a", async_stager=stager))
    stager.close()
    stager.close()
    with pytest.raises(RefusedError, match="this stager is closed"):
        stager.stage({"w": torch.ones(1)})
    del run, state
    deadline = time.monotonic() + 30  # torch's thread lets go of what it saved a moment later
    while pinned_bytes() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pinned_bytes() == before


# ------------------------------------------------------------------------------ the training state


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


# ---------------------------------------------------------------------------------------- mistakes


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
