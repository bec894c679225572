"""verl and Trinity-RFT in a worker's process of one rank, the simulator in CUDA's place.

Workers, engines, the optimizer's configuration, checkpoints and movers are the frameworks' own,
from the index. What is missing is Ray, whose part `become_rank` plays, and a rollout engine: what
it would find free is asked of the device. tests/verl/test_verl.py reads what became of each case.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
import verl_lab as lab
from worker_cases import Cases

import residency
from residency.integrations import verl as door

case = Cases()
LENGTHS = (64, 160)
LONGER = (64, 192, 320, 448)
MIB = 1 << 20


def model() -> Path:
    return Path(sys.argv[1]) / "model"


@functools.cache
def worker(*overrides: str) -> Any:
    """Returns one worker for all cases that are content with its state."""
    return lab.make_worker(lab.config_of(model(), *overrides))


@functools.cache
def stock_sums() -> dict[str, int]:
    """Returns what training ends at without this library."""
    door.remove_guard()
    plain = lab.make_worker(lab.config_of(model(), *lab.PLAIN))
    assert type(plain.actor.engine.optimizer) is torch.optim.AdamW
    lab.train(plain, LENGTHS)
    return lab.sums_of(plain)


def built(name: str, **options: Any) -> Any:
    """Returns what verl's own function builds for the parameters of a small layer."""
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

    config = FSDPOptimizerConfig(
        optimizer_impl="residency.integrations.verl",
        optimizer=name,
        override_optimizer_config=options,
    )
    return build_optimizer(torch.nn.Linear(64, 64, device="cuda").parameters(), config)


# ------------------------------------------------------------------------------------ the optimizer


@case
def build_optimizer_builds_an_adamw_whose_state_is_offloaded() -> None:
    optimizer = built("OffloadedAdamW", bucket="4KiB", slots=2, eps=1e-5)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, residency.OffloadedOptimizer)
    assert optimizer.defaults["eps"] == 1e-5
    for _ in range(2):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert {v.device.type for s in optimizer.state.values() for v in s.values()} == {"cpu"}
    statistics = optimizer.statistics()
    assert statistics.num_slots == 2
    assert 0 < statistics.slot_bytes <= 4 << 10


@case
def other_classes_of_torch_are_built_too() -> None:
    for name in ("OffloadedAdam", "OffloadedSGD", "OffloadedAdafactor"):
        optimizer = built(name)
        assert isinstance(optimizer, getattr(torch.optim, name.removeprefix("Offloaded")))
        assert isinstance(optimizer, residency.OffloadedOptimizer)


@case
def a_class_that_is_none_is_an_error_with_the_names_that_there_are() -> None:
    for name in ("OffloadedAdamWW", "OffloadedOptimizer2", "AdamW"):
        with pytest.raises(AttributeError, match=f"'{name}' not found.*'OffloadedAdamW'") as caught:
            built(name)
        assert "verl 0." in str(caught.value.__cause__)


@case
def an_option_that_means_nothing_is_an_error_that_names_verl_and_the_known_ones() -> None:
    with pytest.raises(
        residency.InvalidArgumentError, match=r"'buckets'.*verl 0\..*bucket.*amsgrad"
    ):
        built("OffloadedAdamW", buckets="1MiB")
    with pytest.raises(residency.InvalidArgumentError, match="slots"):
        built("OffloadedAdamW", slots="three")
    with pytest.raises(residency.InvalidArgumentError, match="weight_decay"):
        built("OffloadedRprop")


@case
def training_with_optimizer_and_guard_ends_at_the_bits_of_stock_training() -> None:
    with lab.guard():
        ours = lab.make_worker(lab.config_of(model(), *lab.OFFLOADED))
        lab.train(ours, LENGTHS)
        assert door.guard_statistics().num_transitions == 2 * len(LENGTHS)
    assert isinstance(ours.actor.engine.optimizer, residency.OffloadedOptimizer)
    assert lab.sums_of(ours) == stock_sums()


@case
def the_same_where_verl_moves_optimizer_and_parameters_itself() -> None:
    offload = "actor.fsdp_config.optimizer_offload=True", "actor.fsdp_config.param_offload=True"
    with lab.guard():
        for overrides in (offload[:1], offload):
            ours = lab.make_worker(lab.config_of(model(), *lab.OFFLOADED, *overrides))
            lab.train(ours, LENGTHS)
            assert lab.sums_of(ours) == stock_sums(), overrides
            del ours


@case
def the_same_with_fsdp1() -> None:
    def trained(*overrides: str) -> dict[str, int]:
        found = lab.make_worker(lab.config_of(model(), *overrides, strategy="fsdp"))
        lab.train(found, LENGTHS)
        return lab.sums_of(found)

    stock = trained(*lab.PLAIN)
    with lab.guard():
        assert trained(*lab.OFFLOADED) == stock


@case
def verls_movers_leave_every_state_at_home_and_whole() -> None:
    from verl.utils.fsdp_utils import load_fsdp_optimizer, offload_fsdp_optimizer

    ours = worker(*lab.OFFLOADED)
    lab.update(ours, 64)
    optimizer, before = ours.actor.engine.optimizer, lab.sums_of(ours)
    held = torch.cuda.memory_allocated()
    load_fsdp_optimizer(optimizer, 0)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    offload_fsdp_optimizer(optimizer)
    places = {lab.own_part(v).device.type for s in optimizer.state.values() for v in s.values()}
    assert places == {"cpu"}
    assert lab.sums_of(ours) == before


@case
def a_checkpoint_of_verls_own_resumes_at_the_same_bits() -> None:
    ours = lab.make_worker(lab.config_of(model(), *lab.OFFLOADED))
    lab.update(ours, 64)
    with tempfile.TemporaryDirectory() as folder:
        ours.save_checkpoint(folder, global_step=1)
        resumed = lab.make_worker(lab.config_of(model(), *lab.OFFLOADED))
        resumed.load_checkpoint(folder)
    for each in (ours, resumed):
        lab.update(each, 96)
    assert lab.sums_of(resumed) == lab.sums_of(ours)


# ---------------------------------------------------------------------------------------- the guard


@case
def stock_training_reserves_more_with_every_length_and_the_guard_keeps_it_flat() -> None:
    plain = worker(*lab.PLAIN)
    lab.update(plain, LENGTHS[0])  # there are states now
    torch.cuda.empty_cache()
    stock = lab.train(plain, LONGER)
    assert stock[-1] - stock[0] >= 20 * MIB, stock
    with lab.guard():
        guarded = lab.train(plain, LONGER)
        assert len(set(guarded)) == 1, guarded
        assert guarded[0] < stock[0]
    free, total = torch.cuda.mem_get_info()
    assert free == total - guarded[-1]


@case
def bytes_that_are_needed_are_free_afterwards_and_not_more_is_given_back() -> None:
    plain = worker(*lab.PLAIN)
    lab.train(plain, LONGER)
    free, total = torch.cuda.mem_get_info()
    with lab.guard(f"{free}B"):  # what is free already
        lab.update(plain, LENGTHS[0])
        assert door.guard_statistics().freed_bytes == 0
        assert torch.cuda.mem_get_info() == (free, total)
    need = total - torch.cuda.memory_allocated() - 16 * MIB
    assert free < need
    with mock.patch.dict(os.environ, RESIDENCY_VERL_NEED=f"{need}B"), lab.guard():
        lab.update(plain, LENGTHS[-1])
        assert door.guard_statistics().freed_bytes > 0
    assert torch.cuda.mem_get_info()[0] >= need


@case
def bytes_that_cannot_be_freed_are_an_error_that_names_their_holders_and_the_setting() -> None:
    plain = worker(*lab.PLAIN)
    with lab.guard("1023MiB"), pytest.raises(residency.HandOffError, match="too few") as caught:
        lab.update(plain, 64)
    assert "RESIDENCY_VERL_NEED" in "".join(caught.value.__notes__)


@case
def garbage_is_looked_for_only_where_more_is_held_than_the_last_time() -> None:
    from residency._handoff import _reclaim

    class Box:
        def __init__(self) -> None:
            self.tensor = torch.ones(1 << 22, device="cuda")
            self.me = self

    plain = worker(*lab.PLAIN)
    search = mock.patch.object(
        _reclaim, "bytes_in_cycles", side_effect=_reclaim.bytes_in_cycles, autospec=True
    )
    gc.disable()
    try:
        with lab.guard(), search as searched:
            lab.update(plain, 64)
            lab.update(plain, 128)
            assert searched.call_count == 1
            box = weakref.ref(Box())
            lab.update(plain, 64)
            assert searched.call_count == 2
            assert box() is None
            lab.update(plain, 64)
            assert searched.call_count == 2
        door.install_guard(collect=False)
        box = weakref.ref(Box())
        lab.update(plain, 64)
        assert box() is not None
        door.remove_guard()
    finally:
        gc.enable()


@case
def what_fsdp2_keeps_gathered_after_a_forward_is_dropped() -> None:
    keeping = worker(*lab.PLAIN, "ref.fsdp_config.reshard_after_forward=False")
    with lab.guard():
        lab.compute_reference(keeping, 64)
    held = torch.cuda.memory_allocated()
    expected = lab.compute_reference(keeping, 64)
    residency.reclaim()  # the matrix library's workspace, which the guard clears as well
    first_and_last_layer = 2 * lab.NUM_WORDS * 64 * 2  # in bf16
    assert torch.cuda.memory_allocated() - held >= first_and_last_layer
    with lab.guard():
        assert torch.equal(lab.compute_reference(keeping, 64), expected)
    assert torch.cuda.memory_allocated() == held


@case
def the_guard_runs_after_an_update_of_the_critic_which_is_the_last_one_below_critic_warmup() -> (
    None
):
    def trained() -> tuple[dict[str, int], int]:
        critic = lab.make_critic(model())
        for length in LENGTHS:
            torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")  # a batch's, in the cache now
            lab.update_critic(critic, length)
        return lab.sums_of(critic), torch.cuda.memory_reserved()

    door.remove_guard()  # the plugin's
    expected, stock = trained()
    assert stock >= 32 * MIB
    gc.collect()
    with lab.guard():
        sums, guarded = trained()
        assert door.guard_statistics().num_transitions == len(LENGTHS)
    assert sums == expected
    assert guarded <= stock - 32 * MIB
    free, total = torch.cuda.mem_get_info()
    assert free == total - guarded


@case
def the_optimizer_of_the_critic_is_offloaded_by_the_same_lines() -> None:
    lines = (line.removeprefix("actor.") for line in lab.OFFLOADED)
    critic = lab.make_critic(model(), *lines)
    plain = lab.make_critic(model(), *(line.removeprefix("actor.") for line in lab.PLAIN))
    for each in (critic, plain):
        lab.update_critic(each, LENGTHS[0])
    assert isinstance(critic.engine.optimizer, residency.OffloadedOptimizer)
    assert lab.sums_of(critic) == lab.sums_of(plain)


@case
def the_reference_of_a_model_with_an_adapter_is_told_from_the_policys_own_probabilities() -> None:
    adapted = lab.make_worker(
        lab.config_of(model(), *lab.PLAIN, "model.lora_rank=4", "model.lora_alpha=8")
    )
    expected = lab.compute_own(adapted, 64, no_lora_adapter=True)
    with lab.guard():
        lab.compute_own(adapted, LENGTHS[-1])
        assert door.guard_statistics().num_transitions == 0
        assert torch.equal(lab.compute_own(adapted, 64, no_lora_adapter=True), expected)
        assert door.guard_statistics().num_transitions == 1
        free, total = torch.cuda.mem_get_info()
        assert free == total - torch.cuda.memory_reserved()
        assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 20 * MIB


@case
def the_guard_keeps_what_verl_wrote_on_the_methods_and_goes_without_a_trace() -> None:
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.single_controller.ray.base import _bind_workers_method_to_parent
    from verl.workers.engine_workers import ActorRolloutRefWorker

    def bound() -> dict[str, Any]:
        parent = type("Parent", (), {})
        _bind_workers_method_to_parent(parent, "actor", ActorRolloutRefWorker)
        names = [name for name in vars(parent) if name.startswith("actor_")]
        return {name: getattr(vars(parent)[name], MAGIC_ATTR) for name in names}

    names = ("update_actor", "compute_ref_log_prob", "compute_log_prob")
    stock, calls = [vars(ActorRolloutRefWorker)[name] for name in names], bound()
    with lab.guard():
        for name, found in zip(names, stock, strict=True):
            ours = vars(ActorRolloutRefWorker)[name]
            assert ours is not found
            assert getattr(ours, MAGIC_ATTR) is getattr(found, MAGIC_ATTR)
        assert bound() == calls
        door.install_guard()  # once more: in the place of the other
        assert vars(ActorRolloutRefWorker)["update_actor"].__wrapped__ is stock[0]
    assert [vars(ActorRolloutRefWorker)[name] for name in names] == stock


@case
def a_function_around_the_guards_stays_when_the_guard_goes() -> None:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    plain, stock = worker(*lab.PLAIN), vars(ActorRolloutRefWorker)["update_actor"]
    with lab.guard():
        inner = vars(ActorRolloutRefWorker)["update_actor"]

        def around(self: Any, data: Any) -> Any:
            return inner(self, data)

        ActorRolloutRefWorker.update_actor = around
    try:
        assert vars(ActorRolloutRefWorker)["update_actor"] is around
        before = torch.cuda.memory_reserved()
        lab.update(plain, LONGER[-1])
        assert torch.cuda.memory_reserved() > before  # the guard in there does nothing any more
    finally:
        ActorRolloutRefWorker.update_actor = stock


@case
def a_verl_without_one_of_the_methods_is_left_as_it_is_with_an_error_that_names_its_version() -> (
    None
):
    from verl.workers.engine_workers import ActorRolloutRefWorker

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(str(record.exc_info))  # type: ignore[method-assign]
    logging.getLogger("residency").addHandler(handler)
    stock = dict(vars(ActorRolloutRefWorker))
    try:
        del ActorRolloutRefWorker.compute_ref_log_prob
        with lab.guard():
            assert vars(ActorRolloutRefWorker)["update_actor"] is stock["update_actor"]
    finally:
        ActorRolloutRefWorker.compute_ref_log_prob = stock["compute_ref_log_prob"]
        logging.getLogger("residency").removeHandler(handler)
    assert len(messages) == 1, messages
    assert "verl 0." in messages[0]
    assert "compute_ref_log_prob" in messages[0]


@case
def the_guard_leaves_verls_toggle_of_expandable_segments_alone() -> None:
    from verl.utils.device import set_expandable_segments

    settings: Callable[[], str] = torch._C._accelerator_getAllocatorSettings
    plain = worker(*lab.PLAIN)
    lab.update(plain, LENGTHS[0])
    with lab.guard():
        for wanted in (True, False):
            set_expandable_segments(wanted)
            before = settings()
            lab.update(plain, LENGTHS[-1])
            assert settings() == before
            assert f"expandable_segments:{wanted}" in before
            free, total = torch.cuda.mem_get_info()
            assert free == total - torch.cuda.memory_reserved()
            assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 20 * MIB


@case
def the_guard_reaches_trinitys_worker_which_inherits_the_methods() -> None:
    from trinity.trainer.verl.workers import TrinityActorRolloutRefWorker

    trinity = TrinityActorRolloutRefWorker(
        lab.config_of(model(), *lab.OFFLOADED), "actor_rollout_ref"
    )
    trinity.init_model()
    with lab.guard():
        reserved = lab.train(trinity, LENGTHS)
        assert door.guard_statistics().num_transitions == 2 * len(LENGTHS)
    assert len(set(reserved)) == 1, reserved
    assert lab.sums_of(trinity) == stock_sums()


@case
def the_guard_reaches_trinitys_critic_which_inherits_the_update() -> None:
    from trinity.trainer.verl.workers import TrinityCriticWorker

    critic = lab.make_critic(model(), kind=TrinityCriticWorker)
    with lab.guard():
        lab.update_critic(critic, LENGTHS[-1])
        assert door.guard_statistics().num_transitions == 1
        assert door.guard_statistics().freed_bytes > 0


def main(folder: Path) -> None:
    from residency import sim

    sim.enable("1GiB", check_races=True, context="0B", device="cuda")
    warnings.simplefilter("ignore")  # the frameworks' advice to their users
    lab.become_rank(0, 1, folder / "meeting")
    model().mkdir()
    lab.save_model(model())
    gc.collect()
    gc.freeze()
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
