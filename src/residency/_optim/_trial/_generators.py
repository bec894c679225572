"""The global generators beside a trial: a trial leaves them as it found them.

That a step draws is seen by its operations. The generators' states do not show it: another thread,
such as a loader's, may draw meanwhile, and its draws are not taken back.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # no public way sees each operation

from residency._errors import RefusedError


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its base is without types
    """A look for draws from the global generators among the operations that run inside of it.

    Attributes:
        has_drawn: Whether there was one.
    """

    def __init__(self) -> None:
        """Begins with none."""
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.has_drawn = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation."""
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags:
            has_own = any(isinstance(e, torch.Generator) for e in (*args, *given.values()))
            self.has_drawn |= not has_own
        return function(*args, **given)


@contextmanager
def generators_kept() -> Iterator[Draws]:
    """Puts torch's global generator back where an operation of a trial drew from it."""
    before = torch.get_rng_state()
    draws = Draws()
    try:
        with draws:
            yield draws
    finally:
        if draws.has_drawn:
            torch.set_rng_state(before)


@contextmanager
def others_kept() -> Iterator[None]:
    """Puts the generators of Python and numpy back where a trial ends in a refusal."""
    others = _others()
    try:
        yield
    except RefusedError:
        for put, state in others:
            put(state)
        raise


def _others() -> list[tuple[Callable[[Any], object], Any]]:
    found: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append((numpy.random.set_state, numpy.random.get_state()))
    return found
