"""Reads back the bytes that a source points at, as a restore would."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residency._checkpoint._sources import Source, StoredTensor, TensorName


def contents_of(stored: StoredTensor) -> Tensor:
    """Returns the elements of what is stored, read from the file as a restore would."""
    if stored.tensor is not None:
        return stored.tensor.clone()
    assert stored.file is not None
    with stored.file.open("rb") as stream:
        stream.seek(stored.start)
        data = bytearray(stream.read(stored.num_bytes))
    assert len(data) == stored.num_bytes
    if not data:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(stored.dtype).view(stored.shape)


def whole(shards: list[StoredTensor]) -> Tensor:
    """Puts the shards of a tensor together."""
    tensor = torch.empty(shards[0].whole_shape, dtype=shards[0].dtype)
    for shard in shards:
        place = tensor
        for dimension, (begin, size) in enumerate(zip(shard.offsets, shard.shape, strict=True)):
            place = place.narrow(dimension, begin, size)
        place.copy_(contents_of(shard))
    return tensor


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def is_same(found: Any, expected: Any, source: Source) -> bool:
    """Compares values, with the bits of the tensors in the place of their names."""
    if isinstance(expected, Tensor):
        return isinstance(found, TensorName) and bits(
            whole(list(source.tensors[found.name]))
        ) == bits(expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(
            is_same(found[key], value, source) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple) and not isinstance(expected, torch.Size):
        return (
            type(found) is type(expected)
            and len(found) == len(expected)
            and all(is_same(f, e, source) for f, e in zip(found, expected, strict=True))
        )
    return type(found) is type(expected) and bool(found == expected)
