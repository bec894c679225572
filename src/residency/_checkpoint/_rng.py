"""The states of the random number generators: python, numpy, torch, and the accelerator's.

Numpy's is captured only where numpy has been imported, and none of it waits for a device: the
accelerator's generator keeps its seed and offset on the host.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Mapping
from typing import Any

import torch

from residency import _device
from residency._checkpoint._disk._manifest import MANIFEST
from residency._checkpoint._document._nodes import BYTES, TENSOR, Node, is_plain_dict, kind_of
from residency._errors import CorruptSaveError, RefusedError, warn

RNG = "rng"  # the name in a state under which the random number generators are saved
_SEED_AND_OFFSET = 16
_NAMES = ("python", "numpy", "torch", "accelerator")
# The version, the Mersenne twister's 624 words and its place in them, and whether a second normal
# number was drawn, and which. Of 625 values, each would have a node of its own in the document.
_PYTHON = struct.Struct("<i625I?d")


def random_states() -> dict[str, Any]:
    """Returns the states, as Python values, arrays and host tensors that no other code changes.

    Returns:
        ``python`` as bytes, ``numpy`` (None where it has not been imported), ``torch``, and
        ``accelerator``: a dict of its ``type`` and ``state``, or None where nothing has used it.
    """
    numpy: Any = sys.modules.get("numpy")
    device = _device.accelerator()
    state = None if device is None else _device.rng_state(device)
    accelerator = None
    if device is not None and state is not None:
        accelerator = {"type": device.type, "state": state}
    return {
        "python": _python_bytes(),
        "numpy": None if numpy is None else numpy.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "accelerator": accelerator,
    }


def is_saved(node: Node) -> bool:
    """Returns whether a node is that of what ``capture`` returned, and not of a user's own values
    of the same name.
    """
    if not is_plain_dict(node) or set(node) != set(_NAMES):
        return False
    return (kind_of(node["python"]), kind_of(node["torch"])) == (BYTES, TENSOR)


def sizes(node: Node) -> dict[str, tuple[int, ...]]:
    """Returns the shapes that the tensors of such a node must have, by their names.

    Raises:
        CorruptSaveError: What stands for the accelerator's state is none.
    """
    wanted = {node["torch"]["name"]: tuple(torch.get_rng_state().shape)}
    device, saved = _device.accelerator(), node["accelerator"]
    if saved is None:
        return wanted
    is_state = is_plain_dict(saved) and type(saved.get("type")) is str
    if not is_state or kind_of(saved.get("state")) != TENSOR:
        raise CorruptSaveError("the random state of the accelerator is none.", file=MANIFEST)
    if device is not None and saved["type"] == device.type:
        state = _device.rng_state(device)
        # Where nothing has used it yet, CUDA's: a seed and an offset of 8 bytes each (get_state in
        # aten/src/ATen/cuda/CUDAGeneratorImpl.cpp).
        shape = (_SEED_AND_OFFSET,) if state is None else tuple(state.shape)
        wanted[saved["state"]["name"]] = shape
    return wanted


def check(values: Mapping[str, Any]) -> None:
    """Tries states on generators of its own; raises what they raise."""
    random.Random(0).setstate(_python_state(values["python"]))
    if values.get("numpy") is not None:
        import numpy

        state = values["numpy"]
        saved = state["bit_generator"]
        kind = type(vars(numpy.random)["get_bit_generator"]())  # its stubs lack the name
        if saved != kind.__name__:
            raise RefusedError(
                f"the save has the state of a numpy.random.{saved}, and numpy's global generator "
                f"here is a {kind.__name__}. Nothing was changed; call "
                f"numpy.random.set_bit_generator(numpy.random.{saved}()) first, or restore with "
                "rng=False."
            )
        numpy.random.RandomState(kind()).set_state(state)
    torch.Generator().set_state(values["torch"])
    saved = values.get("accelerator")
    if saved is not None and saved["state"].dtype != torch.uint8:
        raise TypeError(f"the accelerator's state is of {saved['state'].dtype}")


def restore(values: Mapping[str, Any]) -> None:
    """Sets the generators to states that ``capture`` returned.

    An accelerator's state is left out, with a warning, where there is another accelerator or none.
    """
    random.setstate(_python_state(values["python"]))
    if values.get("numpy") is not None:
        import numpy

        numpy.random.set_state(values["numpy"])
    torch.set_rng_state(values["torch"])
    saved = values.get("accelerator")
    if saved is None:
        return
    device = _device.accelerator()
    if device is None or device.type != saved["type"]:
        here = "no accelerator" if device is None else f"an accelerator of type {device.type!r}"
        warn(
            f"the random state of an accelerator of type {saved['type']!r} was saved, and here is "
            f"{here}; its generator is left as it is.",
        )
        return
    _device.set_rng_state(saved["state"], device)


def _python_bytes() -> bytes:
    version, words, normal = random.getstate()
    return _PYTHON.pack(version, *words, normal is not None, normal or 0.0)


def _python_state(data: bytes) -> tuple[int, tuple[int, ...], float | None]:
    version, *words, has_normal, normal = _PYTHON.unpack(data)
    return version, tuple(words), normal if has_normal else None
