"""Steps of torch's own optimizers, the first of a fresh one and the second, and clipping."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.atlas.rows import DTYPES, Atlas, tensor

_SIZES = {
    "many": [(512, 512)] * 60 + [(512,)] * 60,
    "few": [(4096, 4096)] * 3 + [(151936, 256)],
}
_RATE = 1e-3
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": _RATE, "momentum": 0.9}),
    "SGD fused": (torch.optim.SGD, {"lr": _RATE, "momentum": 0.9, "fused": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Muon": (torch.optim.Muon, {}),
}


def steps(atlas: Atlas) -> None:
    """Writes the rows of every optimizer, dtype and set of parameters."""
    for dtype in DTYPES:
        for sizes in _SIZES:
            for name in _OPTIMIZERS:
                _of_optimizer(atlas, name, dtype, sizes)


def _of_optimizer(atlas: Atlas, name: str, dtype: str, sizes: str) -> None:
    parameters = [
        nn.Parameter(tensor(*size, dtype=DTYPES[dtype], grad=False)) for size in _SIZES[sizes]
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    kind, options = _OPTIMIZERS[name]
    taken = [p for p in parameters if p.dim() == 2] if name == "Muon" else parameters
    words = {"dtype": dtype, "sizes": sizes}
    optimizer = kind(taken, **options)
    try:
        for number in range(2):
            _once(atlas, f"step {name}", optimizer.step, **words, n=number)
    except Exception as error:  # a step that this torch refuses is a row, too
        atlas.write({"op": f"step {name}", **words, "error": str(error)[:120]})
    if name == "AdamW fused":
        for foreach in (True, False):
            clip = functools.partial(nn.utils.clip_grad_norm_, parameters, 1.0, foreach=foreach)
            _once(atlas, "clip_grad_norm_", clip, **words, foreach=foreach)


def _once(atlas: Atlas, op: str, function: Callable[[], object], **words: object) -> None:
    atlas.start()
    function()
    atlas.write({"op": op, "fw": atlas.stop(), "bw": None, **words})
