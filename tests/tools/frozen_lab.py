"""Models with frozen blocks and trained adapters, and runs of them, resident and streamed."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import residency
from residency import _device

WIDTH, LENGTH, HEADS = 32, 8, 4
Step = Callable[[nn.Module, torch.device], list[Tensor]]
Units = Callable[[Any], Iterable[nn.Module]]


class Lora(nn.Module):
    """A linear layer and the two factors that are trained beside it."""

    def __init__(self, base: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        rows, columns = base.out_features, base.in_features
        self.base = base
        self.down = nn.Parameter(torch.randn(4, columns) * 0.1)
        self.up = nn.Parameter(torch.randn(rows, 4) * 0.1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        beside = functional.linear(self.dropout(x), self.down)
        return self.base(x) + functional.linear(beside, self.up)


class Block(nn.Module):
    """A layer of a language model: what it saves for backward is of every kind, a view of a weight
    (Linear), the weight itself (the norms), and none.
    """

    def __init__(self, *, dropout: float = 0.0, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.q, self.v = (Lora(nn.Linear(WIDTH, WIDTH), dropout=dropout) for _ in range(2))
        self.k, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norms[0](x)
        q, k, v = (
            part(y).view(batch, length, HEADS, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(batch, length, width)) * self.scale
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Net(nn.Module):
    """Blocks, each of which may be computed anew in the backward pass."""

    def __init__(
        self,
        num_blocks: int = 6,
        *,
        dropout: float = 0.0,
        use_reentrant: bool | None = None,
        hidden: Sequence[int] = (),
    ) -> None:
        super().__init__()
        sizes = [*hidden, *[4 * WIDTH] * num_blocks][:num_blocks]
        self.blocks = nn.ModuleList(Block(dropout=dropout, hidden=size) for size in sizes)
        self.head = nn.Linear(WIDTH, 8)
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self._use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self._use_reentrant)
        return self.head(x)


class Packed(nn.Module):
    """A linear layer whose weight is two 4-bit values a byte.

    Args:
        how: Who computes with it: plain operators, a function that saves it, or one that keeps it
            as an attribute of its context, as bitsandbytes does.
    """

    def __init__(self, in_features: int, out_features: int, how: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self._how = in_features, out_features, how
        packed = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(out_features, 1) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        if self._how == "plain":
            return functional.linear(x, unpacked(self.packed, self.scale))
        return _Product.apply(x, self.packed, self.scale, self._how == "hidden")


def unpacked(packed: Tensor, scale: Tensor) -> Tensor:
    pairs = torch.stack([packed & 15, packed >> 4], -1)
    return (pairs.flatten(1).float() - 8) * scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, is_hidden: bool) -> Tensor:
        if is_hidden:
            ctx.hidden = (packed.view(packed.shape), scale)
        else:
            ctx.save_for_backward(packed, scale)
        ctx.is_hidden = is_hidden
        return functional.linear(x, unpacked(packed, scale))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ unpacked(*(ctx.hidden if ctx.is_hidden else ctx.saved_tensors)), *[
            None
        ] * 3


def freeze(model: nn.Module) -> Any:
    """Freezes all but the factors of `Lora`."""
    adapters = {p for m in model.modules() if isinstance(m, Lora) for p in (m.down, m.up)}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in adapters)
    return model


def net(**options: Any) -> Any:
    return freeze(Net(**options))


def quantized(how: str, **options: Any) -> Any:
    model = Net(**options)
    for block in model.blocks:
        block.up = Packed(WIDTH, 4 * WIDTH, how)
        block.down = Packed(4 * WIDTH, WIDTH, how)
        block.q.base = Packed(WIDTH, WIDTH, how)
    return freeze(model)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def frozen(stream: Any, model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that stream."""
    modules = [model.get_submodule(name) for name in stream.units]
    return [p for module in modules for p in module.parameters() if not p.requires_grad]


def batch(device: torch.device, *, rows: int = 2) -> Tensor:
    return torch.randn(rows, LENGTH, WIDTH).to(device).requires_grad_()


def passes(
    model: nn.Module,
    device: torch.device,
    *,
    forward: Callable[[Tensor], Tensor] | None = None,
    count: int = 2,
) -> list[Tensor]:
    """Makes forward and backward passes; returns losses and gradients."""
    found: list[Tensor] = []
    for _ in range(count):
        model.zero_grad()
        loss = (model if forward is None else forward)(batch(device)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in trained(model) if p.grad is not None)]
    return found


@dataclass
class Run:
    """What a run has left.

    Attributes:
        results: Tensors on the host.
        model: The model.
        stream: None of a resident run.
        peak_bytes: The most that was allocated, beyond what was before.
        peak_reserved_bytes: The most that the allocator held of the device, likewise.
    """

    results: list[Tensor]
    model: Any
    stream: Any
    peak_bytes: int
    peak_reserved_bytes: int


def run(
    make: Callable[[], Any],
    step: Step,
    device: torch.device,
    *,
    streams: bool,
    units: Units | None = None,
    slots: int = 2,
) -> Run:
    """Makes a model, streamed or resident, and a step of it, always from the same seeds."""
    _clear()
    before = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    _seed(0)
    model = make()
    stream = None
    if streams:
        named = None if units is None else units(model)
        stream = residency.stream_frozen(model, units=named, slots=slots)
    else:
        model.to(device)
    _clear()
    torch.accelerator.reset_peak_memory_stats()
    _seed(1)
    results = [t.detach().cpu() for t in step(model, device)]
    torch.accelerator.synchronize()
    peaks = torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()
    return Run(results, model, stream, peaks[0] - before[0], peaks[1] - before[1])


def assert_alike(
    make: Callable[[], Any],
    step: Step,
    device: torch.device,
    *,
    units: Units | None = None,
    slots: int = 2,
) -> Run:
    """Demands that a streamed run has a resident one's bits, and its parameters are at home after;
    returns the streamed one.
    """
    expected = run(make, step, device, streams=False).results
    streamed = run(make, step, device, streams=True, units=units, slots=slots)
    assert expected
    assert are_same(streamed.results, expected)
    assert all(p.is_cpu for p in frozen(streamed.stream, streamed.model))
    return streamed


def are_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Returns whether tensors on the host are the same, bit for bit."""
    return len(left) == len(right) and all(
        a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        for a, b in zip(left, right, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _clear() -> None:
    gc.collect()
    torch.accelerator.synchronize()
    _device.clear_workspaces(torch.accelerator.current_accelerator())
    torch.accelerator.empty_cache()


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
