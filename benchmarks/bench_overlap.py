"""Times a whole training step, resident, streamed and overlapped, on the simulated clock; and finds
the least capacity at which a run of random lengths finishes.

Shapes alone are computed (``dry=True``), so that real sizes fit this machine. The clock's link is
that of an H100 (55 GB/s each way, 101 GB/s both), its arithmetic 400 TFLOP/s. Each step takes a
fresh batch, reads a number in its forward pass, clips, and reads its loss: on a real card each of
these small copies waits for what is queued before it.
"""

from __future__ import annotations

import gc
import random
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import residency
from residency import sim
from residency._units import MIB

HOWS = ("streamed", "overlapped")
TOKENS = (2048, 4096, 8192, 16384)
DTYPES = {"4 B": torch.bfloat16, "8 B": torch.float32}
_BUCKET, _SLOTS = 32 * MIB, 3
_LINK, _BOTH_WAYS = 55_000_000_000, 101_000_000_000
_NUM_STEPS = 12  # from the third on, state overlaps; then it finds its rhythm
_LEAST_STEP = 96 * MIB  # of the search


class Block(nn.Module):
    """A layer of a language model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, -1, 64).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A language model with a loss in float32."""

    def __init__(self, width: int, num_layers: int, vocabulary: int, *, recomputes: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self._recomputes = recomputes

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for index, block in enumerate(self.blocks):
            if index == 1:
                (ids[0, 0] > 0).item()  # as transformers looks at a mask
            x = checkpoint(block, x, use_reentrant=False) if self._recomputes else block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(
    how: str, device: torch.device, lengths: list[int], *, dtype: torch.dtype, recomputes: bool
) -> tuple[float, float]:
    """Trains a step for each length, of one or two sequences; returns the clock's seconds of the
    last one, and the share of the state that was on the device when its step began.
    """
    with torch.device("meta"):
        model = Model(1024, 12, 32_000, recomputes=recomputes).to(dtype)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if how != "resident":
        stays = "auto" if how == "auto" else 0
        residency.offload_optimizer(
            optimizer, bucket=_BUCKET, slots=_SLOTS, overlap=how != "streamed", resident=stays
        )
    begun = 0.0
    for length in lengths:
        begun = sim.now_seconds()
        ids = torch.zeros((1, length), dtype=torch.long).pin_memory().to(device, non_blocking=True)
        loss = model(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    here = 0.0
    if isinstance(optimizer, residency.OffloadedOptimizer):
        figures = optimizer.statistics()
        here = figures.ahead_bytes / figures.home_bytes
    return sim.now_seconds() - begun, here


def seconds(how: str, tokens: int, dtype: torch.dtype) -> float:
    """Returns the clock's seconds of a step that has come to its rhythm."""
    clock = sim.Clock(
        h2d_bytes_per_second=_LINK,
        d2h_bytes_per_second=_LINK,
        duplex_bytes_per_second=_BOTH_WAYS,
        memory_bytes_per_second=3_300_000_000_000,
        operations_per_second=400e12,
    )
    device = sim.enable("300GiB", schedule="eager", dry=True, workspaces=False, clock=clock)
    torch.accelerator.empty_cache()
    found, _ = train(how, device, [tokens] * _NUM_STEPS, dtype=dtype, recomputes=False)
    gc.collect()
    return found


def limit(stock: float, dtype: torch.dtype) -> float:
    """Returns the least seconds of a step whose state goes home under the forward pass, a third of
    the passes, and comes under the backward pass, if there were room for all of it.

    Args:
        stock: The seconds of the resident step.
        dtype: Of the parameters and their state.
    """
    with torch.device("meta"):
        model = Model(1024, 12, 32_000, recomputes=False)
    state = 2 * dtype.itemsize * sum(each.numel() for each in model.parameters())
    left = sorted(max(state - _LINK * share * stock, 0) for share in (1 / 3, 2 / 3))
    return stock + left[0] / (_BOTH_WAYS / 2) + (left[1] - left[0]) / _LINK


def least_capacity(how: str, *, recomputes: bool, low: int, high: int) -> tuple[int, float]:
    """Returns the least capacity in bytes, to 96 MiB, at which 10 steps of random lengths finish,
    and the share of the state that was on the device before the last one's step.
    """
    numbers = random.Random(0)
    lengths = [numbers.randint(2048, 8192) for _ in range(10)]
    share = 0.0
    while high - low > _LEAST_STEP:
        middle = (low + high) // 2 // (32 * MIB) * 32 * MIB
        device = sim.enable(middle, schedule="eager", dry=True, workspaces=False)
        torch.accelerator.empty_cache()
        try:
            _, share = train(how, device, lengths, dtype=torch.bfloat16, recomputes=recomputes)
            high = middle
        except torch.OutOfMemoryError:
            low = middle
        gc.collect()
    return high, share


def main() -> None:
    """Prints both tables."""
    torch.set_num_threads(1)
    print("A step with its passes, as a multiple of the resident one; simulated clock, 55 GB/s.")
    titles = "".join(f"{how:>13}" for how in (*HOWS, "limit"))
    print(f"{'state':6}{'tokens':>8}{'resident':>12}{titles}")
    for name, dtype in DTYPES.items():
        for tokens in TOKENS:
            stock = seconds("resident", tokens, dtype)
            ratios = [seconds(how, tokens, dtype) / stock for how in HOWS]
            ratios.append(limit(stock, dtype) / stock)
            row = "".join(f"{ratio:>11.3f} x" for ratio in ratios)
            print(f"{name:6}{tokens:>8}{stock * 1e3:>9.1f} ms{row}", flush=True)
    if "--time" in sys.argv:
        return
    print("Least capacity at which ten steps of 2,048 to 8,192 tokens finish (bfloat16).")
    for recomputes in (False, True):
        for how in ("resident", *HOWS):
            low, high = (1500, 6000) if recomputes else (2500, 9000)
            least, share = least_capacity(
                how, recomputes=recomputes, low=low * MIB, high=high * MIB
            )
            passes = "checkpointed" if recomputes else "plain"
            print(f"{passes:14}{how:12}{least / MIB:>8.0f} MiB   {share:.0%} here", flush=True)


if __name__ == "__main__":
    main()
