"""The gradients that DistributedDataParallel has twice: in its buckets, and for the optimizer."""

from __future__ import annotations

import gc
import sys
from typing import Any

from residency._memory import _objects


def bytes_beside_buckets() -> int:
    """Returns the bytes of gradients on a device that could be views of DDP's buckets."""
    torchs: Any = sys.modules.get("torch.nn.parallel.distributed")
    kind = getattr(torchs, "DistributedDataParallel", None)
    if kind is None:
        return 0
    found = 0
    for thing in gc.get_objects():
        if not _objects.is_a(thing, kind):
            continue
        fields = _objects.attributes(thing) or {}
        parameters = fields.get("_module_parameters")
        if fields.get("gradient_as_bucket_view") is False and type(parameters) is list:
            found += sum(map(_bytes_of_gradient, parameters))
    return found


def _bytes_of_gradient(parameter: object) -> int:
    gradient = _objects.slot(parameter, "grad")
    device = _objects.slot(gradient, "device")
    if device is None or device.type == "cpu":
        return 0
    return int(_objects.slot(gradient, "nbytes") or 0)
