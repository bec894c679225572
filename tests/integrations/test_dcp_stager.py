"""`PinnedStager` on one process: saves are those of their calls, and share their memory."""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from dcp_training import (
    BrokenWriter,
    Run,
    layers,
    picture,
    states_of,
)
from same_values import assert_same
from worker_cases import GatedWriter, allocated_peak

import residency
from residency import RefusedError
from residency._transfer import lending
from residency.integrations.dcp import (
    PinnedStager,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def stager(device: torch.device) -> Iterator[PinnedStager]:
    with PinnedStager() as made:
        yield made


def finished(response: Any) -> None:
    response.upload_completion.result(timeout=60)


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
