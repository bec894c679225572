"""The dry mode: a model larger than this machine is stepped for its bytes alone."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

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
    value = torch.empty(5, dtype=dtype, device="sim")[2].item()
    assert value == placeholder
    assert type(value) is type(placeholder)


def test_small_copies_to_the_host_give_placeholders_too() -> None:
    sim.enable(dry=True)
    unknown = torch.rand(300, device="sim")[:3]  # a few would be drawn
    assert unknown.tolist() == [1.0, 1.0, 1.0]
    assert (unknown > 0.5).tolist() == [True, True, True]
    host = torch.zeros(3).pin_memory()
    host.copy_(unknown, non_blocking=True)
    assert host.tolist() == [1.0, 1.0, 1.0]


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


# ------------------------------------------------------------- what torch's own code branches on


def test_half_precision_with_a_scaler_steps_in_dry_mode() -> None:
    def run(dry: bool) -> tuple[int, int]:
        sim.enable("1GiB", dry=dry)
        model = torch.nn.Linear(512, 512, device="sim")
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("sim", init_scale=1024.0)
        accelerator.reset_peak_memory_stats()
        for _ in range(2):
            with torch.autocast("sim", torch.float16):
                loss = model(torch.ones(8, 512, device="sim")).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        accelerator.synchronize()
        return len(optimizer.state), accelerator.max_memory_allocated()

    real = run(dry=False)
    gc.collect()
    assert run(dry=True) == real
    assert real[0] == 2


def test_nothing_is_zero_and_every_check_holds_in_dry_mode() -> None:
    sim.enable("1GiB", dry=True)
    x = torch.rand(4, 6, device="sim")
    assert (x == 0).sum().item() == 0
    assert not (x == 0).any()
    assert len((x == 0).nonzero()) == 0
    assert x.isfinite().all()
    assert not x.isnan().any()
    assert torch.allclose(x, x)
    assert torch.equal(x, x)
    assert torch.equal(x, x.view(x.shape))
    assert not torch.equal(x, x.clone())
    torch.distributions.Gamma(x, x).sample()  # it validates its arguments
    count = (x == 0).sum()
    count.add_(1)
    assert count.item() == 1  # what is written later is not known


# ------------------------------------------------------------- without a meta kernel of torch


def test_masks_are_true_everywhere_in_dry_mode() -> None:
    sim.enable("1GiB", dry=True)
    x = torch.rand(4, 6, device="sim")
    index = torch.randint(9, (1 << 17,), device="sim")[:4]  # fewer would be drawn
    assert x.nonzero().shape == (24, 2)
    assert x[x > 5].shape == (24,)
    assert x[index > 5].shape == (4, 6)
    assert x.masked_select(x > 5).shape == (24,)
    assert [len(part) for part in torch.where(x > 5)] == [24, 24]
    assert index.unique().shape == (1,)
    assert [len(part) for part in index.unique(return_counts=True)] == [4, 4]
    values, inverse, counts = index.unique_consecutive(return_inverse=True, return_counts=True)
    assert (len(values), len(inverse), len(counts)) == (4, 4, 4)
    assert torch.unique(x, dim=1).shape == (4, 6)
    assert index.bincount().shape == (1,)
    assert index.bincount(minlength=7).shape == (7,)
    assert x.repeat_interleave(index, dim=0).shape == (4, 6)
    x[x > 5] = x[x > 5]
    x.index_put_((x > 5,), torch.ones(24, device="sim"))


def _backward(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = torch.ones(4, 6, device="sim", requires_grad=True)
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad


_INDEX = {"dtype": torch.long, "device": "sim"}

WITHOUT_META: dict[str, tuple[Callable[[], torch.Tensor], tuple[int, ...]]] = {
    "exponential_": (lambda: torch.empty(4, 6, device="sim").exponential_(), (4, 6)),
    "gumbel_softmax": (lambda: functional.gumbel_softmax(torch.ones(4, 6, device="sim")), (4, 6)),
    "logcumsumexp": (lambda: torch.ones(4, 6, device="sim").logcumsumexp(1), (4, 6)),
    "cummax": (lambda: torch.ones(4, 6, device="sim").cummax(1).indices, (4, 6)),
    "multi_margin_loss": (
        lambda: _backward(lambda x: functional.multi_margin_loss(x, torch.zeros(4, **_INDEX))),
        (4, 6),
    ),
    "multilabel_margin_loss": (
        lambda: _backward(
            lambda x: functional.multilabel_margin_loss(x, torch.zeros(4, 6, **_INDEX))
        ),
        (4, 6),
    ),
    "masked_fill": (
        lambda: _backward(lambda x: x.detach().masked_fill(x > 0, x.sum())),
        (4, 6),
    ),
    "prod": (lambda: _backward(lambda x: x.prod(1)), (4, 6)),
    "cov": (lambda: torch.ones(4, 6, device="sim").cov(), (4, 4)),
    "cov with weights": (
        lambda: torch.ones(4, 6, device="sim").cov(
            fweights=torch.ones(6, dtype=torch.long, device="sim"),
            aweights=torch.ones(6, device="sim"),
        ),
        (4, 4),
    ),
    "lstsq": (
        lambda: torch.linalg.lstsq(*torch.ones(2, 6, 4, device="sim").unbind()).solution,
        (4, 4),
    ),
    "geqrf": (lambda: torch.geqrf(torch.ones(4, 6, device="sim")).tau, (4,)),
    "histogram": (lambda: torch.histogram(torch.ones(24, device="sim"), 5).hist, (5,)),
    "mode": (lambda: torch.ones(4, 6, device="sim").mode(1).values, (4,)),
}


@pytest.mark.parametrize("name", WITHOUT_META)
def test_an_operation_without_a_meta_kernel_has_its_shape(name: str) -> None:
    sim.enable("1GiB", dry=True)
    operation, shape = WITHOUT_META[name]
    found = operation()
    assert found.shape == shape
    assert found.device.type == "sim"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_optimizer_steps_in_dry_mode(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    sim.enable("1GiB", dry=True)
    weight = torch.nn.Parameter(torch.ones(4, 6, device="sim"))
    weight.grad = torch.ones(4, 6, device="sim")
    optimizer([weight], lr=0.1, fused=True).step()


def test_an_operation_whose_fake_kernel_makes_a_size_has_that_of_zeros() -> None:
    sim.enable("4GiB", dry=True)
    library = torch.library.Library("residency_test", "FRAGMENT")
    library.define("pick(Tensor boxes) -> Tensor")
    library.impl("pick", lambda boxes: (boxes.sum(-1) <= 0).nonzero().flatten(), "CPU")
    torch.library.register_fake(
        "residency_test::pick",
        lambda boxes: boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long),
        lib=library,
    )
    picked = torch.ops.residency_test.pick(torch.empty(7, 4, device="sim"))
    assert (picked.shape, picked.dtype, picked.device.type) == ((7,), torch.long, "sim")


def test_a_large_operation_of_unknown_shape_is_refused_by_name() -> None:
    sim.enable("4GiB", dry=True)
    large = torch.empty(1 << 25, device="sim")
    before = accelerator.memory_allocated()
    with pytest.raises(NotImplementedError, match=r"Dry mode cannot tell the shapes .*histogram"):
        torch.histogram(large, 5)
    assert accelerator.memory_allocated() == before


# ------------------------------------------------------------- bytes as in real mode


BYTES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse_loss": functional.mse_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "binary_cross_entropy": lambda a, b: functional.binary_cross_entropy(a, b.detach()),
    "ctc_loss": lambda a, _: functional.ctc_loss(
        a.view(64, 4, 16).log_softmax(-1),
        torch.ones(4, 5, dtype=torch.long, device="sim"),
        torch.full((4,), 64, device="sim"),  # lengths on the device
        torch.full((4,), 5, device="sim"),
    ),
    "unfold": lambda a, _: functional.unfold(a.view(1, 16, 16, 16), 3),
    "prod": lambda a, _: a.prod(),
    "prod_dim": lambda a, _: a.prod(-1),
    "cumprod": lambda a, _: a.cumprod(-1),
    "layer_norm": lambda a, _: functional.layer_norm(a.bfloat16(), (64,)),
    "batch_norm": lambda a, _: functional.batch_norm(a.bfloat16(), None, None, training=True),
    "batch_norm_in_evaluation": lambda a, b: functional.batch_norm(a, b[0].detach(), b[1].detach()),
    "batch_norm_in_evaluation_of_half": lambda a, b: functional.batch_norm(
        a.bfloat16(), b[0].detach(), b[1].detach()
    ),
}


@pytest.mark.parametrize("name", BYTES)
def test_a_step_takes_the_same_bytes_in_both_modes(name: str) -> None:
    def run(dry: bool) -> tuple[int, int]:
        sim.enable("1GiB", dry=dry)
        a, b = (torch.ones(64, 64, device="sim", requires_grad=True) for _ in range(2))
        accelerator.reset_peak_memory_stats()
        result = BYTES[name](a, b)
        kept = accelerator.memory_allocated()
        result.sum().backward()
        accelerator.synchronize()
        return kept, accelerator.max_memory_allocated()

    real = run(dry=False)
    gc.collect()
    assert run(dry=True) == real


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_norms_keep_their_statistics_in_float32_as_on_cuda(weight_dtype: torch.dtype) -> None:
    sim.enable("1GiB")
    on_host = torch.randn(8, 64).bfloat16().requires_grad_()
    weight = torch.randn(64).to(weight_dtype).requires_grad_()
    x, w = (t.detach().to("sim").requires_grad_() for t in (on_host, weight))
    results = torch.native_layer_norm(x, (64,), w, None, 1e-5)
    assert [t.dtype for t in results] == [torch.bfloat16, torch.float32, torch.float32]
    expected = torch.native_layer_norm(on_host, (64,), weight, None, 1e-5)
    for result, e in zip(results, expected, strict=True):
        assert torch.equal(result.cpu(), e.to(result.dtype))
    results[0].sum().backward()
    expected[0].sum().backward()
    for found, wanted in ((x, on_host), (w, weight)):
        assert torch.equal(found.grad.cpu(), wanted.grad)


def test_elementwise_operations_run_no_python_of_torchs() -> None:
    sim.enable("1GiB", dry=True)
    left, right = (torch.empty(64, 64, device="sim") for _ in range(2))
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        _ = (left * right + left).neg().pow(2).mean(-1)
    finally:
        sys.setprofile(before)
    assert not [name for name in called if "_refs" in name or "_prims" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_norm_over_ranks_has_shapes_and_statistics_in_floats(dtype: torch.dtype) -> None:
    sim.enable("8GiB", dry=True)
    inputs = torch.empty(64, 32, 112, 112, device="sim", dtype=dtype)
    mean, invstd = torch.batch_norm_stats(inputs, 1e-5)
    assert mean.shape == invstd.shape == (32,)
    assert mean.dtype == torch.float32
    out = torch.batch_norm_elemt(inputs, None, None, mean, invstd, 1e-5)
    assert (out.shape, out.dtype) == (inputs.shape, dtype)
    sums = torch.batch_norm_backward_reduce(out, inputs, mean, invstd, None, True, True, False)
    assert [each is not None and each.shape == (32,) for each in sums] == [True, True, True, False]
