"""Operations, random numbers, files and training on the device, bit by bit as on the CPU.

Everything runs with work queued under both schedules and races checked; one test runs this file
again in a process that never makes a second stream, where kernels run at once.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from residency import sim

pytestmark = pytest.mark.sim

_IS_ALONE = os.environ.get("RESIDENCY_TEST_ONE_STREAM") == "1"

Operation = Callable[[str], Any]


@pytest.fixture(params=["one-stream"] if _IS_ALONE else ["late", "overtake"], autouse=True)
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    if _IS_ALONE:
        sim.enable("2GiB")
    else:
        sim.enable("2GiB", schedule=request.param, check_races=True)
        torch.Stream(device="sim")  # from here on kernels are queued
    yield request.param
    torch.accelerator.synchronize()


def _random(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
    return (
        torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator)
        .to(dtype)
        .to(device)
    )


def _with_gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[Any]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    output.square().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def _flatten(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in _flatten(part)]


def _assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.device.type == "sim"
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def _in_place(device: str) -> torch.Tensor:
    tensor = _random(device, 6, 7)
    tensor.mul_(2.0).add_(_random(device, 7)).clamp_(min=-1.0)
    tensor[2:4].zero_()
    tensor[:, 1] = 5.0
    tensor.t()[3].sub_(1.0)
    return tensor.sqrt_().nan_to_num_(3.0)


def _resized_out(device: str) -> list[torch.Tensor]:
    first, second = torch.empty(0, device=device), torch.empty(0, dtype=torch.long, device=device)
    torch.add(_random(device, 40, 50), 1.0, out=first)
    values = torch.empty(0, device=device)
    torch.topk(_random(device, 5, 9), 3, out=(values, second))
    return [first, values, second]


def _sliced_out(device: str) -> torch.Tensor:
    whole = torch.zeros(8, 8, device=device)
    torch.mm(_random(device, 4, 5), _random(device, 5, 8), out=whole[2:6])
    torch.cat([_random(device, 1, 8), _random(device, 1, 8)], out=whole[6:])
    return whole


def _overlapping_views(device: str) -> torch.Tensor:
    tensor = _random(device, 10)
    tensor[1:].copy_(tensor[:-1].clone())
    tensor.view(2, 5)[0].add_(tensor.view(2, 5)[1])
    return tensor.unfold(0, 4, 2)


def _index_put(device: str) -> torch.Tensor:
    tensor = torch.zeros(6, 4, device=device)
    rows = torch.tensor([0, 2, 2], device=device)
    tensor[rows] = _random(device, 3, 4)
    tensor.index_put_((rows,), _random(device, 3, 4), accumulate=True)
    tensor[tensor > 0.5] = -1.0
    return tensor.index_add_(0, rows, _random(device, 3, 4)).scatter_(1, rows[:, None], 7.0)


def _foreach(device: str) -> list[torch.Tensor]:
    tensors = [_random(device, n) for n in (3, 300, 17)]
    others = [_random(device, n, seed=1) for n in (3, 300, 17)]
    torch._foreach_mul_(tensors, 0.5)
    torch._foreach_addcdiv_(tensors, others, torch._foreach_exp(others), 2.0)
    torch._foreach_lerp_(tensors, others, 0.25)
    return [
        *tensors,
        *torch._foreach_norm(tensors),
        *torch._foreach_sqrt(torch._foreach_abs(others)),
    ]


def _conv(device: str) -> list[Any]:
    shapes = ((2, 4, 9, 9), (6, 2, 3, 3), (6,))
    inputs = [_random(device, *shape) for shape in shapes]
    return _with_gradients(lambda x, w, b: functional.conv2d(x, w, b, padding=1, groups=2), *inputs)


def _embedding(device: str) -> list[Any]:
    indices = torch.tensor([[1, 3], [3, 0]], device=device)
    return _with_gradients(lambda w: functional.embedding(indices, w), _random(device, 5, 8))


def _norms(device: str) -> list[Any]:
    x, w, b = (_random(device, *shape) for shape in ((4, 6, 8), (8,), (8,)))
    layer = _with_gradients(lambda x, w, b: functional.layer_norm(x, (8,), w, b), x, w, b)
    group = _with_gradients(
        lambda x, w, b: functional.group_norm(x, 3, w, b), x, w[:6].clone(), b[:6].clone()
    )
    return [layer, group, _with_gradients(lambda x, w: functional.rms_norm(x, (8,), w), x, w)]


def _attention(device: str, **options: Any) -> list[Any]:
    heads = 2 if options.get("enable_gqa") else 4
    shapes = ((2, 4, 33, 16), (2, heads, 33, 16), (2, heads, 33, 16))
    inputs = [_random(device, *shape, seed=i) for i, shape in enumerate(shapes)]
    return _with_gradients(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options), *inputs
    )


OPERATIONS: dict[str, Operation] = {
    "views": lambda d: [
        _random(d, 4, 6).t(),
        _random(d, 4, 6)[1:, ::2].reshape(-1),
        _random(d, 4, 6).view(2, 12).unsqueeze(1).expand(2, 3, 12),
        _random(d, 4, 6).view(torch.int32),
        _random(d, 4, 6).diagonal(),
        _random(d, 2, 3, 4).permute(2, 0, 1).flatten(1),
        _random(d, 4, 6).split(2, dim=1),
    ],
    "in place": _in_place,
    "resized out": _resized_out,
    "sliced out": _sliced_out,
    "overlapping views": _overlapping_views,
    "index": lambda d: [
        _random(d, 5, 6)[torch.tensor([4, 0], device=d)],
        _random(d, 5, 6)[torch.tensor([4, 0])],  # an index of the host
        _random(d, 5, 6)[:, [1, 1]],
        _random(d, 5, 6).index_select(1, torch.tensor([2], device=d)),
        _random(d, 5, 6).gather(1, torch.tensor([[1], [0]], device=d)),
        _random(d, 5, 6).take(torch.tensor([3, 29], device=d)),
    ],
    "index put": _index_put,
    "masked": lambda d: [
        _random(d, 5, 6)[_random(d, 5, 6) > 0],
        _random(d, 5, 6).masked_fill(_random(d, 5, 6) > 0, 9.0),
        _random(d, 5, 6).masked_scatter(_random(d, 5, 6) > 0, _random(d, 30)),
        torch.where(_random(d, 5, 6) > 0, _random(d, 5, 6), 0.0),
    ],
    "nonzero": lambda d: [
        _random(d, 9, dtype=torch.bool).nonzero(),
        torch.where(_random(d, 9, dtype=torch.bool)),
        _random(d, 9, dtype=torch.long).bincount(),
    ],
    "sorting": lambda d: [
        _random(d, 5, 9).sort(dim=1, descending=True),
        _random(d, 5, 9).argsort(),
        _random(d, 5, 9).topk(4),
        _random(d, 5, 9).kthvalue(3),
        _random(d, 5, 9).median(dim=0),
        _random(d, 40, dtype=torch.long).unique(return_inverse=True, return_counts=True),
        _random(d, 40, dtype=torch.long).unique_consecutive(),
    ],
    "joining": lambda d: [
        torch.cat([_random(d, 2, 3), _random(d, 4, 3)]),
        torch.stack([_random(d, 2, 3), _random(d, 2, 3)], dim=1),
        torch.hstack([_random(d, 2, 3), _random(d, 2, 1)]),
        _random(d, 2, 3).repeat(2, 2),
        _random(d, 3).repeat_interleave(torch.tensor([1, 0, 2], device=d)),
        functional.pad(_random(d, 2, 3), (1, 2)),
        _random(d, 2, 3).roll(1, 0).flip(1),
    ],
    "reductions": lambda d: [
        _random(d, 50, 60).sum(),
        _random(d, 50, 60).mean(dim=1),
        _random(d, 50, 60).std(dim=0, keepdim=True),
        _random(d, 50, 60).max(dim=1),
        _random(d, 50, 60).argmin(),
        _random(d, 50, 60).norm(),
        _random(d, 50, 60).logsumexp(1),
        _random(d, 50, 60).cumsum(1),
        _random(d, 5, 6, dtype=torch.bool).all(dim=(0, 1)),
        _random(d, 5, 6, dtype=torch.bool).any(),
        _random(d, 5, 6, dtype=torch.long).prod(0),
    ],
    "matrix products": lambda d: [
        _random(d, 20, 30) @ _random(d, 30, 40),
        _random(d, 20, 30) @ _random(d, 30),
        torch.bmm(_random(d, 3, 4, 5), _random(d, 3, 5, 6)),
        torch.addmm(_random(d, 6), _random(d, 4, 5), _random(d, 5, 6)),
        torch.addr(_random(d, 4, 5), _random(d, 4), _random(d, 5)),
        torch.einsum("bij,bkj->bik", _random(d, 2, 3, 4), _random(d, 2, 5, 4)),
        functional.linear(_random(d, 7, 8).bfloat16(), _random(d, 9, 8).bfloat16()),
    ],
    "linear algebra": lambda d: [
        torch.linalg.svd(_random(d, 6, 4)),
        torch.linalg.qr(_random(d, 6, 4)),
        torch.linalg.inv(_random(d, 5, 5)),
        torch.linalg.eigvalsh(_random(d, 5, 5)),
        torch.linalg.solve(_random(d, 5, 5), _random(d, 5, 2)),
    ],
    "complex": lambda d: [
        _random(d, 4, 5, dtype=torch.complex64) * 2j,
        _random(d, 4, 5, dtype=torch.complex64).conj().resolve_conj(),
        _random(d, 4, 5, dtype=torch.complex64).conj() @ _random(d, 5, 3, dtype=torch.complex64),
        _random(d, 4, 5, dtype=torch.complex64).imag + 1.0,
        torch.view_as_real(_random(d, 4, 5, dtype=torch.complex64)),
        torch.polar(_random(d, 4).abs(), _random(d, 4)),
        torch.fft.rfft(_random(d, 16)),
    ],
    "convolution": _conv,
    "convolution in one and three dimensions, and transposed": lambda d: [
        functional.conv1d(_random(d, 1, 2, 9), _random(d, 3, 2, 3)),
        functional.conv3d(_random(d, 1, 2, 5, 5, 5), _random(d, 3, 2, 3, 3, 3)),
        functional.conv_transpose2d(_random(d, 1, 4, 5, 5), _random(d, 4, 2, 3, 3), stride=2),
    ],
    "pooling": lambda d: [
        functional.max_pool2d(_random(d, 1, 2, 8, 8), 2),
        functional.avg_pool2d(_random(d, 1, 2, 8, 8), 2),
        functional.adaptive_avg_pool2d(_random(d, 1, 2, 8, 8), 3),
        functional.interpolate(_random(d, 1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    ],
    "embedding": _embedding,
    "norms": _norms,
    "batch norm": lambda d: _with_gradients(
        lambda x: functional.batch_norm(x, None, None, training=True), _random(d, 6, 5)
    ),
    "softmax": lambda d: [
        _with_gradients(lambda x: functional.softmax(x, -1), _random(d, 5, 9)),
        _with_gradients(lambda x: functional.log_softmax(x, 0), _random(d, 5, 9)),
    ],
    "losses": lambda d: [
        _with_gradients(
            lambda x: functional.cross_entropy(x, torch.tensor([1, -100, 3], device=d)),
            _random(d, 3, 9),
        ),
        *(
            _with_gradients(function, _random(d, 3, 9), _random(d, 3, 9, seed=1))
            for function in (
                functional.mse_loss,
                functional.smooth_l1_loss,
                functional.huber_loss,
                functional.l1_loss,
            )
        ),
        functional.binary_cross_entropy_with_logits(_random(d, 3, 9), _random(d, 3, 9).sigmoid()),
    ],
    "activations": lambda d: [
        _with_gradients(function, _random(d, 5, 9))
        for function in (
            functional.silu,
            functional.gelu,
            functional.mish,
            functional.relu,
            functional.softplus,
            functional.leaky_relu,
            torch.tanh,
        )
    ],
    "attention": _attention,
    "causal attention": lambda d: _attention(d, is_causal=True),
    "masked attention": lambda d: _attention(
        d, attn_mask=torch.ones(33, 33, dtype=torch.bool, device=d).tril()
    ),
    "foreach": _foreach,
    "casts": lambda d: (
        [
            _random(d, 30).to(to)
            for to in (torch.bfloat16, torch.float16, torch.float64, torch.int32)
        ]
        + [
            _random(d, 30, dtype=from_).float()
            for from_ in (torch.bfloat16, torch.float16, torch.int8)
        ]
        + [_random(d, 30).bfloat16() * _random(d, 30).bfloat16()]
    ),
    "mixed numbers": lambda d: [
        _random(d, 5) * torch.tensor(2.5),  # a scalar of the host
        torch.tensor(2, device=d) / 3,
        2 ** _random(d, 5, dtype=torch.long),
        _random(d, 5, dtype=torch.long) + _random(d, 5),
        torch.maximum(_random(d, 5), torch.tensor(0.0, device=d)),
    ],
    "nothing": lambda d: [
        torch.empty(0, 4, device=d) @ torch.empty(4, 3, device=d).zero_(),
        torch.empty(0, device=d).sum(),
        torch.cat([torch.empty(0, 3, device=d), _random(d, 2, 3)]),
        torch.empty(3, 0, device=d).t().contiguous(),
        torch.empty(0, device=d).nonzero(),
    ],
    "zero dimensions": lambda d: [
        torch.tensor(3.0, device=d).add_(1.0).exp(),
        torch.tensor(3.0, device=d).view(1, 1).squeeze(),
        torch.stack([torch.tensor(1, device=d), torch.tensor(2, device=d)]),
    ],
    "making": lambda d: [
        torch.arange(10, device=d),
        torch.linspace(0, 1, 5, device=d),
        torch.eye(3, device=d),
        torch.full((2, 2), 7, device=d),
        torch.zeros_like(_random(d, 3, 4).t()),
        torch.tril(torch.ones(3, 3, device=d)),
        torch.tensor([[1.0, 2.0]], device=d),
        torch.nn.functional.one_hot(torch.tensor([1, 0], device=d)),
        _random(d, 2, 3).new_ones(4),
        torch.meshgrid(torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij"),
    ],
    "memory formats": lambda d: [
        _random(d, 2, 3, 4, 4).to(memory_format=torch.channels_last),
        _random(d, 2, 3, 4, 4).to(memory_format=torch.channels_last).relu(),
        _random(d, 4, 6).t().contiguous(),
        functional.channel_shuffle(_random(d, 1, 4, 2, 2), 2),
    ],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_bits_that_the_cpu_gives(name: str) -> None:
    operation = OPERATIONS[name]
    expected, found = _flatten(operation("cpu")), _flatten(operation("sim"))
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        _assert_same(ours, theirs)


# ----------------------------------------------------------------------------------------------
# copies

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[1:, ::2],
    "offset": lambda x: x[2:4],
    "column": lambda x: x[:, 3],
    "expanded": lambda x: x[:1].expand(5, 6),
    "one number": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_between_host_and_device_keep_every_bit(dtype: torch.dtype) -> None:
    host, other = _random("cpu", 5, 6, dtype=dtype), torch.zeros(5, 6, dtype=dtype)
    device = host.to("sim")
    for name, layout in LAYOUTS.items():
        expected = layout(host)
        assert torch.equal(layout(device).cpu(), expected), name
        assert torch.equal(expected.to("sim").cpu(), expected), name
        if name != "expanded":
            layout(other).copy_(layout(device))
            assert torch.equal(layout(other), expected), name
            fresh = torch.zeros(5, 6, dtype=dtype, device="sim")
            layout(fresh).copy_(expected)
            assert torch.equal(layout(fresh).cpu(), expected), name
            again = torch.zeros(5, 6, dtype=dtype, device="sim")
            layout(again).copy_(layout(device))
            assert torch.equal(layout(again).cpu(), expected), name


@pytest.mark.parametrize("is_pinned", [True, False])
def test_copies_cast_broadcast_and_conjugate_on_their_way(is_pinned: bool) -> None:
    host = _random("cpu", 6)
    host = host.pin_memory() if is_pinned else host
    target = torch.empty(4, 6, dtype=torch.bfloat16, device="sim")
    target.copy_(host, non_blocking=True)
    assert torch.equal(target.cpu(), host.bfloat16().expand(4, 6))
    back = torch.empty(4, 6, dtype=torch.float64, pin_memory=is_pinned)
    back.copy_(target, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(back, host.bfloat16().double().expand(4, 6))
    numbers = _random("cpu", 5, dtype=torch.complex64)
    assert torch.equal(numbers.to("sim").conj().cpu(), numbers.conj())
    assert torch.equal(numbers.conj().to("sim").cpu(), numbers.conj())


def test_reading_values_gives_them() -> None:
    tensor = torch.arange(6, device="sim").view(2, 3)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensor[1, 2].item() == 5
    assert bool((tensor.sum() == 15).item())
    assert tensor.cpu().numpy().sum() == 15
    assert "[3, 4, 5]" in repr(tensor)
    assert copy.deepcopy(tensor).device.type == "sim"


@pytest.mark.parametrize(
    "operation",
    [
        lambda d, h: d + h,
        lambda d, h: h.add_(d),
        lambda d, h: d @ h,
        lambda d, h: torch.cat([d, h]),
        lambda d, h: torch.add(d, d, out=h),
        lambda d, h: h[d > 0],
        lambda d, h: torch._foreach_add([d], [h]),
    ],
)
def test_operands_on_two_devices_are_refused(operation: Callable[..., Any]) -> None:
    device, host = torch.ones(4, 4, device="sim"), torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="same device"):
        operation(device, host)
    assert torch.equal(host, torch.ones(4, 4))
    assert torch.equal(device.cpu(), host)


# ------------------------------------------------------------------------------------- random
# numbers


def test_the_same_seed_gives_the_same_numbers() -> None:
    def draw() -> list[torch.Tensor]:
        noise = torch.randn(50, device="sim")
        return [
            noise,
            torch.rand_like(noise),
            torch.randperm(9, device="sim"),
            functional.dropout(noise),
        ]

    torch.manual_seed(3)
    first = draw()
    torch.manual_seed(3)
    again = draw()
    other = draw()
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].cpu(), other[0].cpu())


def test_a_saved_state_brings_the_numbers_back() -> None:
    state = torch.sim.get_rng_state()
    first = torch.randn(50, device="sim").cpu()
    torch.randn(7, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.randn(50, device="sim").cpu(), first)
    with torch.random.fork_rng(["sim:0"], device_type="sim"):
        torch.sim.manual_seed(11)
        torch.randn(50, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.randn(50, device="sim").cpu(), first)


def test_a_generator_is_independent_of_the_default_one() -> None:
    generator = torch.Generator(device="sim").manual_seed(5)
    assert generator.initial_seed() == 5
    state = torch.sim.get_rng_state()
    first = torch.randn(20, device="sim", generator=generator).cpu()
    assert torch.equal(torch.sim.get_rng_state(), state)
    generator.manual_seed(5)
    assert torch.equal(torch.empty(20, device="sim").normal_(generator=generator).cpu(), first)
    cpu = torch.Generator().manual_seed(5)
    assert torch.equal(torch.randn(20, generator=cpu), first)


def test_dropout_draws_the_same_mask_when_a_checkpoint_recomputes_it() -> None:
    def run(use_checkpoint: bool) -> torch.Tensor:
        torch.manual_seed(1)
        weight = torch.ones(1000, device="sim", requires_grad=True)
        if use_checkpoint:
            output = checkpoint(lambda w: functional.dropout(w * 2.0), weight, use_reentrant=False)
        else:
            output = functional.dropout(weight * 2.0)
        output.square().sum().backward()
        assert weight.grad is not None
        return weight.grad.cpu()

    assert torch.equal(run(True), run(False))
    assert 0 < run(True).count_nonzero() < 1000


# ----------------------------------------------------------------------------------- mixed
# precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_picks_the_dtypes_that_it_picks_on_cuda(dtype: torch.dtype) -> None:
    x, w = _random("sim", 8, 8), _random("sim", 8, 8)
    with torch.autocast("sim", dtype=dtype):
        assert (x @ w).dtype == dtype
        assert functional.linear(x, w).dtype == dtype
        assert functional.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3).dtype == dtype
        assert functional.conv1d(x[None], w[:, :, None]).dtype == dtype
        assert (x + w).dtype == torch.float32
        assert functional.softmax((x @ w), -1).dtype == torch.float32
        assert functional.layer_norm(x @ w, (8,)).dtype == torch.float32
        assert functional.cross_entropy(x @ w, torch.arange(8, device="sim")).dtype == torch.float32
        assert torch.cat([x @ w, x]).dtype == torch.float32
        assert (x @ w).sum().dtype == torch.float32
        assert (x @ w).norm().dtype == torch.float32
        with torch.autocast("sim", enabled=False):
            assert (x @ w).dtype == torch.float32
    assert (x @ w).dtype == torch.float32


def test_autocast_computes_what_casting_by_hand_computes() -> None:
    x, w = _random("sim", 8, 8), _random("sim", 8, 8).requires_grad_()
    with torch.autocast("sim", dtype=torch.bfloat16):
        loss = (x @ w).float().square().sum()
    loss.backward()
    by_hand = w.detach().bfloat16().requires_grad_()
    (x.bfloat16() @ by_hand).float().square().sum().backward()
    assert w.grad is not None
    assert by_hand.grad is not None
    assert w.grad.dtype == torch.float32
    assert torch.equal(w.grad.cpu(), by_hand.grad.float().cpu())


def test_a_gradient_scaler_skips_the_step_of_an_overflow() -> None:
    parameter = torch.nn.Parameter(torch.ones(10, device="sim"))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = torch.amp.GradScaler("sim", init_scale=8.0, growth_interval=2)
    for factor, expected, scale in ((1.0, 0.5, 8.0), (float("inf"), 0.5, 4.0), (1.0, 0.0, 4.0)):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter[0].item() == expected
        assert scaler.get_scale() == scale


# -----------------------------------------------------------------------------------------
# attention


@pytest.mark.parametrize("is_causal", [True, False])
def test_grouped_attention_is_attention_with_repeated_heads(is_causal: bool) -> None:
    found = _attention("sim", enable_gqa=True, is_causal=is_causal)
    expected = _attention("cpu", enable_gqa=True, is_causal=is_causal)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_groups", [4, 2])
def test_attention_never_holds_a_square_of_the_sequence(num_groups: int) -> None:
    heads, length, width = 4, 2048, 16
    square_bytes = heads * length * length * 4
    q, k, v = (
        _random("sim", 1, n, length, width).requires_grad_()
        for n in (heads, num_groups, num_groups)
    )
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    begin = torch.accelerator.memory_allocated()
    output = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=num_groups != heads
    )
    output.sum().backward()
    added = torch.accelerator.max_memory_allocated() - begin
    assert output.numel() * 4 <= added < square_bytes / 4


# -------------------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def _steps(name: str, device: str) -> list[torch.Tensor]:
    shapes = ((30, 40), (7,), (1,))
    parameters = [torch.nn.Parameter(_random(device, *shape)) for shape in shapes]
    optimizer = OPTIMIZERS[name](parameters)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = _random(device, *parameter.shape, seed=step + 1)
        optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim() > 0]
    return [p.detach().cpu() for p in (*parameters, *states)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_it_does_on_the_cpu(name: str) -> None:
    found, expected = _steps(name, "sim"), _steps(name, "cpu")
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -------------------------------------------------------------------------------- files and modules


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("place", [None, "cpu", "sim"])
def test_a_saved_tensor_loads_where_it_is_asked_to(
    tmp_path: Path, place: str | None, is_mapped: bool
) -> None:
    whole = _random("sim", 30, 40)
    torch.save({"whole": whole, "part": whole[3:5].t()}, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", map_location=place, mmap=is_mapped)
    expected = "cpu" if place == "cpu" else "sim"
    assert {tensor.device.type for tensor in loaded.values()} == {expected}
    assert torch.equal(loaded["whole"].cpu(), whole.cpu())
    assert torch.equal(loaded["part"].cpu(), whole[3:5].t().cpu())
    loaded["whole"][3, 0] = 100.0  # the two still share their memory
    assert loaded["part"][0, 0].item() == 100.0


def test_a_tensor_of_the_host_loads_onto_the_device(tmp_path: Path) -> None:
    torch.save(torch.arange(5.0), tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", map_location="sim")
    assert loaded.device.type == "sim"
    assert loaded.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_safetensors_save_from_the_device_and_load_to_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": _random("sim", 5, 6), "b": _random("sim", 7, dtype=torch.bfloat16)}
    safetensors.save_file(tensors, tmp_path / "file.safetensors")
    for place in ("sim", "sim:0", "cpu"):
        loaded = safetensors.load_file(tmp_path / "file.safetensors", device=place)
        for name, tensor in tensors.items():
            assert loaded[name].device.type == place.split(":")[0]
            assert torch.equal(loaded[name].cpu(), tensor.cpu())


def test_moving_a_module_keeps_its_parameters_and_the_optimizer_built_before() -> None:
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before, identities = module.weight.detach().clone(), [id(p) for p in module.parameters()]
    module.to("sim")
    assert [id(p) for p in module.parameters()] == identities
    assert module.weight.device.type == "sim"
    module(torch.ones(1, 4, device="sim")).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight.detach().cpu(), before - 1.0)
    module.cpu()
    assert [id(p) for p in module.parameters()] == identities
    assert torch.equal(module.weight.detach(), before - 1.0)


def test_the_data_of_a_parameter_can_change_its_device() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.data = torch.full((5,), 2.0, device="sim")
    assert (parameter.device.type, parameter.shape) == ("sim", (5,))
    parameter.square().sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [4.0] * 5
    parameter.data = torch.zeros(2)
    assert parameter.device.type == "cpu"


def test_the_storage_of_a_tensor_can_be_emptied_and_filled_again() -> None:
    tensor = _random("sim", 1000)
    expected, storage = tensor.cpu(), tensor.untyped_storage()
    before = torch.accelerator.memory_allocated()
    storage.resize_(0)
    assert before - torch.accelerator.memory_allocated() == 4096
    storage.resize_(4000)
    tensor.copy_(expected)
    assert torch.equal(tensor.cpu(), expected)


# ----------------------------------------------------------------------------------------- training


def _train(device: str, use_checkpoint: bool) -> list[float]:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,  # without groups the kernels are the same
        head_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(device)
    if use_checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
    losses = []
    tokens = torch.randint(0, 97, (2, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_a_training_run_has_the_losses_that_it_has_on_the_cpu(use_checkpoint: bool) -> None:
    found = _train("sim", use_checkpoint)
    assert found == _train("cpu", use_checkpoint)
    assert found[-1] < found[0]


def test_replicating_pads_keep_the_layout_of_images() -> None:
    images = _random("cpu", 2, 3, 4, 4).to(memory_format=torch.channels_last)
    expected = functional.pad(images, (1, 2, -1, 1), mode="replicate")
    _assert_same(functional.pad(images.to("sim"), (1, 2, -1, 1), mode="replicate"), expected)
