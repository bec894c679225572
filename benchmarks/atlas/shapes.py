"""Losses, norms, activations, layers and more, in shapes that people train with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.atlas import solvers, steps
from benchmarks.atlas.rows import DEVICE, DTYPES, Atlas, tensor, under_autocast, warm

_LOGITS = ((4096, 32000), (2048, 151936), (8192, 50257))
_NO_MULTINOMIAL = 50257  # classes
_HIDDEN = ((4, 1024, 1024), (2, 2048, 4096), (8, 197, 768), (3, 333, 1000))
_IMAGES = ((16, 64, 56), (4, 320, 64), (32, 256, 14))
_ACTIVATIONS = (
    "gelu", "silu", "relu", "tanh", "mish", "leaky_relu", "elu", "softplus", "hardswish", "sigmoid",
)  # fmt: skip
_NUM_WORDS = 30_000


def shapes(atlas: Atlas) -> None:
    """Writes the rows of everything but attention and convolutions."""
    warm()
    for dtype in DTYPES:
        for logits in _LOGITS:
            _logits(atlas, dtype, *logits)
        for hidden in _HIDDEN:
            _norms(atlas, dtype, *hidden)
        for images in _IMAGES:
            _images(atlas, dtype, *images)
        _recurrent(atlas, dtype)
        _layers(atlas, dtype)
    solvers.solvers(atlas)
    steps.steps(atlas)


def _logits(atlas: Atlas, dtype: str, num: int, classes: int) -> None:
    x = tensor(num, classes, dtype=DTYPES[dtype])
    y = torch.randint(0, classes, (num,), device=DEVICE)
    y[:7] = -100
    row = functools.partial(atlas.row, dtype=dtype, shape=[num, classes])
    options: dict[str, Any]
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"reduction": "sum"}):
        run = functools.partial(functional.cross_entropy, x, y, **options)
        row("cross_entropy", run, [x], kw=str(options))
    row("cross_entropy float()", lambda: functional.cross_entropy(x.float(), y), [x])
    row("softmax", lambda: functional.softmax(x, -1), [x])
    row("log_softmax", lambda: functional.log_softmax(x, -1), [x])
    row("softmax to fp32", lambda: functional.softmax(x, -1, dtype=torch.float32), [x])
    row("logsumexp", lambda: torch.logsumexp(x, -1), [x])
    row("argmax", lambda: x.argmax(-1))
    row("topk", lambda: x.topk(50, -1), [x])
    row("sort", lambda: x.sort(-1), [x])
    row("cumsum", lambda: x.cumsum(-1), [x])
    row("gather", lambda: x.gather(1, y.clamp(0)[:, None]), [x])
    if classes != _NO_MULTINOMIAL:
        row("multinomial", lambda: torch.multinomial(functional.softmax(x.detach().float(), -1), 1))


def _norms(atlas: Atlas, dtype: str, batch: int, length: int, width: int) -> None:
    x = tensor(batch, length, width, dtype=DTYPES[dtype])
    weight, bias = (tensor(width, dtype=DTYPES[dtype]) for _ in range(2))
    row = functools.partial(atlas.row, dtype=dtype, shape=[batch, length, width])
    row("layer_norm", lambda: functional.layer_norm(x, (width,), weight, bias), [x, weight, bias])
    row("rms_norm", lambda: functional.rms_norm(x, (width,), weight), [x, weight])
    weight32, bias32 = tensor(width), tensor(width)
    run = under_autocast(lambda: functional.layer_norm(x, (width,), weight32, bias32))
    row("layer_norm autocast", run, [x, weight32, bias32])
    for name in _ACTIVATIONS:
        row(name, functools.partial(getattr(functional, name), x), [x])
    row("gelu tanh", lambda: functional.gelu(x, approximate="tanh"), [x])
    row("dropout", lambda: functional.dropout(x, 0.1), [x])
    row("glu", lambda: functional.glu(x, -1), [x])
    _products(atlas, dtype, x)
    for name, function in {**_moves(x), **_reductions(x), **_losses(x)}.items():
        row(name, function, [x])
    _words(atlas, dtype, batch, length, width)


def _products(atlas: Atlas, dtype: str, x: Tensor) -> None:
    batch, length, width = x.shape
    for outputs in (width, 4 * width, 3 * width):
        row = functools.partial(atlas.row, dtype=dtype, shape=[batch, length, width, outputs])
        options = {"device": DEVICE, "dtype": DTYPES[dtype]}
        for name, has_bias in (("linear", True), ("linear no bias", False)):
            module = nn.Linear(width, outputs, bias=has_bias, **options)
            row(name, functools.partial(module, x), [x, *module.parameters()])
        if dtype == "fp32":
            module = nn.Linear(width, outputs, device=DEVICE)
            run = under_autocast(functools.partial(module, x))
            row("linear autocast", run, [x, *module.parameters()])
    q = tensor(batch * 8, length, 64, dtype=DTYPES[dtype])
    row = functools.partial(atlas.row, dtype=dtype, shape=[batch * 8, length, 64])
    row("bmm", lambda: q @ q.transpose(1, 2), [q])
    row("einsum", lambda: torch.einsum("bld,bmd->blm", q, q), [q])
    row("baddbmm", lambda: torch.baddbmm(q.new_zeros(1, 1, 1), q, q.transpose(1, 2)), [q])


def _moves(x: Tensor) -> dict[str, Callable[[], object]]:
    batch, length, width = x.shape

    def scattered() -> Tensor:
        return torch.zeros_like(x).scatter_add(
            1, torch.randint(0, length, (batch, length, width), device=DEVICE), x
        )

    def recomputed() -> object:
        return checkpoint(lambda t: functional.gelu(functional.gelu(t) * 2), x, use_reentrant=False)

    return {
        "cat": lambda: torch.cat([x, x], -1),
        "stack": lambda: torch.stack([x, x]),
        "roll": lambda: x.roll(3, 1),
        "repeat_interleave": lambda: x.repeat_interleave(2, 1),
        "masked_fill": lambda: x.masked_fill(x > 0, 0.0),
        "where": lambda: torch.where(x > 0, x, x * 2),
        "index_select": lambda: x.index_select(1, torch.arange(10, device=DEVICE)),
        "index": lambda: x[:, torch.arange(50, device=DEVICE)],
        "bool index": lambda: x[x > 0],
        "clamp": lambda: x.clamp(-1, 1),
        "pow": lambda: x.pow(2),
        "outer add": lambda: x[:, :, None, :64] + x[:, None, :, :64],
        "unfold": lambda: x.unfold(1, 8, 4).contiguous(),
        "pad": lambda: functional.pad(x, (0, 3, 1, 1)),
        "tril": lambda: torch.tril(x),
        "float": lambda: x.float(),
        "scatter_add": scattered,
        "checkpoint": recomputed,
    }


def _reductions(x: Tensor) -> dict[str, Callable[[], object]]:
    return {
        "mean": lambda: x.mean(),
        "var": lambda: x.var(-1),
        "std_mean": lambda: torch.std_mean(x, -1),
        "norm": lambda: x.norm(),
        "max": lambda: x.max(-1),
        "rsqrt": lambda: x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * x,
        "cosine": lambda: functional.cosine_similarity(x, x.roll(1, 0), dim=-1),
        "normalize": lambda: functional.normalize(x, dim=-1),
        "cdist": lambda: torch.cdist(x[..., :64].float(), x[..., :64].float()),
    }


def _losses(x: Tensor) -> dict[str, Callable[[], object]]:
    def divergence() -> Tensor:
        return functional.kl_div(
            functional.log_softmax(x, -1), functional.softmax(x.detach(), -1), reduction="batchmean"
        )

    bce = functional.binary_cross_entropy_with_logits
    return {
        "mse": lambda: functional.mse_loss(x, x.detach().roll(1, 0)),
        "l1": lambda: functional.l1_loss(x, x.detach().roll(1, 0)),
        "smooth_l1": lambda: functional.smooth_l1_loss(x, x.detach().roll(1, 0)),
        "bce": lambda: bce(x, (x.detach() > 0).to(x.dtype)),
        "kl": divergence,
    }


def _words(atlas: Atlas, dtype: str, batch: int, length: int, width: int) -> None:
    row = functools.partial(atlas.row, dtype=dtype, shape=[batch, length, width])
    words = torch.randint(0, _NUM_WORDS, (batch, length), device=DEVICE)
    options: dict[str, int]
    for options in ({}, {"padding_idx": 0}):
        table: Any = nn.Embedding(_NUM_WORDS, width, device=DEVICE, dtype=DTYPES[dtype], **options)
        run = functools.partial(table, words)
        row("embedding", run, [table.weight], kw=str(options))
        del table, run
    row("one_hot", lambda: functional.one_hot(words, _NUM_WORDS))


def _images(atlas: Atlas, dtype: str, num: int, channels: int, size: int) -> None:
    x = tensor(num, channels, size, size, dtype=DTYPES[dtype])
    for last in (False, True):
        images = x
        if last:
            images = x.detach().to(memory_format=torch.channels_last).requires_grad_()
        _of_layout(atlas, dtype, images, channels_last=last)
    grid = (torch.rand(num, size, size, 2, device=DEVICE) * 2 - 1).to(DTYPES[dtype])
    grid.requires_grad_()
    run = functools.partial(functional.grid_sample, x, grid, align_corners=False)
    atlas.row("grid_sample", run, [x, grid], dtype=dtype, shape=[num, channels, size])


def _of_layout(atlas: Atlas, dtype: str, x: Tensor, channels_last: bool) -> None:
    num, channels, size, _ = x.shape
    row = functools.partial(
        atlas.row, dtype=dtype, shape=[num, channels, size], channels_last=channels_last
    )
    given = {"device": DEVICE, "dtype": DTYPES[dtype]}
    for name, module in (
        ("batch_norm", nn.BatchNorm2d(channels, **given)),
        ("batch_norm fp32 weights", nn.BatchNorm2d(channels, device=DEVICE)),
        ("group_norm", nn.GroupNorm(32, channels, **given)),
    ):
        row(name, functools.partial(module, x), [x, *module.parameters()])
    doubled = functools.partial(functional.interpolate, x, scale_factor=2.0)
    functions: dict[str, Callable[[], object]] = {
        "max_pool": lambda: functional.max_pool2d(x, 3, 2, 1),
        "avg_pool": lambda: functional.avg_pool2d(x, 2),
        "adaptive": lambda: functional.adaptive_avg_pool2d(x, 1),
        "nearest": doubled,
        "bilinear": lambda: doubled(mode="bilinear"),
        "bicubic": lambda: doubled(mode="bicubic"),
        "pixel_shuffle": lambda: functional.pixel_shuffle(x, 2),
        "flatten": lambda: x.flatten(2).transpose(1, 2).contiguous(),
        "upsample autocast": under_autocast(lambda: doubled(mode="bilinear")),
    }
    for name, function in functions.items():
        row(name, function, [x])


def _recurrent(atlas: Atlas, dtype: str) -> None:
    for kind in ("LSTM", "GRU", "RNN"):
        for layers, both, dropout in ((1, False, 0.0), (3, False, 0.1), (2, True, 0.0)):
            module = getattr(nn, kind)(
                512, 1024, layers, batch_first=True, bidirectional=both, dropout=dropout,
                device=DEVICE, dtype=DTYPES[dtype],
            )  # fmt: skip
            x = tensor(4, 256, 512, dtype=DTYPES[dtype])
            words = {"dtype": dtype, "layers": layers, "bi": both, "drop": dropout}
            run = functools.partial(_outputs, module, x)
            atlas.row(kind, run, [x, *module.parameters()], **words)


def _outputs(module: nn.Module, *arguments: Tensor) -> Tensor:
    outputs: Tensor = module(*arguments)[0]
    return outputs


def _layers(atlas: Atlas, dtype: str) -> None:
    given = {"batch_first": True, "device": DEVICE, "dtype": DTYPES[dtype]}
    x = tensor(8, 256, 512, dtype=DTYPES[dtype])
    attends = nn.MultiheadAttention(512, 8, **given)
    inputs = [x, *attends.parameters()]
    atlas.row("mha", lambda: attends(x, x, x, need_weights=False)[0], inputs, dtype=dtype)
    atlas.row("mha weights", lambda: attends(x, x, x)[0], inputs, dtype=dtype)
    layer = nn.TransformerEncoderLayer(512, 8, **given)
    atlas.row("encoder layer", lambda: layer(x), [x, *layer.parameters()], dtype=dtype)
    chances = functional.log_softmax(tensor(200, 8, 40), -1).detach().requires_grad_()

    def ctc() -> Tensor:
        said = torch.randint(1, 40, (8, 30), device=DEVICE)
        return functional.ctc_loss(chances, said, torch.full((8,), 200), torch.full((8,), 30))

    atlas.row("ctc", ctc, [chances], dtype=dtype)
