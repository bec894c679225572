"""Random models with a frozen base: own blocks, transformers with PEFT, diffusers.

Each maker draws from a generator, so that two calls with equal generators give equal models.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

OWN = ("mlp", "views", "moe", "conv", "norms", "context", "attention", "rnn", "weight_norm")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def some(chance: random.Random, probability: float) -> bool:
    return chance.random() < probability


class Product(torch.autograd.Function):
    """Keeps its weight as an attribute, as bitsandbytes' 4-bit product does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.kind = weight, x.dtype
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (gradients[0] @ ctx.weight.to(gradients[0].dtype)).to(ctx.kind), None


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ZeroDivisionError


class Mlp(nn.Module):
    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        hidden = chance.choice([1, 7, width, 2 * width, 3 * width + 1])
        self.up = nn.Linear(width, hidden, bias=some(chance, 0.5))
        self.down = nn.Linear(hidden, width)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Views(nn.Module):
    """Uses its weights through views, casts that change nothing, and turned in memory."""

    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(width, width).t() / width)
        self.strided = nn.Parameter(torch.randn(width, 2 * width)[:, ::2] / width)
        self.scale = nn.Parameter(torch.randn(1) if some(chance, 0.5) else torch.randn(()))
        self.gamma = nn.Parameter(torch.randn(width))
        self.flat = nn.Parameter(torch.randn(2 * width * width) / width)
        self.kind = chance.randrange(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.flat.view(2, x.shape[-1], -1).unbind()
        x = x * self.gamma[None, :] + x @ self.turned * self.scale
        x = torch.tanh(x @ first) * torch.sigmoid(functional.linear(x, second.to(x.dtype)))
        weight = (self.strided, self.strided.detach(), self.strided.data, self.strided.view_as)
        last = weight[self.kind] if self.kind < 3 else self.strided.view_as(self.strided)
        return x + torch.addmm(self.gamma.expand_as(x), x, last.t(), alpha=0.5)


class Moe(nn.Module):
    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, chance.choice([2, 3]), bias=False)
        self.experts = nn.ModuleList(Mlp(chance, width) for _ in range(self.router.out_features))
        self.stacked = nn.Parameter(torch.randn(self.router.out_features, width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.einsum("bw,ewv->bev", x, self.stacked).mul(weights[..., None]).sum(1)
        for index, expert in enumerate(self.experts):
            chosen = (weights.argmax(-1) == index).nonzero()[:, 0]
            out = out.index_add(0, chosen, expert(x[chosen]) * weights[chosen, index, None])
        return out


class Conv(nn.Module):
    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, chance.choice([2, 5]), 3, padding=1)
        self.norm = nn.BatchNorm1d(self.conv.out_channels)
        self.back = nn.ConvTranspose1d(self.conv.out_channels, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(functional.relu(self.norm(self.conv(x[:, None]))))[:, 0]


class Norms(nn.Module):
    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if some(chance, 0.5) else nn.RMSNorm(width)
        self.group = nn.GroupNorm(1, width)
        self.act = nn.PReLU(width if some(chance, 0.5) else 1)
        self.mix = nn.Bilinear(width, width, width)
        self.register_buffer("table", torch.randn(width))
        self.register_buffer("hidden", torch.randn(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.group(self.norm(x) + self.table))
        return x + self.mix(x, x) + self.hidden


class Context(nn.Module):
    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.drop = nn.Dropout(chance.choice([0.0, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(functional.silu(Product.apply(x, self.weight)))


class Attention(nn.Module):
    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        first = some(chance, 0.5)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.layer.norm_first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, None].expand(-1, 2, -1))[:, 0]


class Rnn(nn.Module):
    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        self.cell = chance.choice([nn.GRUCell, nn.RNNCell])(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x, self.cell(x))


class WeightNorm(nn.Module):
    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.plain = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(torch.tanh(self.normed(x)))


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": Mlp,
    "views": Views,
    "moe": Moe,
    "conv": Conv,
    "norms": Norms,
    "context": Context,
    "attention": Attention,
    "rnn": Rnn,
    "weight_norm": WeightNorm,
}


class Lora(nn.Module):
    """Has a frozen layer inside, and trains a product of two small ones beside it."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(2, base.in_features, dtype=dtype) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, 2, dtype=dtype) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x.to(self.a.dtype) @ self.a.t() @ self.b.t()).to(x.dtype)


class Net(nn.Module):
    """Is a chain of blocks with a few trained parts, and does as its settings say."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.dtype = chance.choice(DTYPES)
        width = self.width = chance.choice([4, 8, 32, 62])
        depth = chance.randint(3, 7)
        kinds = [chance.choice(OWN)] * depth if some(chance, 0.4) else chance.choices(OWN, k=depth)
        made = [MAKERS[kind](chance, width) for kind in kinds]
        self.same = len(set(kinds)) == 1
        self.description = f"{kinds} {width} {self.dtype}"
        if some(chance, 0.2):
            made = [nn.ModuleDict({"inner": each}) for each in made]
        self.blocks = nn.ModuleList(made)
        self.embed, self.head = nn.Linear(width, width), nn.Linear(width, width)
        if some(chance, 0.2):
            self.head.weight = self.embed.weight
        plain = [m for m in self.blocks.modules() if isinstance(m, Mlp) and m.up.bias is not None]
        if plain and some(chance, 0.2):  # tied to a module outside of the units
            self.tied = nn.Linear(1, 1)
            self.tied.weight = plain[0].up.weight
        self.to(self.dtype).requires_grad_(False)
        self.train_some(chance)
        self.order, self.skip, self.recompute = list(range(depth)), [], ""
        self.fail, self.fail_at = "", 0

    def train_some(self, chance: random.Random) -> None:
        ways = chance.sample(["lora", "bias", "head", "embed", "whole"], chance.choice([1, 1, 2]))
        for module in list(self.blocks.modules()):
            for name, child in list(module.named_children()):
                if "lora" in ways and type(child) is nn.Linear and some(chance, 0.6):
                    other = chance.choice([self.dtype, torch.float32])
                    if module.__class__.__name__ not in {"TransformerEncoderLayer"}:
                        setattr(module, name, Lora(child, other))
        for name, parameter in self.blocks.named_parameters():
            if "bias" in ways and name.endswith("bias") and some(chance, 0.7):
                parameter.requires_grad_(True)
        if "whole" in ways:
            self.blocks[chance.randrange(len(self.blocks))].requires_grad_(True)
        if "embed" in ways:
            self.embed.requires_grad_(True)
        if "head" in ways or not any(p.requires_grad for p in self.parameters()):
            self.head.requires_grad_(True)
        self.description += f" {ways}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for place, index in enumerate(self.order):
            if index in self.skip:
                continue
            if self.fail and place == self.fail_at:
                if self.fail == "forward":
                    raise ZeroDivisionError
                x = Fails.apply(x)
            block: Any = self.blocks[index]
            block = block["inner"] if isinstance(block, nn.ModuleDict) else block
            if self.recompute and torch.is_grad_enabled():
                again = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
                x = x + again.to(x.dtype)
            else:
                x = x + block(x).to(x.dtype)
            x = functional.layer_norm(x, (self.width,))
        return self.head(x)
