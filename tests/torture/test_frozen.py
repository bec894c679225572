"""Random trainings over streamed frozen bases, judged bit for bit by stock torch's resident run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torture.frozen_program import Run
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_programs import held, nothing_left, same

import residency

pytestmark = [
    pytest.mark.sim_device(capacity=1 << 28, schedule=["late", "overtake"]),
    pytest.mark.filterwarnings("ignore:Detected call of:UserWarning"),  # a first step was skipped
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),  # as in stock
]


def compare(stock: Any, ours: Any) -> None:
    assert len(stock.trace) == len(ours.trace)
    for (key, theirs), (_, mine) in zip(stock.trace, ours.trace, strict=True):
        same(mine, theirs, f"{key} of {ours.log}")


def test_streaming_changes_no_bit(
    sim_device: torch.device, torture: Callable[..., None], tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        seed = chance.randrange(1 << 30)
        was = torch.backends.mha.get_fastpath_enabled()
        try:
            with nothing_left(chance):
                modes = False, True
                stock, ours = (Run(seed, sim_device, tmp_path, mode).all() for mode in modes)
                compare(stock, ours)
        finally:
            torch.backends.mha.set_fastpath_enabled(was)

    torture(judge)


@pytest.mark.filterwarnings("ignore")  # those of transformers and PEFT
def test_adapters_of_peft_keep_their_bits(
    sim_device: torch.device, torture: Callable[..., None]
) -> None:
    pytest.importorskip("peft")
    from tests.torture.frozen_peft import PeftRun

    def judge(chance: random.Random) -> None:
        seed = chance.randrange(1 << 30)
        stock, ours = (PeftRun(seed, sim_device, streamed).all() for streamed in (False, True))
        compare(stock, ours)

    torture(judge)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    def __init__(self, width: int, hidden: list[int], dtype: torch.dtype, again: str) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(width, width), again
        self.blocks = nn.ModuleList(Block(width, each) for each in hidden).requires_grad_(False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            reentrant = self.again == "reentrant"
            x = checkpoint(block, x, use_reentrant=reentrant) if self.again else block(x)
        return x


def peak(model: Chain, x: torch.Tensor, base: int) -> int:
    optimizer = torch.optim.AdamW(model.first.parameters())
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(3):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.accelerator.max_memory_allocated() - base


@pytest.mark.sim_device(workspaces=False)
def test_the_peak_falls_by_what_the_page_says(
    sim_device: torch.device, torture: Callable[..., None]
) -> None:
    def judge(chance: random.Random) -> None:
        depth, slots, width = chance.randint(3, 9), chance.randint(2, 5), chance.choice([32, 128])
        hidden = [chance.choice([64, 100, 513])] * depth
        if chance.random() < 0.4:
            hidden = [chance.choice([64, 100, 513]) for _ in range(depth)]
        dtype = chance.choice([torch.float32, torch.bfloat16])
        again = chance.choice(["", "plain", "reentrant"])
        x = torch.randn(chance.choice([4, 200]), width, dtype=dtype).to(sim_device)
        before, peaks = held(), []
        for streamed in (False, True):
            model = Chain(width, hidden, dtype, again)
            units = [
                sum(-(-p.nbytes // 512) * 512 for p in block.parameters()) for block in model.blocks
            ]
            saved = sum(units) - slots * max(units)
            if not streamed:
                model.to(sim_device)
            else:
                if saved <= 0:
                    with pytest.raises(residency.RefusedError, match="nothing would be freed"):
                        residency.stream_frozen(model, units=["blocks"], slots=slots)
                    return
                stream = residency.stream_frozen(model, units=["blocks"], slots=slots)
            peaks.append(peak(model, x, before[0]))
            if streamed:
                found = stream.statistics()
                assert found.saved_bytes == saved, found
                assert (found.home_bytes, found.slot_bytes) == (sum(units), max(units)), found
                assert found.here_bytes <= slots * max(units), found
                del stream
            del model
            assert held() == before, (held(), before)
        assert peaks[0] - peaks[1] == saved, (peaks, saved, depth, slots, hidden)

    torture(judge)
