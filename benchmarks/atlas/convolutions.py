"""Convolutions of common networks: plain, with each switch of cuDNN's, and with little room."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.atlas.rows import DEVICE, DTYPES, Atlas, tensor, warm
from residency import sim


class Case(NamedTuple):
    """A convolution of ``n`` images of ``size`` in each of ``dims`` directions."""

    dims: int
    n: int
    ci: int
    size: int
    co: int
    k: int
    stride: int
    padding: int
    groups: int
    transposed: int


_RESNET = (
    (3, 224, 64, 7, 2, 3), (64, 56, 64, 1, 1, 0), (64, 56, 64, 3, 1, 1), (64, 56, 256, 1, 1, 0),
    (256, 56, 128, 1, 1, 0), (128, 56, 128, 3, 2, 1), (128, 28, 128, 3, 1, 1),
    (512, 28, 256, 1, 1, 0), (256, 14, 256, 3, 1, 1), (512, 7, 512, 3, 1, 1),
    (512, 7, 2048, 1, 1, 0), (256, 56, 512, 1, 2, 0),
)  # fmt: skip
_DIFFUSION = (
    (4, 64, 320, 3, 1, 1), (320, 64, 320, 3, 1, 1), (320, 32, 640, 3, 1, 1),
    (1280, 16, 1280, 3, 1, 1), (128, 32, 128, 3, 1, 1), (256, 16, 256, 3, 1, 1),
    (512, 8, 512, 3, 1, 1), (3, 32, 128, 3, 1, 1), (960, 32, 320, 3, 1, 1),
)  # fmt: skip
_GROUPED_AND_TRANSPOSED = (
    (96, 56, 96, 7, 1, 3, 96, 0), (384, 14, 384, 7, 1, 3, 384, 0), (3, 224, 96, 4, 4, 0, 1, 0),
    (3, 224, 768, 16, 16, 0, 1, 0), (144, 75, 144, 3, 2, 1, 144, 0), (256, 32, 128, 2, 2, 0, 1, 1),
    (512, 16, 256, 4, 2, 1, 1, 1), (64, 48, 64, 3, 1, 2, 1, 0),
)  # fmt: skip
_SOUND_AND_VOLUMES = (
    (1, 1, 80000, 512, 10, 5, 0, 1), (1, 512, 15999, 512, 3, 2, 0, 1),
    (1, 512, 249, 512, 128, 1, 64, 16), (1, 80, 3000, 512, 3, 1, 1, 1),
    (1, 512, 3000, 512, 3, 2, 1, 1), (3, 1, 32, 32, 3, 1, 1, 1), (3, 32, 32, 64, 3, 1, 1, 1),
    (3, 64, 16, 128, 3, 1, 1, 1), (3, 3, 32, 768, 2, 2, 0, 1),
)  # fmt: skip
CASES = [
    *(Case(2, n, *shape, 1, 0) for n in (8, 32, 64) for shape in _RESNET),
    *(Case(2, n, *shape, 1, 0) for n in (4, 16) for shape in _DIFFUSION),
    *(Case(2, 16, *shape) for shape in _GROUPED_AND_TRANSPOSED),
    *(Case(dims, 4, *shape, 0) for dims, *shape in _SOUND_AND_VOLUMES),
]
_OF_SWITCHES = CASES[12:26]
# Those whose input and result, converted to channels_last, are a workspace of 60 MiB and more.
_OF_SPACE = [Case(2, 64, *_RESNET[i], 1, 0) for i in (0, 2, 5)] + [
    Case(2, 16, *_DIFFUSION[i], 1, 0) for i in (0, 1, 2, 8)
]
_LARGEST_SEGMENT = 20 << 20  # of requests of less than 10 MiB, which then share it
_LEAST_WORKSPACE = 3 * _LARGEST_SEGMENT  # half of it then holds what shares a segment


def convolutions(atlas: Atlas) -> None:
    """Writes the rows of convolutions that have all the room that they ask for."""
    warm()
    for dtype in DTYPES:
        for last in (False, True):
            for case in CASES:
                if not last or case.dims == 2:
                    _plain(atlas, case, dtype, last)
    settings: Any = torch.backends.cudnn  # its attributes are properties of a module
    for switch, value, word in (
        ("benchmark", True, {"benchmark": True}),
        ("allow_tf32", False, {"tf32": False}),
        ("deterministic", True, {"deterministic": True}),
    ):
        before = getattr(settings, switch)
        setattr(settings, switch, value)
        try:
            for case in _OF_SWITCHES:
                _plain(atlas, case, "fp32", False, **word)
        finally:
            setattr(settings, switch, before)


def refused(atlas: Atlas) -> None:
    """Writes the rows of convolutions that are refused the workspace that they ask for.

    Torch keeps a plan by its shape, the one that it found while there was room included: each case
    has two processes of its own, of which the first finds out what it takes. A dry run has no such
    workspace, and needs none.
    """
    for number, case in enumerate(CASES):
        if case not in _OF_SPACE:
            continue
        if sim.is_enabled():
            refuse(atlas, number, ())
            continue
        plain = _alone(number)
        if "error" in plain:
            continue
        spaces = [plain[part][2] - plain[part][3] for part in ("fw", "bw")]
        if min(spaces) >= _LEAST_WORKSPACE:
            atlas.write(_alone(number, *spaces))


def refuse(atlas: Atlas, number: int, spaces: Sequence[int]) -> None:
    """Writes the row of one case.

    Args:
        atlas: The rows.
        number: Of the case.
        spaces: The workspaces of its two passes, of which half is left; without, all have room.
    """
    warm()
    case = CASES[number]
    module, inputs = _made(case, "fp32", False)
    x, rooms = inputs[0], None
    if spaces:
        outputs = _reserved(_num_outputs(case) * 4)
        gradients = sum(_reserved(tensor.numel() * 4) for tensor in inputs)
        rooms = outputs + spaces[0] // 2, gradients + spaces[1] // 2
    atlas.row(
        "conv refused", lambda: module(x), inputs, rooms=rooms, dtype="fp32",
        **case._asdict(), channels_last=False,
    )  # fmt: skip


def _alone(number: int, *spaces: int) -> dict[str, Any]:
    """Returns the row of a case that has a process to itself."""
    command = [sys.executable, "-m", "benchmarks.atlas", "refuse", str(number), *map(str, spaces)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in io.StringIO(done.stdout) if line.startswith('{"op"')]
    return rows[-1] if rows else {"op": "conv refused", "error": done.stderr[-120:]}


def _plain(atlas: Atlas, case: Case, dtype: str, last: bool, **word: bool) -> None:
    module, inputs = _made(case, dtype, last)
    x = inputs[0]
    words = {**case._asdict(), "channels_last": last, **word}
    atlas.row("conv", lambda: module(x), inputs, dtype=dtype, **words)


def _made(case: Case, dtype: str, last: bool) -> tuple[nn.Module, list[torch.Tensor]]:
    of_dtype = DTYPES[dtype]
    x = tensor(case.n, case.ci, *[case.size] * case.dims, dtype=of_dtype, scale=0.1)
    kind = getattr(nn, f"Conv{'Transpose' * case.transposed}{case.dims}d")
    sizes = case.ci, case.co, case.k, case.stride, case.padding
    module = kind(*sizes, groups=case.groups, device=DEVICE, dtype=of_dtype)
    if last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
        module = module.to(memory_format=torch.channels_last)
    return module, [x, *module.parameters()]


def _num_outputs(case: Case) -> int:
    size = (case.size + 2 * case.padding - case.k) // case.stride + 1
    return int(case.n * case.co * size**case.dims)


def _reserved(num_bytes: int) -> int:
    """Returns what the allocator reserves for a request that finds nothing free."""
    if num_bytes >= 10 << 20:
        return -(-num_bytes // (2 << 20)) * (2 << 20)
    return _LARGEST_SEGMENT if num_bytes > 1 << 20 else 2 << 20
