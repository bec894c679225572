"""Float32 copies of low-precision parameters, which the optimizer steps in their place.

A master is a state like any other: it lives at home, travels in the same buckets and is saved under
the key ``master_weight``. Invariant, which ``tests/optim/test_masters.py`` tries to break: rounded
to the parameter's dtype, a master is the parameter; where other code has written to the parameter,
the master takes the new value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from residency._dtensor import local_of, locals_of, remade
from residency._errors import RefusedError
from residency._storages import sharing

MASTER = "master_weight"


def needs_master(parameter: Tensor) -> bool:
    """Returns whether a parameter is of those that masters are for."""
    return parameter.dtype in (torch.bfloat16, torch.float16)


def check_masters(
    name: str, is_wanted: bool, device: torch.device, members: Iterable[tuple[int, Tensor]]
) -> None:
    """Checks that masters, where they are wanted, can be stepped on ``device``.

    Raises:
        RefusedError: It is the host, where nothing streams, or parameters share bytes.
    """
    if is_wanted:
        refuse_shared_masters([p for _, p in members if needs_master(p)])
    if is_wanted and device.type == "cpu":
        raise RefusedError(
            f"{name} has its parameters on the host, from which nothing streams, so there is no "
            "step on master weights. Move the model to the device first."
        )


def refuse_shared_masters(parameters: Sequence[Tensor]) -> None:
    """Checks that no parameter would get two masters.

    Raises:
        RefusedError: Parameters share bytes.
    """
    groups = sharing(locals_of(parameters))
    if groups:
        shapes = ", ".join(str(tuple(parameters[index].shape)) for index in groups[0])
        raise RefusedError(
            f"parameters of the shapes {shapes} share bytes, which would get a master weight each, "
            "one undoing the steps of the other. Nothing was changed: give the optimizer one of "
            "them, or leave out master_weights."
        )


def master_like(parameter: Tensor) -> Tensor:
    """Returns what a master looks like, on meta."""
    like = partial(torch.empty_like, dtype=torch.float32, device="meta")
    return remade(parameter, like)


def as_masters_state(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns a state as a master's step needs it: in float32 where it is shaped as the parameter
    and of low precision.
    """
    is_low = value.is_floating_point() and value.element_size() < torch.float32.itemsize
    if not is_low or local_of(value).shape != local_of(parameter).shape:
        return value
    return remade(value, Tensor.float)


def take_foreign_writes(master: Tensor, low: Tensor) -> None:
    """Gives a master the elements that are not its own rounded ones any more.

    Bytes are compared, at every step: a write through ``.data`` moves no version counter.

    Memory:
        Device bytes of ``low`` and of a mask, and a float32 copy, while it runs.
    """
    is_foreign = low.view(torch.int16) != master.to(low.dtype).view(torch.int16)
    torch.where(is_foreign, low.float(), master, out=master)
