"""State dicts, distributed checkpoints and masters of sharded optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_lab import (
    BUCKET,
    DEVICE,
    FOLDER,
    NUM_RANKS,
    Run,
    assert_same,
    first,
    four,
    last,
    layers,
    second,
    sharded,
    whole_vectors,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from worker_cases import GatedWriter, allocated_peak

# ---------------------------------------------------------------------------------- state dicts


def through_state_dict(options: StateDictOptions, name: str, source: bool, target: bool) -> None:
    """Continues a run from what torch's state-dict functions return of it."""
    expected = Run(sharded, name, offload=False)
    expected.train(range(5))
    before, after = (Run(sharded, name, offload=offload) for offload in (source, target))
    before.train(range(3))
    values, states = get_state_dict(before.model, before.optimizer, options=options)
    is_root = dist.get_rank() == 0 or not options.broadcast_from_rank0
    values, states = (values, states) if is_root else ({}, {})
    set_model_state_dict(after.model, values, options=options)
    set_optimizer_state_dict(after.model, after.optimizer, states, options=options)
    after.scheduler.load_state_dict(before.scheduler.state_dict())
    if options.full_state_dict:  # torch, with any optimizer: what was a tuple comes back as a list
        for group, original in zip(
            *(r.optimizer.param_groups for r in (after, before)), strict=True
        ):
            assert group["betas"] == list(original["betas"])
            group["betas"] = original["betas"]
    assert_same(after, before)
    after.train(range(3, 5))
    assert_same(after, expected)


NAMES_OF_OPTIMIZERS = ("AdamW", "fused", "SGD")
ENDS = [(True, True), (True, False), (False, True)]


@first
@second
def sharded_state_dicts() -> None:
    for name, ends in zip(NAMES_OF_OPTIMIZERS, ENDS, strict=True):
        through_state_dict(StateDictOptions(), name, *ends)


@four
def sharded_state_dicts_of_every_pair() -> None:
    for name in NAMES_OF_OPTIMIZERS:
        for ends in ENDS:
            through_state_dict(StateDictOptions(), name, *ends)


@second
def flat_state_dicts() -> None:
    for ends in ENDS:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        through_state_dict(options, "AdamW", *ends)


@second
def state_dicts_on_the_host() -> None:
    for ends in ENDS:
        through_state_dict(StateDictOptions(cpu_offload=True), "AdamW", *ends)


@second
def full_state_dicts() -> None:
    for ends in ENDS:
        through_state_dict(StateDictOptions(full_state_dict=True), "AdamW", *ends)


@second
def full_state_dicts_broadcast_from_one_rank() -> None:
    for cpu_offload in (False, True):
        for ends in ENDS:
            options = StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload
            )
            through_state_dict(options, "AdamW", *ends)


# ------------------------------------------------------------------------ distributed checkpoints


def app_state(run: Run) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
        "scheduler": run.scheduler.state_dict(),
    }


def restore(run: Run, folder: Path) -> None:
    state = app_state(run)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, optim_state_dict=state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])


NAMES = {False: "plain", True: "offloaded"}


def folder_of(num_ranks: int, name: str, offload: bool) -> Path:
    return FOLDER / f"{num_ranks}-{name}-{NAMES[offload]}"


def vectors_sharded() -> nn.Sequential:
    return sharded(make_layers=whole_vectors)


def resumes(name: str, num_ranks_before: int) -> None:
    """Resumes what so many ranks saved after three steps, and compares after six.

    Of the first optimizer each pair of a source and a target, of the others the offloaded one.
    """
    expected = Run(vectors_sharded, name, offload=False)
    expected.feed(range(6))
    for source in NAMES:
        for target in NAMES if name == NAMES_OF_OPTIMIZERS[0] else [True]:
            run = Run(vectors_sharded, name, offload=target)
            restore(run, folder_of(num_ranks_before, name, source))
            run.feed(range(3, 6))
            assert_same(run, expected)


def save(name: str) -> None:
    for offload in NAMES:
        run = Run(vectors_sharded, name, offload=offload)
        run.feed(range(3))
        dcp.save(app_state(run), checkpoint_id=folder_of(NUM_RANKS, name, offload))


@first
@second
def checkpoints_are_resumed_on_as_many_ranks() -> None:
    for name in NAMES_OF_OPTIMIZERS:
        save(name)
        resumes(name, NUM_RANKS)


@four
def checkpoints_are_resumed_on_four_ranks() -> None:
    for name in NAMES_OF_OPTIMIZERS:
        save(name)
        resumes(name, NUM_RANKS)


@second
def checkpoints_of_one_rank_are_resumed_on_two() -> None:
    for name in NAMES_OF_OPTIMIZERS:
        resumes(name, 1)


@last
def checkpoints_of_two_ranks_are_resumed_on_one() -> None:
    for name in NAMES_OF_OPTIMIZERS:
        resumes(name, 2)


@first
@second
def an_asynchronous_save_has_the_values_of_its_step() -> None:
    folder = FOLDER / f"{NUM_RANKS}-asynchronous"
    run = Run(sharded, offload=True)
    run.feed(range(3))
    writer = GatedWriter(folder)
    saving = dcp.async_save(app_state(run), storage_writer=writer)
    run.feed(range(3, 6))
    writer.may_write.set()
    saving.result()
    for target in NAMES:
        resumed = Run(sharded, offload=target)
        restore(resumed, folder)
        resumed.feed(range(3, 6))
        assert_same(resumed, run)


# ------------------------------------------------------------------------------ templates of loads


@first
@second
def the_template_that_torch_makes_takes_one_bucket() -> None:
    for slots in (1, 2, 3):
        run = Run(sharded, "fused", offload=True, slots=slots)
        locals_ = [p.to_local() for p in run.parameters]
        gradients = sum(-(-t.numel() * t.element_size() // 512) * 512 for t in locals_)
        peak = allocated_peak(lambda run=run: get_optimizer_state_dict(run.model, run.optimizer))
        assert gradients < peak <= gradients + BUCKET, (gradients, peak)


@first
@second
def a_primed_template_takes_no_device_memory_and_is_filled_by_a_load() -> None:
    for name in NAMES_OF_OPTIMIZERS:
        folder = FOLDER / f"{NUM_RANKS}-primed-{name}"
        expected = Run(sharded, name, offload=True)
        expected.feed(range(3))
        dcp.save(app_state(expected), checkpoint_id=folder)
        expected.feed(range(3, 6))
        run = Run(sharded, name, offload=True)
        before = [p.full_tensor().clone() for p in run.parameters]
        counters = copy.deepcopy(run.scheduler.state_dict())

        def template(run: Run = run) -> None:
            run.optimizer.prime()
            get_optimizer_state_dict(run.model, run.optimizer)

        assert allocated_peak(template) == 0
        assert all(p.grad is None for p in run.parameters)
        assert all(map(torch.equal, before, [p.full_tensor() for p in run.parameters]))
        for parameter in run.parameters:
            for value in run.optimizer.state[parameter].values():
                local = value.to_local() if isinstance(value, DTensor) else value
                assert local.is_cpu
                assert not local.count_nonzero()
        assert run.scheduler.state_dict() == counters
        restore(run, folder)
        run.feed(range(3, 6))
        assert_same(run, expected)


@second
def a_primed_optimizer_that_loads_nothing_steps_as_a_fresh_one() -> None:
    for name in ("AdamW", "SGD"):
        plain, ours = (Run(sharded, name, offload=offload) for offload in (False, True))
        ours.optimizer.prime()
        for run in (ours, plain):
            run.train(range(3))
        assert_same(ours, plain)


@first
@second
def masters_of_shards_equal_masters_on_the_device_and_go_through_dcp() -> None:
    def low() -> nn.Sequential:
        return sharded(make_layers=lambda: layers().to(torch.bfloat16))

    def backward(model: nn.Module, step: int) -> None:
        torch.manual_seed(10 * step + dist.get_rank())
        batch = torch.randn(4, 33).to(DEVICE, torch.bfloat16)
        model(batch).square().sum().backward()

    ours = Run(low, offload=True, master_weights=True)
    plain = low()
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    groups = [{"params": masters[:2]}, {"params": masters[2:], "lr": 3e-3}]
    reference = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(3):
        backward(ours.model, step)
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        backward(plain, step)
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        reference.step()
        plain.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(plain.parameters(), masters, strict=True):
                parameter.copy_(master)
    resumed = Run(low, offload=True, master_weights=True)
    resumed.model.load_state_dict(ours.model.state_dict())
    saved = get_optimizer_state_dict(ours.model, ours.optimizer)
    set_optimizer_state_dict(resumed.model, resumed.optimizer, optim_state_dict=saved)
    for run in (ours, resumed):
        for parameter, other, master in zip(
            run.parameters, plain.parameters(), masters, strict=True
        ):
            assert torch.equal(parameter.to_local().cpu(), other.to_local().cpu())
            state = run.optimizer.state[parameter]
            assert state["master_weight"].placements == parameter.placements
            assert torch.equal(state["master_weight"].to_local(), master.detach().to_local().cpu())
            moments = reference.state[master]["exp_avg"].to_local().cpu()
            assert torch.equal(state["exp_avg"].to_local(), moments)
