"""Linear algebra and Fourier transforms of a few matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.atlas.rows import DEVICE, Atlas, tensor


def solvers(atlas: Atlas) -> None:
    """Writes the rows of two sizes."""
    for size in (64, 512):
        _of_size(atlas, size)


def _of_size(atlas: Atlas, size: int) -> None:
    a = tensor(4, size, size)
    definite = a.detach() @ a.detach().mT + size * torch.eye(size, device=DEVICE)
    definite.requires_grad_()

    def windowed() -> Tensor:
        window = torch.hann_window(256, device=DEVICE)
        return torch.stft(a.flatten(1), 256, return_complex=True, window=window)

    cases: list[tuple[str, Callable[[], object], list[Tensor]]] = [
        ("cholesky", functools.partial(torch.linalg.cholesky, definite), [definite]),
        ("inv", functools.partial(torch.linalg.inv, definite), [definite]),
        ("solve", functools.partial(torch.linalg.solve, definite, a), [definite, a]),
        ("eigh", functools.partial(torch.linalg.eigh, definite), [definite]),
        ("svd", functools.partial(torch.linalg.svd, a, full_matrices=False), [a]),
        ("qr", functools.partial(torch.linalg.qr, a), [a]),
        ("fft", functools.partial(torch.fft.fft, a), [a]),
        ("rfft2", functools.partial(torch.fft.rfft2, a), [a]),
        ("stft", windowed, [a]),
    ]
    for name, function, inputs in cases:
        atlas.row(name, function, inputs, n=size)
