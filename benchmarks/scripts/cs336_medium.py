"""A training step of a transformer written from scratch, on CUDA: the runs of recorded traces.

The model is that of Stanford's course CS336, "medium": 24 layers of width 1024, every part in
plain tensor operations (norms, rotary positions, attention with its mask, cross-entropy, AdamW).
After the public https://github.com/stanford-cs336/assignment2-systems, ``cs336-basics``: the same
operations in the same order. It is a script like any other: it says cuda, and knows nothing of
residency.
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HIDDEN, NUM_LAYERS, NUM_HEADS = 10_000, 1024, 4096, 24, 16
BATCH = 4
THETA = 10_000.0


class Linear(nn.Module):
    """A product with a weight ``[outputs, inputs]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        std = math.sqrt(2 / (inputs + outputs))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """Rows of a table, by indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        nn.init.trunc_normal_(self.weight, a=-3, b=3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class Norm(nn.Module):
    """Division by the root of the mean square, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(kind)


class Rotation(nn.Module):
    """Rotary positions, from a table ``[2, length, half of a head]``."""

    table: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        size = WIDTH // NUM_HEADS
        frequencies = THETA ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        first = cos * x1 - sin * x2
        second = sin * x1 + cos * x2
        return torch.concat((first, second), dim=-1)


def softmax(x: Tensor) -> Tensor:
    """The softmax of the last dimension."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention that keeps its scores."""
    scores = torch.einsum("...qd,...kd->...qk", queries, keys) / math.sqrt(keys.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, values)


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        queries = self.q_proj(x)
        keys = self.k_proj(x)
        values = self.v_proj(x)
        queries, keys, values = (
            each.unflatten(-1, (NUM_HEADS, -1)).transpose(-3, -2)
            for each in (queries, keys, values)
        )
        queries = self.rotation(queries)
        keys = self.rotation(keys)
        positions = torch.arange(x.size(-2), device=x.device)
        mask = positions[:, None] >= positions[None, :]
        mask = mask[None]
        found = attend(queries, keys, values, mask)
        found = found.transpose(-3, -2).flatten(-2).contiguous()
        return self.output_proj(found)


def silu(x: Tensor) -> Tensor:
    """The activation of the network."""
    return x * torch.sigmoid(x)


class Network(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = Linear(WIDTH, HIDDEN)
        self.w2 = Linear(HIDDEN, WIDTH)
        self.w3 = Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A layer, its norms first."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.attention = Attention(rotation)
        self.network = Network()
        self.norm1 = Norm()
        self.norm2 = Norm()

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm1(x))
        middle = x + attended
        added = self.network(self.norm2(middle))
        return middle + added


class Transformer(nn.Module):
    """The language model."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding = Embedding()
        rotation = Rotation(length)
        self.layers = nn.ModuleList(Block(rotation) for _ in range(NUM_LAYERS))
        self.norm = Norm()
        self.head = Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


def log_softmax(x: Tensor) -> Tensor:
    """The logarithm of the softmax of the last dimension."""
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of the targets' negative log-probabilities."""
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """AdamW, a parameter at a time, with new tensors for its state in every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(
            parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "decay": 0.01}
        )

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                rate, eps = group["lr"], group["eps"]
                beta1, beta2 = group["betas"]
                t = state.get("t", 1)
                rate_now = rate * (math.sqrt(1 - beta2**t) / (1 - beta1**t))
                p.data -= rate * group["decay"] * p.data
                before1 = state.get("m", torch.zeros_like(grad))
                before2 = state.get("v", torch.zeros_like(grad))
                first = beta1 * before1 + ((1 - beta1) * grad)
                second = beta2 * before2 + ((1 - beta2) * torch.square(grad))
                p.data -= rate_now * first / (torch.sqrt(second) + eps)
                state["m"] = first
                state["v"] = second
                state["t"] = t + 1


def main() -> None:
    """Makes some steps, or passes without gradients."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--autocast", action="store_true", help="forward passes in bfloat16")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the one recorded")
    parser.add_argument("--snapshot", help="where the recorded step's memory history goes")
    options = parser.parse_args()
    device = torch.device("cuda")
    model = Transformer(options.context).to(device)
    optimizer = AdamW(model.parameters())
    casts = torch.autocast("cuda", torch.bfloat16) if options.autocast else nullcontext()

    def batches(*shape: int) -> Tensor:
        return torch.randint(VOCABULARY, (*shape, BATCH, options.context), device=device)

    def step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with casts:
            logits = model(inputs)
            loss = cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
        return logits, loss

    count = options.warm_up
    if options.inference:
        with torch.inference_mode(), casts:
            warm = batches(count)
            batch = batches()
            for index in range(count):
                model(warm[index])
            if options.snapshot:
                torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
            model(batch)
    else:
        inputs, targets = batches(count), batches(count)
        batch, target = batches(), batches()
        for index in range(count):
            optimizer.zero_grad()
            step(inputs[index], targets[index])
        optimizer.zero_grad()
        if options.snapshot:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
        _kept = step(batch, target)
    torch.cuda.synchronize()
    if options.snapshot:
        torch.cuda.memory._dump_snapshot(options.snapshot)


if __name__ == "__main__":
    main()
