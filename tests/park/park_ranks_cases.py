"""Wrapped modules on two ranks, which train beside the same without parkings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from park_lab import (
    FOLDER,
    NUM_RANKS,
    batch,
    bits,
    block,
    both_train_alike,
    equal,
    local,
    sharded,
    two,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import residency
from residency import park, unpark

# ------------------------------------------------------------------------------------- two ranks


@two
def fsdp2_trains_with_parkings_as_without() -> None:
    both_train_alike(sharded)
    both_train_alike(sharded, need=3000)


@two
def fsdp2_in_bfloat16_trains_with_parkings_as_without() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    both_train_alike(lambda: sharded(nn.LayerNorm, mp_policy=policy))


@two
def fsdp2_that_keeps_its_parameters_gathered_is_resharded_first() -> None:
    both_train_alike(lambda: sharded(reshard_after_forward=False))
    model = sharded(reshard_after_forward=False)
    shards = torch.accelerator.memory_allocated()
    with torch.no_grad():
        model(batch(0))
    assert torch.accelerator.memory_allocated() > shards
    park(model)
    assert all(not local(p).numel() or local(p).is_pinned() for p in model.parameters())
    assert all(type(p).__name__ == "DTensor" for p in model.parameters())
    unpark(model)


@two
def a_forward_of_a_parked_fsdp2_module_is_refused() -> None:
    model = sharded()
    park(model)
    for part in (model, model[2]):
        with pytest.raises(residency.RefusedError, match=r"call residency\.unpark"):
            part(batch(0) if part is model else batch(0) @ torch.ones(32, 40).to("sim"))
    names = r"^0\.weight, 0\.bias, 1\.weight and more of this FSDPSequential is parked"
    with pytest.raises(residency.RefusedError, match=names):
        model(batch(0))
    unpark(model)
    model(batch(0)).sum().backward()


@two
def fsdp2_within_its_backward_is_refused() -> None:
    model = sharded()
    errors = []

    def park_now(gradient: Tensor) -> None:
        try:
            park(model)
        except residency.RefusedError as error:
            errors.append(str(error))

    out = model[:2](batch(0))
    out.register_hook(park_now)
    model[2:](out).sum().backward()
    assert len(errors) == 1
    assert "park it between steps" in errors[0]


@two
def a_state_dict_goes_into_a_parked_fsdp2_module() -> None:
    source, target = sharded(), sharded()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    park(target)
    state = {k: v.cpu() for k, v in source.state_dict().items()}
    target.load_state_dict(state)
    unpark(target)
    assert equal(
        [local(p).cpu() for p in source.parameters()], [local(p).cpu() for p in target.parameters()]
    )
    for model in (source, target):
        model(batch(3)).sum().backward()
    left, right = ([local(p.grad).cpu() for p in m.parameters()] for m in (source, target))
    assert equal(left, right)


@two
def a_restored_state_waits_for_its_parked_fsdp2_module() -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0)).sum().backward()
    optimizer.step()
    with residency.Checkpointer(FOLDER / "waits") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).wait()
        park(model)
        fresh = torch.optim.AdamW(model.parameters())
        checkpointer.restore({"model": model, "optimizer": fresh})
    for is_parked in (True, False):
        moments = [local(each["exp_avg"]) for each in fresh.state.values()]
        assert [each.is_cpu for each in moments] == [is_parked] * len(moments)
        if is_parked:
            unpark(model)
    expected = [local(optimizer.state[p]["exp_avg"]).cpu() for p in model.parameters()]
    assert equal(expected, [each.cpu() for each in moments])


@two
def tensor_parallel_modules_train_with_parkings_as_without() -> None:
    def parallel() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)).to("sim")
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("sim", (NUM_RANKS,)), plan)

    both_train_alike(parallel)


@two
def data_parallel_modules_train_with_parkings_as_without() -> None:
    """The reducer's hooks are on nodes that the parameters must not lose."""
    for as_view in (False, True):

        def wrapped(as_view: bool = as_view) -> nn.Module:
            return DistributedDataParallel(block(), gradient_as_bucket_view=as_view)

        assert equal(_train_data_parallel(wrapped, True), _train_data_parallel(wrapped, False))


def _train_data_parallel(make: Callable[[], nn.Module], parked: bool) -> list[Tensor]:
    model: Any = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def between(owner: nn.Module, **settings: Any) -> None:
        if parked:
            before = torch.accelerator.memory_allocated()
            freed = park(owner, **settings)
            assert torch.accelerator.memory_allocated() == before - freed
            assert all(p.is_cpu for p in model.parameters())
            unpark(owner)

    for step in range(4):
        with model.no_sync():
            model(batch(2 * step)).square().sum().backward()
        between(model)
        between(model.module)
        model(batch(2 * step + 1)).square().sum().backward()
        between(model)
        optimizer.step()
        if parked and step % 2 == 0:
            between(model, gradients="drop")
            assert all(p.grad is None for p in model.parameters())
        else:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            between(model)
    for parameter in model.parameters():
        other = parameter.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(other.cpu(), parameter.cpu()), "the ranks have drifted apart"
    return bits(model, optimizer)
