"""The dry mode: a model larger than this machine is stepped for its bytes alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from residency import sim

pytestmark = [
    pytest.mark.sim,
    pytest.mark.sim_device(capacity="8GiB", schedule="late", check_races=False),
]

accelerator = torch.accelerator
GIB = 1 << 30


class Layer(torch.nn.Module):
    """A decoder layer of Qwen3's shape: grouped attention with normed heads, gated MLP."""

    def __init__(self, width: int, inner: int, num_heads: int, num_groups: int, head: int) -> None:
        super().__init__()
        self.shape = (num_heads, num_groups, head)
        self.norm, self.mlp_norm = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, (num_heads + 2 * num_groups) * head, bias=False)
        self.out = torch.nn.Linear(num_heads * head, width, bias=False)
        self.gate, self.up = (torch.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_heads, num_groups, head = self.shape
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, head)).transpose(1, 2)
        q, k, v = heads.split([num_heads, num_groups, num_groups], dim=1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Model(torch.nn.Module):
    def __init__(self, vocabulary: int, num_layers: int, width: int, *sizes: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.ModuleList(Layer(width, *sizes) for _ in range(num_layers))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def _train(model: torch.nn.Module, tokens: torch.Tensor, **options: bool) -> int:
    """Two steps; returns the peak bytes of device memory."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    accelerator.reset_peak_memory_stats()
    for _ in range(2):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator.synchronize()
    return accelerator.max_memory_allocated()


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_a_model_far_larger_than_this_machine_is_stepped() -> None:
    sim.enable("200GiB", dry=True)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # starts VmHWM anew
    before = _peak_resident_bytes()
    with torch.device("sim"):
        model = Model(151936, 36, 4096, 12288, 32, 8, 128).bfloat16()
    tokens = torch.zeros(1, 2048, dtype=torch.long, device="sim")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    peak_bytes = _train(model, tokens, fused=True)
    assert num_parameters > 8e9
    state_bytes = 4 * 2 * num_parameters  # bfloat16: weights, gradients and two moments
    assert state_bytes < peak_bytes < 2 * state_bytes
    assert _peak_resident_bytes() - before < GIB


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_the_dry_mode_allocates_what_the_real_mode_does(options: dict[str, bool]) -> None:
    def run(dry: bool) -> dict[str, int]:
        sim.enable("1GiB", dry=dry)
        torch.manual_seed(0)
        model = Model(300, 2, 64, 96, 4, 2, 16).to("sim")
        tokens = torch.zeros(2, 33, dtype=torch.long).to("sim")
        accelerator.reset_accumulated_memory_stats()
        _train(model, tokens, **options)
        return dict(accelerator.memory_stats())

    real = run(dry=False)
    gc.collect()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    dry = run(dry=True)
    for name in ("allocated_bytes", "requested_bytes", "reserved_bytes", "allocation", "segment"):
        for figure in ("current", "peak", "allocated"):
            key = f"{name}.all.{figure}"
            if name in ("reserved_bytes", "segment") and figure == "allocated":
                continue  # the first run may have found segments of the model's making
            assert dry[key] == real[key], key


@pytest.mark.parametrize(
    ("dtype", "placeholder"), [(torch.float32, 1.0), (torch.long, 1), (torch.bool, False)]
)
def test_reading_a_value_gives_a_placeholder(dtype: torch.dtype, placeholder: object) -> None:
    sim.enable(dry=True)
    value = torch.zeros(5, dtype=dtype, device="sim")[2].item()
    assert value == placeholder
    assert type(value) is type(placeholder)


def test_copies_to_the_host_give_zeros_where_they_are_small() -> None:
    sim.enable(dry=True)
    assert torch.ones(3, device="sim").tolist() == [0.0, 0.0, 0.0]
    host = torch.ones(3).pin_memory()
    host.copy_(torch.ones(3, device="sim"), non_blocking=True)
    assert host.tolist() == [0.0, 0.0, 0.0]


def test_the_shapes_and_dtypes_of_results_are_real() -> None:
    sim.enable("64GiB", dry=True)
    tensor = torch.empty(1 << 17, 1 << 16, dtype=torch.bfloat16, device="sim")  # 16 GiB
    product = tensor[:, :5].float() @ tensor[:5].float().t()[:5, :5]
    assert (product.shape, product.dtype, product.device.type) == (
        (1 << 17, 5),
        torch.float32,
        "sim",
    )
    assert accelerator.memory_allocated() >= 16 * GIB


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(3 * GIB, dtype=torch.uint8, device="sim"),
        lambda: torch.zeros(1 << 15, 1 << 15, device="sim").add(1.0),
    ],
)
def test_the_capacity_holds_in_the_dry_mode_too(allocate: Callable[[], torch.Tensor]) -> None:
    sim.enable("2GiB", dry=True)
    held = torch.empty(GIB // 2, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 2\.00 GiB"):
        allocate()
    assert accelerator.memory_stats()["num_ooms"] >= 1
    assert accelerator.memory_allocated() >= held.numel()
