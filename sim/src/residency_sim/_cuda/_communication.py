"""The functions that torch's C++ gives to ``torch.nn.parallel.comm``: copies among the devices of a
process, as ``nn.DataParallel`` makes them.

Tensors are on one device here, so that the copies are those to and from the host; what names a
second device is refused by the copy.

Source: torch/csrc/cuda/comm.cpp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
HOST = -1  # the index that stands for it


def bindings() -> dict[str, Callable[..., Any]]:
    """Returns the functions by their names in ``torch._C``."""
    return {
        "_broadcast": _broadcast,
        "_broadcast_out": _broadcast_out,
        "_broadcast_coalesced": _broadcast_coalesced,
        "_scatter": _scatter,
        "_scatter_out": _scatter_out,
        "_gather": _gather,
        "_gather_out": _gather_out,
    }


def _to(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor.to(torch.device("cuda", index), non_blocking=True)


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    return [_to(tensor, index) for index in devices]


def _broadcast_out(tensor: torch.Tensor, outputs: Tensors) -> Tensors:
    for output in outputs:
        output.copy_(tensor, non_blocking=True)
    return outputs


def _broadcast_coalesced(
    tensors: Tensors, devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    first, *others = devices
    for tensor in tensors:
        if tensor.device != torch.device("cuda", first):
            raise RuntimeError("all tensors must be on devices[0]")
    return [list(tensors), *([_to(tensor, index) for tensor in tensors] for index in others)]


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[torch.cuda.Stream | None] | None = None,
) -> list[torch.Tensor]:
    if chunk_sizes is None:
        chunks = list(tensor.chunk(len(devices), dim))
    else:
        chunks = list(tensor.split_with_sizes(list(chunk_sizes), dim))
    on_streams = streams or [None] * len(chunks)
    found = []
    for chunk, index, stream in zip(chunks, devices, on_streams, strict=False):
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            found.append(_to(chunk, index))
    return found


def _scatter_out(
    tensor: torch.Tensor, outputs: Tensors, dim: int = 0, streams: object = None
) -> Tensors:
    chunks = tensor.split_with_sizes([output.size(dim) for output in outputs], dim)
    for output, chunk in zip(outputs, chunks, strict=True):
        output.copy_(chunk, non_blocking=True)
    return outputs


def _gather(tensors: Tensors, dim: int = 0, destination: int | None = None) -> torch.Tensor:
    first = tensors[0]
    sizes = list(first.shape)
    sizes[dim] = sum(tensor.size(dim) for tensor in tensors)
    index = torch.cuda.current_device() if destination is None else destination
    device = torch.device("cpu") if index == HOST else torch.device("cuda", index)
    return _gather_out(tensors, torch.empty(sizes, dtype=first.dtype, device=device), dim)


def _gather_out(tensors: Tensors, output: torch.Tensor, dim: int = 0) -> torch.Tensor:
    chunks = output.split_with_sizes([tensor.size(dim) for tensor in tensors], dim)
    for chunk, tensor in zip(chunks, tensors, strict=True):
        chunk.copy_(tensor, non_blocking=output.is_cuda)
    return output
