"""Arrays and bytearrays that are here: memory to fill, as tensors are.

So they are read into at once, and what shares their memory (views of one array, a tensor over it)
is found by address among all that a restore fills.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from residency._checkpoint._document._kinds import array_form
from residency._checkpoint._document._nodes import NDARRAY, Node, kind_of
from residency._checkpoint._restore._boxes import Box
from residency._checkpoint._restore._plan import RestorePlan, Target
from residency._checkpoint._restore._values import senseless_is_damage, understood
from residency._checkpoint._sources._source import StoredTensor
from residency._modes import callers_modes_off
from residency._storages import overlaps_itself


def is_array(value: object) -> bool:
    """Returns whether a value is an array of numpy itself."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def fill_memory(plan: RestorePlan, path: str, node: Node, there: Any) -> bool:
    """Plans to fill an array or a bytearray from its node, where it has the form of what was saved.

    Args:
        plan: Gets the memory.
        path: What the value is called.
        node: Of an array or a bytearray.
        there: What is here, of any class.

    Returns:
        Whether it is filled so. If not, the value is read anew, and put into its place.

    Raises:
        CorruptSaveError: The node makes no sense.
    """
    found = _array_memory(path, node, there) if is_array(there) else _bytes_memory(there)
    if found is None:
        return False
    memory, is_turned = found
    stored = _stored(plan, path, node, memory.numel())
    if stored is None:
        return False
    if is_turned or overlaps_itself(memory):  # in no order that a file can be read in
        plan.late.append((path, memory))
        return False
    shape = tuple(memory.shape)
    zeros = (0,) * len(shape)
    stored = stored._replace(shape=shape, whole_shape=shape, offsets=zeros)
    plan.targets.append(Target(path, memory, Box(zeros, shape), shape, [stored]))
    return True


def _array_memory(path: str, node: Node, there: Any) -> tuple[Tensor, bool] | None:
    """Returns an array's bytes, of shape ``[*shape, itemsize]`` in the order in which those of its
    node are, and whether some dimension of it runs backwards, which no tensor's does.
    """
    with senseless_is_damage(path):
        form = array_form(node) if kind_of(node) == NDARRAY else None
    if form is None or node.get("is_scalar") or not there.flags.writeable or not there.nbytes:
        return None
    if (there.shape, there.dtype) != (form.shape, form.dtype):
        return None
    laid = there.T if form.order == "F" else there
    forward = laid[(..., *(slice(None, None, -1 if step < 0 else 1) for step in laid.strides))]
    if forward.flags.c_contiguous:
        forward = forward.reshape(-1)
    with callers_modes_off():
        memory = torch.from_numpy(forward[..., None].view("u1"))
    return memory, any(step < 0 for step in laid.strides)


def _bytes_memory(there: Any) -> tuple[Tensor, bool] | None:
    if type(there) is not bytearray or not there:
        return None
    with callers_modes_off():
        return torch.frombuffer(there, dtype=torch.uint8), False


def _stored(plan: RestorePlan, path: str, node: Node, num_bytes: int) -> StoredTensor | None:
    """Returns where the bytes of a node are; None where they are of another number."""
    if "tensor" in node:
        [stored, *others] = plan.source.tensors[node["tensor"]]
        is_plain = not others and stored.dtype == torch.uint8 and stored.stride is None
        return stored if is_plain and stored.shape == (num_bytes,) else None
    data = understood(path, node)
    if len(data) != num_bytes:
        return None
    with callers_modes_off():
        flat = torch.frombuffer(data, dtype=torch.uint8)
    return StoredTensor(path, flat.dtype, (), (), (), tensor=flat)
