"""Attention by CUDA's kernels: what each keeps and takes, and which one a card takes for a call."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from allocator import check_empty, take_defaults
from requested import requested as _requested, scratch_of as _scratch_of, scratch_of_backward
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from residency import sim

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("quick_collections")]

LONG, FLOAT, HALF = 8, 4, 2
OF_PLAN = 256  # of cuDNN's, as measured on an H100 with torch 2.11


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    sim.enable("2GiB")
    check_empty()
    yield
    take_defaults()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).to(dtype).to("sim")


def _heads(heads: int, length: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Heads as models make them: a view of what lies by position."""
    lies = _values(2, length, heads, width, dtype=dtype)
    return lies.transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dry", [False, True])
def test_flash_attention_keeps_one_number_a_row_and_adds_up_in_float(
    groups: int, dry: bool
) -> None:
    sim.enable("2GiB", dry=dry)
    heads, length, width = 4, 100, 40
    query, key, value = (_heads(n, length, width, torch.bfloat16) for n in (heads, groups, groups))
    before = _requested("current")
    output = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    rows = 2 * heads * length
    state = 2 * LONG + LONG
    assert _requested("current") - before == output.nbytes + rows * FLOAT + state
    assert output.stride() == query.stride()  # so that the heads are joined without a copy
    gradient = torch.ones_like(output)
    padded = 2 * heads * 128
    expanded = 2 * (2 * heads * length * width * HALF) if groups != heads else 0
    expected = padded * FLOAT + padded * 64 * FLOAT + expanded
    inputs = (query, key, value)
    assert scratch_of_backward(output, inputs, gradient) == expected
    across = torch.ones(2, heads, length, width, device="sim", dtype=torch.bfloat16)
    assert (
        scratch_of_backward(output, inputs, across) == expected + across.nbytes
    )  # which does not lie by position


@pytest.mark.parametrize("dry", [False, True])
def test_flash_attention_splits_long_keys_where_few_blocks_would_leave_the_device_idle(
    dry: bool,
) -> None:
    sim.enable("2GiB", dry=dry)
    query = _heads(4, 1024, 64, torch.bfloat16).detach()
    # 8 x 16 blocks of 64 queries, on 108 multiprocessors that hold two each: of the four parts
    # that 1024 keys have, one and two fill 0.59 of the waves that they take, four 0.79.
    rows = 2 * 4 * 1024
    taken = _scratch_of(lambda: functional.scaled_dot_product_attention(query, query, query))
    assert taken - rows * FLOAT - 3 * LONG == 4 * (rows * FLOAT + rows * 64 * FLOAT)


@pytest.mark.parametrize("dry", [False, True])
def test_memory_efficient_attention_pads_its_rows_and_works_in_tiles(dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    heads, length, width = 4, 100, 40
    inputs = [_heads(heads, length, width, torch.float32) for _ in range(3)]
    before = _requested("current")
    output = functional.scaled_dot_product_attention(*inputs)
    assert _requested("current") - before == output.nbytes + 2 * heads * 128 * FLOAT
    gradient = torch.ones_like(output)
    tile = 16 + 64 * 64 * FLOAT
    tiles = 2 * heads * _ceil(length, 64) * _ceil(width, 64)
    expected = 2 * heads * length * FLOAT + tiles * tile
    assert scratch_of_backward(output, inputs, gradient) == expected


def test_a_card_without_flash_attention_takes_the_memory_efficient_one() -> None:
    sim.enable("2GiB", gpu="t4")
    query = _heads(4, 100, 40, torch.float16)
    before = _requested("current")
    output = functional.scaled_dot_product_attention(query, query, query)
    assert _requested("current") - before == output.nbytes + 2 * 4 * 128 * FLOAT


@pytest.mark.parametrize("dry", [False, True])
def test_a_backward_pass_is_that_of_the_kernel_that_ran_forward(dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    heads, length, width = 4, 100, 64
    inputs = [_heads(heads, length, width, torch.bfloat16) for _ in range(3)]
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # which is over where the backward pass runs
        output = functional.scaled_dot_product_attention(*inputs)
    gradient = torch.ones_like(output)
    tiles = 2 * heads * _ceil(length, 64)
    expected = 2 * heads * length * FLOAT + tiles * (16 + 64 * 64 * FLOAT)
    assert scratch_of_backward(output, inputs, gradient) == expected


@pytest.mark.parametrize("dry", [False, True])
def test_half_that_registers_cannot_hold_is_summed_in_float_for_each_split(dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    heads, length, width = 4, 300, 136
    inputs = [_heads(heads, length, width, torch.bfloat16) for _ in range(3)]
    mask = _values(2, heads, length, 304, dtype=torch.bfloat16)[..., :length]
    before = _requested("current")
    output = functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert _requested("current") - before == output.nbytes + 2 * heads * 320 * FLOAT
    gradient = torch.ones_like(output)
    queries, keys = 128, 64  # of a tile, by cutlassB.h on an A100
    splits = min(_ceil(length, keys), 200 // (2 * heads))
    of_keys = splits * keys * 2 * _ceil(width, queries) * queries * FLOAT  # and of values
    tile = 16 + queries * keys * FLOAT
    tiles = _ceil(length, queries) * _ceil(width, keys)
    expected = 2 * heads * (length * FLOAT + of_keys + tiles * tile)
    assert scratch_of_backward(output, inputs, gradient) == expected


@pytest.mark.parametrize("dry", [False, True])
def test_grouped_heads_have_a_fused_kernel_in_half_precision_alone(dry: bool) -> None:
    """As in torch 2.13: flash knows no float32, and the memory-efficient kernel no groups."""
    sim.enable("2GiB", dry=dry)
    heads, length, width = 4, 256, 16
    square = 2 * heads * length * length

    def kept(dtype: torch.dtype) -> int:
        inputs = [_heads(n, length, width, dtype) for n in (heads, 2, 2)]
        before = _requested("current")
        output = functional.scaled_dot_product_attention(*inputs, enable_gqa=True)
        return _requested("current") - before - output.nbytes

    assert kept(torch.bfloat16) < square * HALF // 4
    assert kept(torch.float32) >= square * FLOAT  # the weights, for the backward pass


@pytest.mark.parametrize("dry", [False, True])
def test_a_mask_is_padded_to_whole_lines_and_sums_are_kept_for_a_backward_pass_alone(
    dry: bool,
) -> None:
    sim.enable("2GiB", dry=dry)
    heads, length = 4, 100
    inputs = [_heads(heads, length, 40, torch.float32) for _ in range(3)]
    mask = torch.zeros(length, length, device="sim")
    padded_mask = length * 8 * _ceil(length, 8) * FLOAT
    sums = 2 * heads * 128 * FLOAT
    for with_gradient in (True, False):
        with torch.set_grad_enabled(with_gradient):
            before = _requested("current")
            output = functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
        kept = _requested("current") - before - output.nbytes
        assert kept == (padded_mask + sums if with_gradient else 0)
        del output


def test_what_a_kernel_cannot_do_on_cuda_another_one_does() -> None:
    """The plain one: it keeps a number for each pair of positions."""
    length, square = 64, 2 * 4 * 64 * 64
    half, whole = torch.bfloat16, torch.float32
    cases: list[tuple[str, torch.dtype, int, bool]] = [
        ("a100-80g", half, 40, False),
        ("a100-80g", half, 36, False),  # torch pads it to 40
        ("a100-80g", half, 264, False),  # the memory-efficient one
        ("a100-80g", whole, 36, False),
        ("a100-80g", whole, 35, True),  # not a multiple of 4
        ("a100-80g", torch.float64, 40, True),
        ("t4", torch.float16, 40, False),
        ("t4", half, 40, True),  # has no bfloat16
        ("rtx4090", half, 200, False),  # flash has no backward pass, the other one does
    ]
    for gpu, dtype, width, is_plain in cases:
        gc.collect()
        sim.enable("2GiB", gpu=gpu)
        inputs = [_heads(4, length, width, dtype) for _ in range(3)]
        before = _requested("current")
        output = functional.scaled_dot_product_attention(*inputs)
        kept = _requested("current") - before - output.nbytes
        assert (kept >= square * dtype.itemsize) == is_plain, (gpu, dtype, width)
        del inputs, output


def _drops_in_sixteenths() -> bool:
    """Of cuDNN's attention: an H100 shows that torch 2.11 takes it for any dropout."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def _kept_and_scratch(gpu: str, width: int, dtype: torch.dtype, **options: float) -> list[int]:
    sim.enable("2GiB", gpu=gpu)
    inputs = [_heads(4, 256, width, dtype) for _ in range(3)]
    before = _requested("current")
    output = functional.scaled_dot_product_attention(*inputs, **options)
    kept = _requested("current") - before - output.nbytes
    gradient = torch.ones_like(output)
    with torch.autograd.set_multithreading_enabled(False):  # a thread would free it in the next one
        return [kept, scratch_of_backward(output, inputs, gradient)]


def test_half_precision_goes_to_cudnn_on_hopper_and_else_to_the_next_kernel() -> None:
    rows, state = 2 * 4 * 256, 2 * LONG
    by_cudnn = [rows * FLOAT + state, rows * 65 * FLOAT + OF_PLAN]
    by_flash = [rows * FLOAT + state + LONG, rows * 65 * FLOAT]
    by_tiles = [rows * FLOAT, rows * FLOAT + 2 * 4 * 4 * (16 + 64 * 64 * FLOAT)]
    half = torch.bfloat16
    assert _kept_and_scratch("h100-80g", 64, half) == by_cudnn
    assert _kept_and_scratch("h100-80g", 64, half, dropout_p=0.25) == by_cudnn
    of_tenths = by_flash if _drops_in_sixteenths() else by_cudnn
    assert _kept_and_scratch("h100-80g", 64, half, dropout_p=0.1) == of_tenths
    assert _kept_and_scratch("a100-80g", 64, half) == by_flash
    torch.use_deterministic_algorithms(True)
    try:
        kept, _sums_for_each_block = _kept_and_scratch("h100-80g", 64, half)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kept == by_flash[0]
    kept, scratch = _kept_and_scratch("h100-80g", 64, torch.float32)
    assert [kept, scratch] >= by_tiles, "float32 has the memory-efficient kernel"


@pytest.mark.parametrize("dry", [False, True])
def test_masked_and_grouped_heads_take_no_square_where_cudnn_has_them(dry: bool) -> None:
    sim.enable("2GiB", gpu="h100-80g", dry=dry)
    heads, groups, length, width = 4, 2, 200, 40
    inputs = [_heads(n, length, width, torch.bfloat16) for n in (heads, groups, groups)]
    mask = torch.ones(length, length, dtype=torch.bool, device="sim")
    before = _requested("current")
    output = functional.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    rows, as_bias = 2 * heads * length, length * length * HALF
    state = 2 * LONG
    assert _requested("current") - before == output.nbytes + rows * FLOAT + as_bias + state
    gradient = torch.ones_like(output)
    whole = 2 * (2 * heads * length * width * HALF)  # gradients of keys and values for all heads
    assert scratch_of_backward(output, inputs, gradient) == (
        rows * (width + 1) * FLOAT + whole + OF_PLAN
    )


@pytest.mark.parametrize(
    ("gpu", "width", "queries", "keys", "in_registers"),
    [
        ("t4", 128, 128, 64, True),
        ("t4", 136, 128, 64, False),
        ("rtx4090", 96, 128, 64, True),
        ("rtx4090", 128, 64, 64, False),
        ("rtx4090", 136, 128, 64, False),
        ("a100-80g", 128, 128, 128, True),
    ],
)
def test_a_tile_is_the_first_one_that_fits_the_shared_memory_of_a_card(
    gpu: str, width: int, queries: int, keys: int, in_registers: bool
) -> None:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        _kept, scratch = _kept_and_scratch(gpu, width, torch.float16)
    rows, tiles = 2 * 4, _ceil(256, queries) * _ceil(width, keys)
    sums = 0 if in_registers else _ceil(256, keys) * keys * 2 * _ceil(width, queries) * queries
    tile = 16 + queries * keys * FLOAT
    assert scratch == rows * (256 * FLOAT + tiles * tile + sums * FLOAT)
