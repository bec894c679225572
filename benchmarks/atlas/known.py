"""Masks of which the number of true values is known, and further sizes of what sorts or scans.

A dry run computes no mask and takes each as true, so that these are. One size alone hides two
errors that make up for one another, and a kernel that is taken from some size on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.atlas.rows import DEVICE, DTYPES, Atlas, tensor, warm

_MASKED = ((4, 1024, 1024), (3, 333, 1000), (70, 9))
_SORTED = ((64, 1000), (300, 5000), (1, 1 << 20), (4096, 1024), (3, 70_001))
_LENGTHS = (1000, 3000, 3100, 40_000, 1 << 20)  # embeddings and randperm have kernels of their own
_WIDTH = 64
_NUM_ROWS = 30_000


def known(atlas: Atlas) -> None:
    """Writes the rows of masks, sorts and scans."""
    warm()
    for dtype in ("fp32", "bf16"):
        for shape in _MASKED:
            _masks(atlas, dtype, shape)
        for shape in _SORTED:
            _sorts(atlas, dtype, shape)
        for length in _LENGTHS:
            _positions(atlas, dtype, length)
    for length in _LENGTHS:
        _integers(atlas, length)


def _masks(atlas: Atlas, dtype: str, shape: tuple[int, ...]) -> None:
    x = tensor(*shape, dtype=DTYPES[dtype])
    values = tensor(x.numel(), dtype=DTYPES[dtype])
    mask = x.detach() > -torch.inf

    def put(value: Tensor | float, where: Tensor) -> Tensor:
        changed = x.clone()
        changed[where] = value
        return changed

    functions: dict[str, Callable[[], object]] = {
        "bool index all": lambda: x[mask],
        "bool index rows all": lambda: x[mask[..., 0]],
        "bool index new all": lambda: x[x > -torch.inf],
        "masked_select all": lambda: x.masked_select(mask),
        "masked_scatter all": lambda: x.masked_scatter(mask, values),
        "put all": lambda: put(values, mask),
        "fill all": lambda: put(0.0, mask),
        "nonzero all": lambda: mask.nonzero(),
        "nonzero of values all": lambda: x.nonzero(),
        "where all": lambda: torch.where(mask),
        "argwhere all": lambda: torch.argwhere(mask),
        "count_nonzero all": lambda: torch.count_nonzero(x),
    }
    for name, function in functions.items():
        atlas.row(name, function, [x, values], dtype=dtype, shape=list(shape))


def _sorts(atlas: Atlas, dtype: str, shape: tuple[int, ...]) -> None:
    x = tensor(*shape, dtype=DTYPES[dtype])
    chances = torch.rand(shape, device=DEVICE)
    functions: dict[str, Callable[[], object]] = {
        "sort": lambda: x.sort(-1),
        "sort stable": lambda: x.sort(dim=-1, stable=True),
        "sort first": lambda: x.sort(0),
        "argsort": lambda: x.argsort(-1),
        "topk": lambda: x.topk(50, -1),
        "kthvalue": lambda: x.kthvalue(3, -1),
        "median": lambda: x.median(-1),
        "median of all": lambda: x.median(),
        "cumsum": lambda: x.cumsum(-1),
        "cumsum first": lambda: x.cumsum(0),
        "cumsum of all": lambda: x.flatten().cumsum(0),
        "cumprod": lambda: x.cumprod(-1),
        "cummax": lambda: x.cummax(-1),
        "logcumsumexp": lambda: x.logcumsumexp(-1),
        "multinomial": lambda: torch.multinomial(chances, 5, True),
    }
    for name, function in functions.items():
        atlas.row(name, function, [x], dtype=dtype, shape=list(shape))


def _positions(atlas: Atlas, dtype: str, length: int) -> None:
    options = {"device": DEVICE, "dtype": DTYPES[dtype]}
    positions = torch.randint(0, _NUM_ROWS, (length,), device=DEVICE)
    source = tensor(length, _WIDTH, dtype=DTYPES[dtype])
    table = nn.Embedding(_NUM_ROWS, _WIDTH, **options)
    bags = nn.EmbeddingBag(_NUM_ROWS, _WIDTH, **options)
    weight = table.weight
    row = functools.partial(atlas.row, dtype=dtype, length=length)
    row("embedding", lambda: table(positions), [weight])
    row("embedding_bag", lambda: bags(positions[None]), [bags.weight])
    row("index first", lambda: weight[positions], [weight])
    row("index_select first", lambda: weight.index_select(0, positions), [weight])

    def put(accumulate: bool) -> Tensor:
        return weight.index_put((positions,), source, accumulate=accumulate)

    row("index_put", lambda: put(False), [weight, source])
    row("index_put accumulate", lambda: put(True), [weight, source])
    row("index_add", lambda: weight.index_add(0, positions, source), [weight, source])


def _integers(atlas: Atlas, length: int) -> None:
    distinct = torch.arange(length, device=DEVICE).flip(0)
    numbers = tensor(length, grad=False)
    functions: dict[str, Callable[[], object]] = {
        "randperm": lambda: torch.randperm(length, device=DEVICE),
        "unique": lambda: distinct.unique(),
        "unique counted": lambda: distinct.unique(return_inverse=True, return_counts=True),
        "unique_consecutive": lambda: distinct.unique_consecutive(),
        "sort": lambda: distinct.sort(),
        "histc": lambda: numbers.histc(100),
        "searchsorted": lambda: torch.searchsorted(numbers, numbers),
        "cumsum": lambda: distinct.cumsum(0),
        "cumsum of a mask": lambda: (distinct >= 0).cumsum(0),
        "repeat_interleave counted": lambda: numbers.repeat_interleave(
            torch.full_like(distinct, 2), output_size=2 * length
        ),
    }
    for name, function in functions.items():
        atlas.row(name, function, length=length)
