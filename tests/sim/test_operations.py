"""Operations on the device, bit by bit as on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from operations import assert_same, attention, flatten, random, with_gradients

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("schedule")]  # both of them


Operation = Callable[[str], Any]


def _in_place(device: str) -> torch.Tensor:
    tensor = random(device, 6, 7)
    tensor.mul_(2.0).add_(random(device, 7)).clamp_(min=-1.0)
    tensor[2:4].zero_()
    tensor[:, 1] = 5.0
    tensor.t()[3].sub_(1.0)
    return tensor.sqrt_().nan_to_num_(3.0)


def _resized_out(device: str) -> list[torch.Tensor]:
    first, second = torch.empty(0, device=device), torch.empty(0, dtype=torch.long, device=device)
    torch.add(random(device, 40, 50), 1.0, out=first)
    values = torch.empty(0, device=device)
    torch.topk(random(device, 5, 9), 3, out=(values, second))
    return [first, values, second]


def _sliced_out(device: str) -> torch.Tensor:
    whole = torch.zeros(8, 8, device=device)
    torch.mm(random(device, 4, 5), random(device, 5, 8), out=whole[2:6])
    torch.cat([random(device, 1, 8), random(device, 1, 8)], out=whole[6:])
    return whole


def _overlapping_views(device: str) -> torch.Tensor:
    tensor = random(device, 10)
    tensor[1:].copy_(tensor[:-1].clone())
    tensor.view(2, 5)[0].add_(tensor.view(2, 5)[1])
    return tensor.unfold(0, 4, 2)


def _index_put(device: str) -> torch.Tensor:
    tensor = torch.zeros(6, 4, device=device)
    rows = torch.tensor([0, 2, 2], device=device)
    tensor[rows] = random(device, 3, 4)
    tensor.index_put_((rows,), random(device, 3, 4), accumulate=True)
    tensor[tensor > 0.5] = -1.0
    return tensor.index_add_(0, rows, random(device, 3, 4)).scatter_(1, rows[:, None], 7.0)


def _foreach(device: str) -> list[torch.Tensor]:
    tensors = [random(device, n) for n in (3, 300, 17)]
    others = [random(device, n, seed=1) for n in (3, 300, 17)]
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
    inputs = [random(device, *shape) for shape in shapes]
    return with_gradients(lambda x, w, b: functional.conv2d(x, w, b, padding=1, groups=2), *inputs)


def _embedding(device: str) -> list[Any]:
    indices = torch.tensor([[1, 3], [3, 0]], device=device)
    return with_gradients(lambda w: functional.embedding(indices, w), random(device, 5, 8))


def _norms(device: str) -> list[Any]:
    x, w, b = (random(device, *shape) for shape in ((4, 6, 8), (8,), (8,)))
    layer = with_gradients(lambda x, w, b: functional.layer_norm(x, (8,), w, b), x, w, b)
    group = with_gradients(
        lambda x, w, b: functional.group_norm(x, 3, w, b), x, w[:6].clone(), b[:6].clone()
    )
    return [layer, group, with_gradients(lambda x, w: functional.rms_norm(x, (8,), w), x, w)]


OPERATIONS: dict[str, Operation] = {
    "views": lambda d: [
        random(d, 4, 6).t(),
        random(d, 4, 6)[1:, ::2].reshape(-1),
        random(d, 4, 6).view(2, 12).unsqueeze(1).expand(2, 3, 12),
        random(d, 4, 6).view(torch.int32),
        random(d, 4, 6).diagonal(),
        random(d, 2, 3, 4).permute(2, 0, 1).flatten(1),
        random(d, 4, 6).split(2, dim=1),
    ],
    "in place": _in_place,
    "resized out": _resized_out,
    "sliced out": _sliced_out,
    "overlapping views": _overlapping_views,
    "index": lambda d: [
        random(d, 5, 6)[torch.tensor([4, 0], device=d)],
        random(d, 5, 6)[torch.tensor([4, 0])],  # an index of the host
        random(d, 5, 6)[:, [1, 1]],
        random(d, 5, 6).index_select(1, torch.tensor([2], device=d)),
        random(d, 5, 6).gather(1, torch.tensor([[1], [0]], device=d)),
        random(d, 5, 6).take(torch.tensor([3, 29], device=d)),
    ],
    "index put": _index_put,
    "masked": lambda d: [
        random(d, 5, 6)[random(d, 5, 6) > 0],
        random(d, 5, 6).masked_fill(random(d, 5, 6) > 0, 9.0),
        random(d, 5, 6).masked_scatter(random(d, 5, 6) > 0, random(d, 30)),
        torch.where(random(d, 5, 6) > 0, random(d, 5, 6), 0.0),
    ],
    "nonzero": lambda d: [
        random(d, 9, dtype=torch.bool).nonzero(),
        torch.where(random(d, 9, dtype=torch.bool)),
        random(d, 9, dtype=torch.long).bincount(),
    ],
    "sorting": lambda d: [
        random(d, 5, 9).sort(dim=1, descending=True),
        random(d, 5, 9).argsort(),
        random(d, 5, 9).topk(4),
        random(d, 5, 9).kthvalue(3),
        random(d, 5, 9).median(dim=0),
        random(d, 40, dtype=torch.long).unique(return_inverse=True, return_counts=True),
        random(d, 40, dtype=torch.long).unique_consecutive(),
    ],
    "joining": lambda d: [
        torch.cat([random(d, 2, 3), random(d, 4, 3)]),
        torch.stack([random(d, 2, 3), random(d, 2, 3)], dim=1),
        torch.hstack([random(d, 2, 3), random(d, 2, 1)]),
        random(d, 2, 3).repeat(2, 2),
        random(d, 3).repeat_interleave(torch.tensor([1, 0, 2], device=d)),
        functional.pad(random(d, 2, 3), (1, 2)),
        random(d, 2, 3).roll(1, 0).flip(1),
    ],
    "reductions": lambda d: [
        random(d, 50, 60).sum(),
        random(d, 50, 60).mean(dim=1),
        random(d, 50, 60).std(dim=0, keepdim=True),
        random(d, 50, 60).max(dim=1),
        random(d, 50, 60).argmin(),
        random(d, 50, 60).norm(),
        random(d, 50, 60).logsumexp(1),
        random(d, 50, 60).cumsum(1),
        random(d, 5, 6, dtype=torch.bool).all(dim=(0, 1)),
        random(d, 5, 6, dtype=torch.bool).any(),
        random(d, 5, 6, dtype=torch.long).prod(0),
    ],
    "matrix products": lambda d: [
        random(d, 20, 30) @ random(d, 30, 40),
        random(d, 20, 30) @ random(d, 30),
        torch.bmm(random(d, 3, 4, 5), random(d, 3, 5, 6)),
        torch.addmm(random(d, 6), random(d, 4, 5), random(d, 5, 6)),
        torch.addr(random(d, 4, 5), random(d, 4), random(d, 5)),
        torch.einsum("bij,bkj->bik", random(d, 2, 3, 4), random(d, 2, 5, 4)),
        functional.linear(random(d, 7, 8).bfloat16(), random(d, 9, 8).bfloat16()),
    ],
    "linear algebra": lambda d: [
        torch.linalg.svd(random(d, 6, 4)),
        torch.linalg.qr(random(d, 6, 4)),
        torch.linalg.inv(random(d, 5, 5)),
        torch.linalg.eigvalsh(random(d, 5, 5)),
        torch.linalg.solve(random(d, 5, 5), random(d, 5, 2)),
    ],
    "complex": lambda d: [
        random(d, 4, 5, dtype=torch.complex64) * 2j,
        random(d, 4, 5, dtype=torch.complex64).conj().resolve_conj(),
        random(d, 4, 5, dtype=torch.complex64).conj() @ random(d, 5, 3, dtype=torch.complex64),
        random(d, 4, 5, dtype=torch.complex64).imag + 1.0,
        torch.view_as_real(random(d, 4, 5, dtype=torch.complex64)),
        torch.polar(random(d, 4).abs(), random(d, 4)),
        torch.fft.rfft(random(d, 16)),
    ],
    "convolution": _conv,
    "convolution in one and three dimensions, and transposed": lambda d: [
        functional.conv1d(random(d, 1, 2, 9), random(d, 3, 2, 3)),
        functional.conv3d(random(d, 1, 2, 5, 5, 5), random(d, 3, 2, 3, 3, 3)),
        functional.conv_transpose2d(random(d, 1, 4, 5, 5), random(d, 4, 2, 3, 3), stride=2),
    ],
    "pooling": lambda d: [
        functional.max_pool2d(random(d, 1, 2, 8, 8), 2),
        functional.avg_pool2d(random(d, 1, 2, 8, 8), 2),
        functional.adaptive_avg_pool2d(random(d, 1, 2, 8, 8), 3),
        functional.interpolate(random(d, 1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    ],
    "embedding": _embedding,
    "norms": _norms,
    "batch norm": lambda d: with_gradients(
        lambda x: functional.batch_norm(x, None, None, training=True), random(d, 6, 5)
    ),
    "softmax": lambda d: [
        with_gradients(lambda x: functional.softmax(x, -1), random(d, 5, 9)),
        with_gradients(lambda x: functional.log_softmax(x, 0), random(d, 5, 9)),
    ],
    "losses": lambda d: [
        with_gradients(
            lambda x: functional.cross_entropy(x, torch.tensor([1, -100, 3], device=d)),
            random(d, 3, 9),
        ),
        *(
            with_gradients(function, random(d, 3, 9), random(d, 3, 9, seed=1))
            for function in (
                functional.mse_loss,
                functional.smooth_l1_loss,
                functional.huber_loss,
                functional.l1_loss,
            )
        ),
        functional.binary_cross_entropy_with_logits(random(d, 3, 9), random(d, 3, 9).sigmoid()),
    ],
    "activations": lambda d: [
        with_gradients(function, random(d, 5, 9))
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
    "attention": attention,
    "causal attention": lambda d: attention(d, is_causal=True),
    "masked attention": lambda d: attention(
        d, attn_mask=torch.ones(33, 33, dtype=torch.bool, device=d).tril()
    ),
    "foreach": _foreach,
    "casts": lambda d: (
        [random(d, 30).to(to) for to in (torch.bfloat16, torch.float16, torch.float64, torch.int32)]
        + [
            random(d, 30, dtype=from_).float()
            for from_ in (torch.bfloat16, torch.float16, torch.int8)
        ]
        + [random(d, 30).bfloat16() * random(d, 30).bfloat16()]
    ),
    "mixed numbers": lambda d: [
        random(d, 5) * torch.tensor(2.5),  # a scalar of the host
        torch.tensor(2, device=d) / 3,
        2 ** random(d, 5, dtype=torch.long),
        random(d, 5, dtype=torch.long) + random(d, 5),
        torch.maximum(random(d, 5), torch.tensor(0.0, device=d)),
    ],
    "nothing": lambda d: [
        torch.empty(0, 4, device=d) @ torch.empty(4, 3, device=d).zero_(),
        torch.empty(0, device=d).sum(),
        torch.cat([torch.empty(0, 3, device=d), random(d, 2, 3)]),
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
        torch.zeros_like(random(d, 3, 4).t()),
        torch.tril(torch.ones(3, 3, device=d)),
        torch.tensor([[1.0, 2.0]], device=d),
        torch.nn.functional.one_hot(torch.tensor([1, 0], device=d)),
        random(d, 2, 3).new_ones(4),
        torch.meshgrid(torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij"),
    ],
    "memory formats": lambda d: [
        random(d, 2, 3, 4, 4).to(memory_format=torch.channels_last),
        random(d, 2, 3, 4, 4).to(memory_format=torch.channels_last).relu(),
        random(d, 4, 6).t().contiguous(),
        functional.channel_shuffle(random(d, 1, 4, 2, 2), 2),
    ],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_bits_that_the_cpu_gives(name: str) -> None:
    operation = OPERATIONS[name]
    expected, found = flatten(operation("cpu")), flatten(operation("sim"))
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


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


def test_replicating_pads_keep_the_layout_of_images() -> None:
    images = random("cpu", 2, 3, 4, 4).to(memory_format=torch.channels_last)
    expected = functional.pad(images, (1, 2, -1, 1), mode="replicate")
    assert_same(functional.pad(images.to("sim"), (1, 2, -1, 1), mode="replicate"), expected)
