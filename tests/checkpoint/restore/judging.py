"""How values that were saved and restored are judged: by what torch.save and torch.load make."""

from __future__ import annotations

import io
import struct
from collections import ChainMap, deque
from typing import Any

import numpy
import torch
from torch import Tensor

import residency
from residency import RefusedError


def same(found: Any, expected: Any) -> bool:
    """Compares classes, bits, order and layout."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, Tensor):
        return (found.dtype, found.shape) == (expected.dtype, expected.shape) and raw(found) == raw(
            expected
        )
    if isinstance(expected, torch.Generator):
        return found.device == expected.device and torch.equal(
            found.get_state(), expected.get_state()
        )
    if isinstance(expected, numpy.ndarray | numpy.generic):
        flags = found.flags.f_contiguous == expected.flags.f_contiguous
        alike = (found.dtype.str, found.shape) == (expected.dtype.str, expected.shape)
        return flags and alike and found.tobytes() == expected.tobytes()
    if isinstance(expected, float):
        return struct.pack("d", found) == struct.pack("d", expected)
    if isinstance(expected, complex):
        return same(found.real, expected.real) and same(found.imag, expected.imag)
    if isinstance(expected, dict):
        extra = [getattr(each, "default_factory", None) for each in (found, expected)]
        return extra[0] is extra[1] and same(list(found.items()), list(expected.items()))
    if isinstance(expected, ChainMap):
        return same(found.maps, expected.maps)
    if isinstance(expected, deque) and found.maxlen != expected.maxlen:
        return False
    if isinstance(expected, list | tuple | deque):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, set | frozenset):
        return len(found) == len(expected) and all(any(same(f, e) for f in found) for e in expected)
    return bool(found == expected)


def raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def judged(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def refusal(checkpointer: residency.Checkpointer, state: dict[str, Any]) -> str | None:
    """Saves a state; returns what is said against it in the call."""
    try:
        save = checkpointer.save(1, state, rng=False)
    except RefusedError as error:
        return str(error)
    save.wait()
    return None
