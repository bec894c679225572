"""The move of a module to the device, or the copy of one there, in whose midst memory ran out, and
what of it was to come.

`Module.to`, `.cuda()` and `copy.deepcopy` take one tensor after the other: the request that failed
is the next one, and says nothing of those after it.
"""

from __future__ import annotations

import collections
import copy
import gc
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from residency._memory import _objects
from residency._memory._holders._holders import addresses_of

_ON_HOST = ("cpu", "meta")


@dataclass(frozen=True, slots=True)
class FailedMove:
    """A module's move, or its copy, that an error left.

    Attributes:
        rest_bytes: What it was still to take on the device.
        addresses: Where storages of its tensors begin that are on the device.
        shapes: Bytes of its parameters of each shape, wherever they are.
        copied_bytes: What of a copy is there; 0 for a move.
    """

    rest_bytes: int
    addresses: frozenset[int]
    shapes: Mapping[object, int]
    copied_bytes: int = 0

    def missing_bytes(self, room: int) -> int:
        """Returns the bytes that it lacks to come to its end, in so much room."""
        return max(0, self.rest_bytes - room)


def failed_move(error: BaseException) -> FailedMove | None:
    """Returns the move or the copy that an error left; None for an error of another place."""
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        is_copy = frame.f_code is copy.deepcopy.__code__
        if frame.f_code.co_name != "_apply" and not is_copy:
            continue
        # Not by its locals, which Python would keep a copy of. [Note: locals]
        referred = gc.get_referents(frame)
        module = next((each for each in referred if _objects.is_a(each, nn.Module)), None)
        if module is not None:
            with torch._C.DisableTorchFunction():  # [Note: foreign code]
                found = _copied(module, referred) if is_copy else None
                found = found or _describe(module, _dtype_of(referred))
            return found if found.rest_bytes else None
    return None


def _copied(module: object, referred: list[Any]) -> FailedMove | None:
    """Describes the copy of a module, by what ``deepcopy`` has copied already."""
    tensors = [each for each, _ in _tensors(module)]
    known = {id(each) for each in tensors}
    memo = next((each for each in referred if type(each) is dict and known & each.keys()), {})
    rest = copied = 0
    addresses: set[int] = set()
    for tensor in tensors:
        if _objects.slot(tensor, "device").type in _ON_HOST:
            continue
        num_bytes = int(_objects.slot(tensor, "nbytes") or 0)
        if _objects.is_a(made := memo.get(id(tensor)), torch.Tensor):
            copied += num_bytes
            addresses |= addresses_of(made)
        else:
            rest += num_bytes
    return FailedMove(rest, frozenset(addresses), {}, copied) if rest else None


def _dtype_of(referred: list[Any]) -> torch.dtype | None:
    """Returns the type that `to` gives what it moves, of the function that it moves with."""
    for each in referred:
        if type(each) is types.FunctionType and "dtype" in each.__code__.co_freevars:
            cell = (each.__closure__ or ())[each.__code__.co_freevars.index("dtype")]
            return cell.cell_contents if type(cell.cell_contents) is torch.dtype else None
    return None


def _describe(module: object, dtype: torch.dtype | None) -> FailedMove:
    rest = 0
    addresses: set[int] = set()
    shapes: collections.Counter[object] = collections.Counter()
    for tensor, is_parameter in _tensors(module):
        num_bytes = int(_objects.slot(tensor, "nbytes") or 0)
        own = _objects.slot(tensor, "dtype")
        if dtype is not None and (own.is_floating_point or own.is_complex):
            num_bytes = num_bytes // own.itemsize * dtype.itemsize
        if _objects.slot(tensor, "device").type in _ON_HOST:
            rest += num_bytes
        else:
            addresses |= addresses_of(tensor)
        if is_parameter:
            shapes[tuple(_objects.slot(tensor, "shape"))] += num_bytes
    return FailedMove(rest, frozenset(addresses), shapes)


def _tensors(module: object) -> Iterator[tuple[Any, bool]]:
    """Yields what a move takes, once each, and whether it is a parameter."""
    seen, modules = set(), [module]
    while modules:
        inner = modules.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        table = _objects.attributes(inner) or {}
        modules += [each for _, each in _objects.items(table.get("_modules")) if each is not None]
        for kind in ("_parameters", "_buffers"):
            for _, tensor in _objects.items(table.get(kind)):
                for each in (tensor, _objects.slot(tensor, "grad")):
                    if _objects.is_a(each, torch.Tensor) and id(each) not in seen:
                        seen.add(id(each))
                        yield each, kind == "_parameters" and each is tensor
