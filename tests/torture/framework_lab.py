"""What the programs under real frameworks share: the device, what is drawn, and comparisons.

A round trains stock and with this library from one seed, and compares what is there, bit for bit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from random_states import bits, differing, digest
from warm_process import Log

Round = Callable[[random.Random, Path, Log], None]


class StopError(Exception):
    """Ends a run in its midst."""


def offload_settings(chance: random.Random) -> dict[str, Any]:
    """Draws the settings of ``offload_optimizer`` that change no bit."""
    return {
        "resident": chance.choice([0, 0, 3000, "1MiB"]),
        "bucket": chance.choice([4096, "16KiB", "128MiB"]),
        "slots": chance.choice([2, 3, 4]),
        "pin": chance.random() < 0.8,
    }


def random_states() -> dict[str, Any]:
    """Returns the states of all generators that a framework seeds."""
    return {
        "python": repr(random.getstate()),
        "numpy": repr(numpy.random.get_state(legacy=True)[1].tolist()),
        "host": bits(torch.get_rng_state()),
        "device": bits(torch.cuda.get_rng_state()),
    }


def optimizer_picture(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns states and group values, by the places of the parameters."""
    found = optimizer.state_dict()
    return digest({"state": found["state"], "groups": found["param_groups"]})


def assert_same(mine: dict[str, Any], theirs: dict[str, Any], said: str) -> None:
    names = differing(mine, theirs)
    assert not names, f"{said}: {len(names)} differ: " + "; ".join(
        f"{name}: {str(mine.get(name))[:300]} is not {str(theirs.get(name))[:300]}"
        for name in names[:4]
    )


def listing(folder: Path) -> dict[str, str]:
    """Returns every name under a folder, with where it leads if it is a link."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else ""
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }
