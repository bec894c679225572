"""Scratch memory of CUDA's kernels, row by row of the table in the docs: what a call holds beside
its results, computed from its shapes as torch's and cub's public sources do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from allocator import check_empty, take_defaults
from requested import requested as _requested, scratch_of as _scratch_of, scratch_of_backward
from torch.nn import functional

from residency import sim

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("quick_collections")]

ops = torch.ops.aten
accelerator = torch.accelerator
LONG, FLOAT, HALF = 8, 4, 2
CUB_ALIGNMENT = 256  # of the parts of cub's scratch


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    sim.enable("2GiB")
    check_empty()
    yield
    take_defaults()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _parts(*num_bytes: int) -> int:
    """Returns what cub adds such parts up to."""
    return CUB_ALIGNMENT - 1 + sum(_ceil(part, CUB_ALIGNMENT) * CUB_ALIGNMENT for part in num_bytes)


def _radix_sort(count: int, *, bits: int, key: int, value: int, tile: int) -> int:
    """Returns the scratch of one sweep for each eight bits, with `tile` pairs in a block."""
    passes, digits = _ceil(bits, 8), 256
    return _parts(
        passes * digits * LONG,
        _ceil(count, tile) * digits * 4,
        count * key if passes > 1 else 0,
        count * value if passes > 1 else 0,
        passes * 4,
    )


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).to(dtype).to("sim")


def _positions(count: int, limit: int) -> torch.Tensor:
    return (torch.arange(count) % limit).to("sim")


# 384 threads, with 21 four-byte items each (17 of four-byte keys with values), or half as many of
# eight bytes.
TILE_OF_LONGS, TILE_OF_FLOATS, TILE_OF_LONG_KEYS = 384 * 10, 384 * 8, 384 * 10


# -------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dry", [False, True])
def test_the_gradient_of_an_embedding_sorts_its_rows_and_sums_them_by_tens(
    dtype: torch.dtype, dry: bool
) -> None:
    sim.enable("2GiB", dry=dry)
    count, rows, width = 4096, 10_000, 64
    segments = min(count, rows)
    partial = count // 10 + segments
    pairs = 2 * count * LONG  # sorted, and where each was
    places = (count + 2 * segments + partial) * LONG + 2 * LONG
    sums = partial * width * FLOAT  # whatever the gradient's type
    gradient, indices = _values(count, width, dtype=dtype), _positions(count, rows)

    def backward(count: int) -> Callable[[], torch.Tensor]:
        return lambda: ops.embedding_dense_backward(
            gradient[:count], indices[:count], rows, -1, False
        )

    assert _scratch_of(backward(count)) == pairs + places + sums
    assert _scratch_of(backward(3072)) == 0
    by_frequency = lambda: ops.embedding_dense_backward(gradient, indices, rows, -1, True)  # noqa: E731
    assert _scratch_of(by_frequency) == pairs + places + sums + count * LONG


@pytest.mark.parametrize(("dtype", "sum_bytes"), [(torch.float32, 0), (torch.bfloat16, FLOAT)])
@pytest.mark.parametrize("dry", [False, True])
def test_the_gradient_of_an_embedding_of_few_rows_is_added_up_at_once(
    dtype: torch.dtype, sum_bytes: int, dry: bool
) -> None:
    sim.enable("2GiB", dry=dry)
    count, rows, width = 4096, 2, 64  # as of token types; one block for each row
    partial = count // 10 + rows
    places = (count + 2 * rows + 2 * partial) * LONG + 2 * LONG
    sort = _radix_sort(count, bits=64, key=LONG, value=LONG, tile=TILE_OF_LONGS)
    gradient, indices = _values(count, width, dtype=dtype), _positions(count, rows)
    backward = lambda: ops.embedding_dense_backward(gradient, indices, rows, -1, False)  # noqa: E731
    pairs = 2 * count * LONG
    added = places + rows * width * sum_bytes
    kept = rows * width * gradient.itemsize  # which comes after the sort
    assert _scratch_of(backward) == pairs + max(count * LONG + sort - kept, added)


# -------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("dry", [False, True])
def test_many_short_rows_give_the_gradients_of_a_norm_in_partial_sums(dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    width = 8
    for rows, blocks in ((65 * 1024, 65 * 1024 // 32), (64 * 1024, 0)):
        partial = blocks * width * FLOAT
        total = width * FLOAT if blocks else 0  # which takes the place of what was there for it
        x, weight = _values(rows, width), _values(width)
        _, mean, deviation = ops.native_layer_norm(x, [width], weight, weight, 1e-5)
        layer = (x, x, [width], mean, deviation, weight, weight, [True, True, True])
        assert _scratch_of(lambda layer=layer: ops.native_layer_norm_backward(*layer)) == (
            2 * partial + total
        )  # type: ignore[misc]
        rms = (x, x, [width], deviation, weight, [True, True])
        assert _scratch_of(lambda rms=rms: ops._fused_rms_norm_backward(*rms)) == partial + total  # type: ignore[misc]


@pytest.mark.parametrize("dry", [False, True])
def test_a_root_mean_square_norm_keeps_its_input_and_one_number_a_row(dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    x = _values(32, 64, dtype=torch.bfloat16).requires_grad_()
    weight = _values(64, dtype=torch.bfloat16)
    before = _requested("current")
    y = functional.rms_norm(x, (64,), weight)
    assert _requested("current") - before == y.nbytes + 32 * FLOAT


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("softmax", [functional.softmax, functional.log_softmax])
def test_classes_in_the_middle_are_copied_to_lie_in_rows(
    softmax: Callable[..., torch.Tensor], dry: bool
) -> None:
    sim.enable("2GiB", dry=dry)
    logits = _values(2, 16, 100).transpose(1, 2)  # as a loss takes them: [batch, classes, length]
    assert _scratch_of(lambda: softmax(logits, dim=1)) == logits.nbytes
    in_rows = logits.contiguous()
    assert _scratch_of(lambda: softmax(in_rows, dim=1)) == 0
    leaf = _values(2, 100, 16).requires_grad_()
    output = softmax(leaf, dim=1)
    across = _values(2, 16, 100).transpose(1, 2)
    # Softmax alone: the gradient times the output, laid out as the gradient, and that in rows.
    num_copies = 2 if softmax is functional.softmax else 1
    assert scratch_of_backward(output, [leaf], across) == num_copies * across.nbytes


@pytest.mark.parametrize("dry", [False, True])
def test_the_norms_of_a_list_take_a_number_for_each_chunk_of_the_largest(dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    tensors = [_values(200_000, dtype=torch.bfloat16), _values(10, dtype=torch.bfloat16)]
    chunks = _ceil(200_000, 65_536)
    assert _scratch_of(lambda: torch._foreach_norm(tensors)) == 2 * chunks * FLOAT
    assert _scratch_of(lambda: torch._foreach_norm(tensors, 3)) == 0  # one after the other


# -------------------------------------------------------------------------------------------- sorts


@pytest.mark.parametrize(("rows", "columns"), [(7, 4096), (1, 5000), (3, 5000), (130, 5000)])
@pytest.mark.parametrize("dry", [False, True])
def test_a_sort_takes_another_way_by_how_many_rows_there_are(
    rows: int, columns: int, dry: bool
) -> None:
    sim.enable("2GiB", dry=dry)
    count = rows * columns
    sort = _radix_sort(count, bits=32, key=FLOAT, value=LONG, tile=TILE_OF_FLOATS)
    expected = {
        7: columns * LONG,  # in place: a range
        1: count * LONG + sort,  # a range
        3: 2 * count * LONG + count * FLOAT + sort,  # with the row's number in the value
        130: count * LONG + _parts(count * FLOAT, count * LONG),  # cub's own segments
    }[rows]
    values = _values(rows, columns)
    assert _scratch_of(lambda: values.sort()) == expected
    if rows == 3:  # not in rows: itself and both results in rows first
        columns_first = values.t().contiguous()
        found = _scratch_of(lambda: columns_first.sort(dim=0))
        assert found == expected + 2 * count * FLOAT + count * LONG


@pytest.mark.parametrize("dry", [False, True])
def test_unique_values_are_sorted_and_found_again(dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    count = 5000
    values = _positions(count, 17)
    keys = _radix_sort(count, bits=64, key=LONG, value=0, tile=TILE_OF_LONG_KEYS)
    pairs = _radix_sort(count, bits=64, key=LONG, value=LONG, tile=TILE_OF_LONGS)
    assert _scratch_of(lambda: torch._unique2(values)) == count * LONG + keys
    assert _scratch_of(lambda: torch._unique2(values, return_inverse=True)) == (
        3 * count * LONG + pairs
    )


@pytest.mark.parametrize("dry", [False, True])
def test_a_permutation_sorts_random_keys(dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    count = 5000
    bits = math.ceil(math.log2(count - (6 * count * count + 1) / (12 * math.log(0.9))))
    assert bits == 27
    sort = _radix_sort(count, bits=bits, key=4, value=LONG, tile=TILE_OF_FLOATS)
    expected = count * LONG + 2 * count * 4 + sort
    assert _scratch_of(lambda: torch.randperm(count, device="sim")) == expected


# -------------------------------------------------------------------------------------------- masks


def test_a_mask_becomes_its_positions() -> None:
    values = _values(6, 5, 4)
    mask = (torch.arange(30).view(6, 5) % 4 == 1).to("sim")
    chosen, count = 8, 4
    select = _parts(_parts((1 + 32) * 2 * 4))  # a tile's state, and those before the first
    kept = chosen * 4 * FLOAT  # which comes last
    assert _scratch_of(lambda: values[mask]) == chosen * 2 * LONG + count + select - kept
    whole = mask[..., None].expand(6, 5, 4).contiguous()
    found = _scratch_of(lambda: values.masked_select(whole))
    assert found == chosen * 4 * 3 * LONG + count + select - kept
    assert _scratch_of(mask.nonzero) == count + select
    positions = torch.tensor([4, 0]).to("sim")
    assert _scratch_of(lambda: values[positions]) == 0


def test_a_masked_scatter_counts_what_comes_before_each_element() -> None:
    values, mask = _values(6, 5, 4), (torch.arange(30).view(6, 5, 1) % 4 == 1).to("sim")
    source = _values(32)
    scan = _parts(_parts((1 + 32) * 2 * LONG))  # a tile's state, and those before the first
    expected = values.numel() * LONG + values.numel() + scan  # and the whole mask
    assert _scratch_of(lambda: values.masked_scatter_(mask, source)) == expected


@pytest.mark.parametrize("dry", [False, True])
def test_a_draw_takes_a_random_number_for_each_probability(dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    probabilities = _values(4, 1000)
    draw = torch.multinomial
    checks = 2  # whether they are valid, and have a sum
    assert _scratch_of(lambda: draw(probabilities, 1)) == probabilities.nbytes + checks
    largest = 4 * 3 * FLOAT
    assert _scratch_of(lambda: draw(probabilities, 3)) == probabilities.nbytes + checks + largest


def test_no_scratch_is_charged_where_it_is_turned_off() -> None:
    sim.enable("2GiB", workspaces=False)
    values = _values(1, 5000)
    assert _scratch_of(lambda: values.sort()) == 0
