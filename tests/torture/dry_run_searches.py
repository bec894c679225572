"""Writes scripts for the searches of a dry run, and for one rank of several.

They are small and alike; what differs is sizes, the optimizer, and how ranks share a model. A
script records torch's own peak, as those of ``dry_run_scripts.py`` do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.torture.dry_run_scripts import RECORD, rounded

HEAD = (
    '''"""A training script."""
import argparse, json, os, sys, traceback
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()
'''
    + RECORD
)

LOOP = """
    done = 0
    for i in range(9):
        x = torch.randn(args.batch_size, {width}, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        mark()
        optimizer.step()
        mark("optimizer step")
        optimizer.zero_grad()
        done += 1
    RECORD["done"] = done
"""


@dataclass(frozen=True)
class Plain:
    """A stack of linear layers on one device."""

    width: int
    depth: int
    optimizer: str
    added: str = ""

    def text(self) -> str:
        return f"""{HEAD}
with Guard():
    model = nn.Sequential(*[nn.Sequential(nn.Linear({self.width}, {self.width}), nn.ReLU())
                            for _ in range({self.depth})]).cuda()
    optimizer = torch.optim.{self.optimizer}(model.parameters(), lr=1e-3, foreach=False)
    {self.added}
{LOOP.format(width=self.width)}
"""

    @property
    def parameters(self) -> int:
        return self.depth * (rounded(self.width**2 * 4) + rounded(self.width * 4))


@dataclass(frozen=True)
class Ranked:
    """A stack of linear layers that several ranks share, and what the first rank holds."""

    width: int
    depth: int
    ranks: int
    shards: bool
    states: int

    @classmethod
    def drawn(cls, chance: random.Random) -> Ranked:
        width = chance.choice([130, 256, 300, 511])
        return cls(width, chance.randint(1, 6), chance.choice([2, 3, 4, 8]),
                   chance.choice([True, False]), chance.choice([0, 1, 2]))  # fmt: skip

    def text(self) -> str:
        shared = "model = nn.parallel.DistributedDataParallel(model, device_ids=[local])"
        if self.shards:
            shared = "[fully_shard(each) for each in model]\n    fully_shard(model)"
        optimizer = ["SGD(model.parameters(), lr=1e-3)", "RMSprop(model.parameters())",
                     "AdamW(model.parameters())"][self.states]  # fmt: skip
        return f"""{HEAD}
with Guard():
    local = int(os.environ["LOCAL_RANK"])
    assert int(os.environ["WORLD_SIZE"]) == {self.ranks}
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    model = nn.Sequential(*[nn.Linear({self.width}, {self.width})
                            for _ in range({self.depth})]).cuda()
    {shared}
    optimizer = torch.optim.{optimizer}
{LOOP.format(width=self.width)}
    dist.destroy_process_group()
"""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Returns the rows and columns of one layer that the first rank holds."""
        rows = -(-self.width // self.ranks) if self.shards else self.width
        return [(rows, self.width), (rows, 1)]

    @property
    def parameters(self) -> int:
        return self.depth * sum(rounded(rows * columns * 4) for rows, columns in self.shapes)

    @property
    def raw(self) -> int:
        return self.depth * sum(rows * columns * 4 for rows, columns in self.shapes)
