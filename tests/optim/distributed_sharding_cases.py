"""Steps of sharded parameters: FSDP2, HSDP and tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from distributed_lab import (
    DEVICE,
    ELEMENT_WISE,
    Run,
    assert_same,
    both_train_alike,
    first,
    four,
    matrices,
    pair,
    sharded,
    tensor_parallel,
    two_dimensional,
)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard

import residency

# ------------------------------------------------------------------------------------------ FSDP2


@first
@pair
def every_kind_of_optimizer_on_uneven_and_empty_shards() -> None:
    for name in ELEMENT_WISE:
        both_train_alike(sharded, name)


@pair
def settings_of_the_offload() -> None:
    for settings in (
        {"slots": 1},
        {"slots": 3, "bucket": 1 << 20},
        {"resident": 4096},
        {"resident": "1MiB"},
        {"pin": False},
    ):
        both_train_alike(sharded, "AdamW", **settings)


@first
@pair
def clipped_and_missing_gradients() -> None:
    both_train_alike(sharded, "AdamW", train={"clip": True})
    both_train_alike(sharded, "AdamW", train={"missing": True})
    both_train_alike(sharded, "SGD", train={"clip": True, "missing": True}, resident=2048)


@pair
def computing_in_bfloat16() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make_model() -> nn.Module:
        return sharded(mp_policy=policy)

    for name in ("AdamW", "fused"):
        both_train_alike(make_model, name, train={"clip": True})


@first
@pair
def muon_steps_whole_shards() -> None:
    both_train_alike(sharded, "Muon", chosen=matrices)
    both_train_alike(sharded, "Muon", chosen=matrices, slots=1, bucket=1 << 20)


@pair
def adafactor_is_refused_before_anything_moves() -> None:
    optimizer = torch.optim.Adafactor(sharded().parameters())
    with pytest.raises(residency.RefusedError, match="Adafactor has DTensor parameters"):
        residency.offload_optimizer(optimizer)
    assert type(optimizer) is torch.optim.Adafactor


@first
@pair
def parameters_that_fsdp_keeps_on_the_host_stream_nothing() -> None:
    def make_model() -> nn.Module:
        return sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))

    plain, ours = (Run(make_model, offload=offload) for offload in (False, True))
    for run in (ours, plain):
        run.train(range(3), clip=True)
    assert_same(ours, plain)
    assert ours.optimizer.statistics().copied_to_device_bytes == 0


@pair
def an_overlapped_step_of_shards_ends_at_the_same_bits() -> None:
    for resident in (0, "auto"):
        settings = {"overlap": True, "resident": resident, "slots": 1}
        plain = Run(sharded, "fused", offload=False)
        ours = Run(sharded, "fused", offload=True, **settings)
        for run in (ours, plain):
            run.train(range(8), clip=True)
            run.train(range(8, 11), missing=True)
        assert any(module._forward_pre_hooks for module in ours.model.modules())
        assert_same(ours, plain)


@pair
def states_of_shards_leave_the_device() -> None:
    ours = Run(sharded, offload=True)
    ours.train(range(1))
    for parameter in ours.parameters:
        state = ours.optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            local = state[key].to_local()
            assert local.is_cpu
            assert local.is_pinned() or not local.numel()
            assert local.shape == parameter.to_local().shape


# ---------------------------------------------------------------------- HSDP and tensor parallelism


@pair
def replicas_of_shards() -> None:
    for shape in ((2, 1), (1, 2)):
        both_train_alike(lambda shape=shape: sharded(shape), "AdamW", train={"clip": True})


@pair
def tensor_parallel_with_partial_gradients() -> None:
    model = tensor_parallel()
    model(torch.randn(4, 33).to(DEVICE)).sum().backward()
    kinds = {type(p) for q in model.parameters() for p in q.grad.placements}
    assert Partial in kinds, "no gradient is a partial sum; the case shows nothing"
    assert {q.placements for q in model.parameters()} >= {(Replicate(),), (Shard(0),), (Shard(1),)}
    for name in ELEMENT_WISE:
        both_train_alike(tensor_parallel, name)
    both_train_alike(tensor_parallel, "AdamW", resident=4096, slots=1)
    both_train_alike(tensor_parallel, "Muon", chosen=matrices)


@four
def shards_of_tensor_parallel_shards() -> None:
    for name in ("AdamW", "fused", "SGD"):
        both_train_alike(two_dimensional, name)


@four
def four_shards_and_two_replicas_of_two() -> None:
    for shape in ((4,), (2, 2)):
        both_train_alike(lambda shape=shape: sharded(shape), "AdamW", train={"clip": True})
