"""Times a LoRA step whose base streams from the host, beside a resident one, on the simulated
clock; and finds the least capacity at which a run of random lengths finishes.

Shapes alone are computed (``dry=True``), so that real sizes fit this machine. The device has 400
TFLOP/s; the link 55 GB/s, as an H100's, or 25. The rule is the arithmetic of the how-to: a block
takes the longer of its computation and its copy, in each pass. The computation is taken from the
resident run, the copy from the bytes and the link.
"""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import residency
from residency import sim
from residency._units import MIB

LINKS = (55_000_000_000, 25_000_000_000)
TOKENS = (1024, 2048, 4096, 8192)
_WIDTH, _NUM_BLOCKS, _WORDS, _RANK = 2048, 12, 8000, 16
_NUM_STEPS = 4
_LEAST_STEP = 32 * MIB  # of the search


class Lora(nn.Module):
    """A frozen linear layer and the two factors that are trained beside it."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.base = nn.Linear(columns, rows, bias=False).requires_grad_(False)
        self.down = nn.Linear(columns, _RANK, bias=False)
        self.up = nn.Linear(_RANK, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A layer of a language model, with a LoRA at its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = Lora(3 * width, width), nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for part in (self.norms, self.out, self.up, self.down):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, -1, 128).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A language model with a frozen base; notes when each pass over its blocks begins and ends."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(_WIDTH) for _ in range(_NUM_BLOCKS))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False).requires_grad_(False)
        self._recomputes = recomputes

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._recomputes else block(x)
        logits = self.head(x).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(
    device: torch.device, lengths: list[int], *, slots: int, recomputes: bool
) -> tuple[float, float, float, Any]:
    """Trains a step for each length.

    Returns:
        The clock's seconds of the last step, of its forward pass and of its backward pass, and the
        stream's statistics, None without slots.
    """
    with torch.device("meta"):
        model = Model(recomputes=recomputes).to(torch.bfloat16)
    stream = None
    if slots:
        model.to_empty(device="cpu")
        stream = residency.stream_frozen(model, slots=slots)
    else:
        model.to_empty(device=device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    begun = middle = end = 0.0
    for length in lengths:
        torch.accelerator.synchronize()
        begun = sim.now_seconds()
        loss = model(torch.zeros((1, length), dtype=torch.long, device=device))
        torch.accelerator.synchronize()
        middle = sim.now_seconds()
        loss.backward()
        torch.accelerator.synchronize()
        end = sim.now_seconds()
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
    figures = stream and stream.statistics()
    return sim.now_seconds() - begun, middle - begun, end - middle, figures


def seconds(tokens: int, link: int, *, slots: int, recomputes: bool) -> Any:
    """Returns what `train` does of a step that has come to its rhythm."""
    clock = sim.Clock(
        h2d_bytes_per_second=link,
        d2h_bytes_per_second=link,
        memory_bytes_per_second=3_300_000_000_000,
        operations_per_second=400e12,
    )
    device = sim.enable("300GiB", schedule="eager", dry=True, workspaces=False, clock=clock)
    torch.accelerator.empty_cache()
    found = train(device, [tokens] * _NUM_STEPS, slots=slots, recomputes=recomputes)
    gc.collect()
    return found


def by_rule(resident: Any, unit_bytes: int, link: int, slots: int) -> float:
    """Returns the seconds of a step in which a block takes the longer of computation and copy."""
    step, forward, backward, _ = resident
    copy = unit_bytes / link
    num_copied = _NUM_BLOCKS - slots  # in each pass: the others are there at the turn
    more = sum(max(copy - each / _NUM_BLOCKS, 0.0) for each in (forward, backward))
    return float(step + num_copied * more)


def least_capacity(*, slots: int, recomputes: bool) -> int:
    """Returns the least bytes, to 32 MiB, at which 10 steps of random lengths finish."""
    numbers = random.Random(0)
    lengths = [numbers.randint(1024, 4096) for _ in range(10)]
    low, high = 300 * MIB, 6000 * MIB
    while high - low > _LEAST_STEP:
        middle = (low + high) // 2 // (16 * MIB) * 16 * MIB
        device = sim.enable(middle, schedule="eager", dry=True, workspaces=False)
        torch.accelerator.empty_cache()
        try:
            train(device, lengths, slots=slots, recomputes=recomputes)
            high = middle
        except torch.OutOfMemoryError:
            low = middle
        gc.collect()
    return high


def main() -> None:
    """Prints both tables."""
    torch.set_num_threads(1)
    print("A LoRA step with a bf16 base that streams, as a multiple of the resident one.")
    print(
        f"{'link':8}{'passes':14}{'tokens':>7}{'resident':>12}{'2 slots':>10}{'rule':>10}"
        f"{'3 slots':>10}{'waits':>11}{'frozen bytes here':>24}"
    )
    for link in LINKS:
        for recomputes in (False, True):
            for tokens in TOKENS:
                stock = seconds(tokens, link, slots=0, recomputes=recomputes)
                two, three = (seconds(tokens, link, slots=n, recomputes=recomputes) for n in (2, 3))
                figures = two[3]
                rule = by_rule(stock, figures.slot_bytes, link, 2) / stock[0]
                here, home = figures.num_slots * figures.slot_bytes, figures.home_bytes
                passes = "checkpointed" if recomputes else "plain"
                print(
                    f"{link / 1e9:<3.0f}GB/s {passes:14}{tokens:>7}"
                    f"{1e3 * stock[0]:>9.1f} ms{two[0] / stock[0]:>8.3f} x{rule:>8.3f} x"
                    f"{three[0] / stock[0]:>8.3f} x"
                    f"{1e3 * figures.exposed_seconds / _NUM_STEPS:>8.1f} ms"
                    f"{here / MIB:>11.0f} of {home / MIB:.0f} MiB",
                    flush=True,
                )
    if "--time" in sys.argv:
        return
    print("Least capacity at which ten steps of 1,024 to 4,096 tokens finish.")
    for recomputes in (False, True):
        least = [least_capacity(slots=slots, recomputes=recomputes) for slots in (0, 2, 3)]
        texts = (
            f"{how} {each / MIB:.0f} MiB"
            for how, each in zip(("resident", "2 slots", "3 slots"), least, strict=True)
        )
        print(f"{'checkpointed' if recomputes else 'plain':14}" + ", ".join(texts), flush=True)


if __name__ == "__main__":
    main()
