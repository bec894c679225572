"""The random number generators that a resumed run must find as they were.

Reading them waits for no device: an accelerator keeps its seed and offset on the host.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from residency import _device


def capture() -> dict[str, Any]:
    """Returns the states of Python's, torch's, numpy's (where it is loaded) and the accelerator's
    global generators.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        states["numpy"] = (kind, keys, int(position), int(has_gauss), float(gauss))
    device = _device.accelerator()
    if device is not None:
        state = _device.rng_state(device)
        states["accelerator"] = {"type": device.type, "state": state}
    return states


def restore(states: dict[str, Any]) -> None:
    """Puts the generators back as they were; one that is not here, or of another kind of device, is
    left alone.
    """
    if "python" in states:
        version, keys, gauss = states["python"]
        random.setstate((version, tuple(keys), gauss))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))
    device = _device.accelerator()
    saved = states.get("accelerator")
    if device is not None and saved is not None and saved["type"] == device.type:
        _device.set_rng_state(saved["state"], device)
