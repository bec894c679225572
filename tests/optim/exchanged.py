"""Three parameters whose states callers exchange or keep, and the places of these states."""

import torch

import residency

PLACES = {
    "streamed": {},
    "one slot": {"slots": 1, "bucket": "4KiB"},
    "cut": {"bucket": "20KiB"},
    "resident in part": {"bucket": "20KiB", "resident": "33KiB"},
    "resident": {"resident": "1MiB"},
    "not pinned": {"pin": False, "bucket": "20KiB"},
}


def three(lab, offload, kind=torch.optim.AdamW, place=None, **options):
    parameters = lab.parameters(shapes=((64, 64),) * 3)
    optimizer = kind(parameters, lr=1e-2, **options)
    if offload:
        residency.offload_optimizer(optimizer, **(place or {}))
    return optimizer, parameters


def everything(lab, optimizer, parameters):
    seen = lab.read(optimizer, parameters)
    return [*seen.parameters, *(v for s in seen.state for v in s.values() if torch.is_tensor(v))]


FEW = {name: PLACES[name] for name in ("one slot", "cut", "resident in part")}
