"""Random trainings with the first FSDP, whose parameters are one flat tensor of each module: as
JSON, and run with torch's memory figures.
"""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils import _pytree as pytree

import residency

_WIDTHS = [16, 31, 48, 64, 128]
_MOST = 240_000  # elements: what is above 1 MiB may get blocks that are longer than itself
BATCH = 1


def draw(chance: random.Random) -> dict[str, Any]:
    """Draws one training."""
    strategy = chance.choice(["FULL_SHARD"] * 3 + ["SHARD_GRAD_OP"] * 2 + ["NO_SHARD"])
    # What is not sharded and offloaded stays on the device in torch 2.13, which warns of it.
    offloads = strategy != "NO_SHARD" and chance.random() < 0.2
    width = chance.choice(_WIDTHS)
    hidden = [chance.choice([*_WIDTHS, 200, 500, 800]) for _ in range(chance.randint(1, 5))]
    while sum(hidden) * width * 2 > _MOST:
        hidden.pop()
    return {
        "width": width,
        "hidden": hidden or [100],
        "norms": chance.random() < 0.5,
        "wrap": chance.choice(["blocks", "blocks", "linears", "both", "none"]),
        "strategy": strategy,
        "orig": chance.random() < 0.5,
        "precision": chance.choice(["", "", "low", "low, whole sums", "low sums"]),
        "offloads": offloads,
        "limits": chance.random() < 0.7,
        "forward_prefetch": chance.random() < 0.3,
        "backward_prefetch": chance.choice(["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", ""]),
        "accumulates": not offloads and chance.random() < 0.3,
        "optimizer": chance.choice(["SGD", "AdamW"]),
    }


class Block(nn.Module):
    """Two layers and a norm, beside what goes in."""

    def __init__(self, width: int, hidden: int, has_norm: bool) -> None:
        """Makes the layers."""
        super().__init__()
        self.wide = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width) if has_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the layers make."""
        made: torch.Tensor = x + self.narrow(self.wide(self.norm(x)))
        return made


def model_of(case: dict[str, Any]) -> nn.Sequential:
    """Makes the model of a case on the host."""
    width = case["width"]
    blocks = [Block(width, hidden, case["norms"]) for hidden in case["hidden"]]
    return nn.Sequential(nn.LayerNorm(width), *blocks, nn.Linear(width, 7))


def units_of(case: dict[str, Any]) -> list[list[int]]:
    """Returns the elements of the parameters of each unit: the root's, and those of its own."""
    kinds: dict[str, tuple[type[nn.Module], ...]] = {
        "blocks": (Block,),
        "linears": (nn.Linear,),
        "both": (Block, nn.Linear),
        "none": (),
    }
    units: list[list[int]] = []

    def collect(module: nn.Module, unit: list[int]) -> None:
        unit += [each.numel() for each in module.parameters(recurse=False)]
        for child in module.children():
            if isinstance(child, kinds[case["wrap"]]):
                units.append([])
                collect(child, units[-1])
            else:
                collect(child, unit)

    root: list[int] = []
    with torch.device("meta"):
        collect(model_of(case), root)
    return [unit for unit in [root, *units] if unit]


def _wrapped(case: dict[str, Any]) -> FullyShardedDataParallel:
    kinds = {"blocks": {Block}, "linears": {nn.Linear}, "both": {Block, nn.Linear}}
    precisions = {
        "low": {"param_dtype": torch.bfloat16},
        "low, whole sums": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        "low sums": {"reduce_dtype": torch.bfloat16},
    }
    chosen = kinds.get(case["wrap"])
    prefetch = case["backward_prefetch"]
    precision = precisions.get(case["precision"])
    return FullyShardedDataParallel(
        model_of(case),
        device_id=torch.device("cuda", 0),
        auto_wrap_policy=ModuleWrapPolicy(chosen) if chosen else None,
        sharding_strategy=ShardingStrategy[case["strategy"]],
        use_orig_params=case["orig"],
        mixed_precision=MixedPrecision(**precision) if precision else None,
        cpu_offload=CPUOffload(offload_params=case["offloads"]),
        limit_all_gathers=case["limits"],
        forward_prefetch=case["forward_prefetch"],
        backward_prefetch=BackwardPrefetch[prefetch] if prefetch else None,
    )


def _bytes_of(which: str) -> int:
    # Blocks that another stream has still to use are no tensor's any more, and count as free.
    return int(torch.cuda.memory_stats()[f"allocated_bytes.all.{which}"])


def run(case: dict[str, Any], name: str) -> list[int]:
    """Trains, and returns the bytes that were held and the peaks, step by step."""
    found: list[int] = []

    def note() -> None:
        torch.cuda.synchronize()
        found.extend((_bytes_of("current"), _bytes_of("peak")))
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    with residency.phase(name):
        model = _wrapped(case)
        note()
        made = getattr(torch.optim, case["optimizer"])(model.parameters(), foreach=False)
        for _ in range(3):
            for is_last in (False, True) if case["accumulates"] else (True,):
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss = model(torch.zeros(BATCH, case["width"], device="cuda")).sum()
                    note()
                    loss.backward()
                    note()
                    del loss
            made.step()
            note()
            made.zero_grad()
    # A module may live until autograd's thread has forgotten its last pass; its bytes need not.
    flat = [each._flat_param for each in FullyShardedDataParallel.fsdp_modules(model)]
    whole = [*flat, *(each.grad for each in flat if each is not None)]
    for each in (*whole, *model.parameters(), *pytree.tree_leaves(dict(made.state))):
        if isinstance(each, torch.Tensor) and each.is_cuda:
            each.untyped_storage().resize_(0)
    del model, made
    gc.collect()
    return found
