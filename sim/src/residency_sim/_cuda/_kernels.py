"""Kernels and libraries that torch asks CUDA for beside its dispatcher.

A build with CUDA has these functions, and would ask the real runtime: the kernels of
``torch.cuda.jiterator``, TorchScript's fuser, and the choice among CUDA's libraries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from residency._errors import SimulatorError


def bindings(is_dry: Callable[[], bool]) -> dict[str, Callable[..., Any]]:
    """Returns the functions by their names in ``torch._C``.

    Args:
        is_dry: Says whether kernels run for their shapes only.
    """

    def launch(
        code: str,
        name: str,
        by_reference: bool,
        num_results: int,
        tensors: Sequence[Tensor],
        scalars: object,
    ) -> Tensor | tuple[Tensor, ...]:
        if not is_dry():
            raise SimulatorError(
                f"The simulated accelerator has no compiler for {name}, a kernel of "
                "torch.cuda.jiterator, and computes no values of it; a dry run has its results."
            )
        made = tuple(_result(tensors) for _ in range(num_results))
        return made[0] if num_results == 1 else made

    return {
        "_cuda_jiterator_compile_and_launch_kernel": launch,
        **_preference("linalg"),
        **_preference("blas"),
    }


def keep_from_fusing() -> None:
    """Keeps TorchScript from fusing operators: a fused one would not run on the device."""
    # A private switch, and the only one: it stands above each of torch's fusers.
    torch._C._jit_override_can_fuse_on_gpu(False)


def _preference(kind: str) -> dict[str, Callable[..., Any]]:
    """Keeps the library that a program prefers: a build without CUDA refuses CUDA's by name.

    No figure depends on it: cuBLASLt's workspace is cuBLAS's own (torch 2.11 to 2.13), and
    solvers are taken for cuSOLVER's.
    """
    get, put = f"_get_{kind}_preferred_backend", f"_set_{kind}_preferred_backend"
    chosen = [getattr(torch._C, get)()]  # a private name, and what the public one asks
    return {get: lambda: chosen[0], put: functools.partial(chosen.__setitem__, 0)}


def _result(tensors: Sequence[Tensor]) -> Tensor:
    """Returns what a kernel that goes element by element writes: broadcast, and of one dtype.

    Source: `CompileAndLaunchKernel` in torch's jiterator.cu (2.11 to 2.13): an iterator over all.
    """
    shapes = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors
    ]
    shape = functools.reduce(torch.add, shapes, shapes[0])
    return torch.empty_strided(
        shape.shape, shape.stride(), dtype=shape.dtype, device=tensors[0].device
    )
