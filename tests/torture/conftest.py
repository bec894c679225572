"""Runs a judge again and again, each time with a new seed, for as long as it may take.

``TORTURE_SECONDS`` is the time of each judge, which then begins at a new seed; without it a judge
takes the first few seeds. ``TORTURE_SEED`` runs one seed alone. The judges are written
from the public documentation: stock torch, stock safetensors and plain arithmetic say what is
right, and nothing private of the library is imported.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest

_NUM_SEEDS = 3

Judge = Callable[[random.Random], None]


def _number(variable: str) -> float | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0:
        raise pytest.UsageError(
            f"{variable} is {text!r}; expected a number, as in: make torture SECONDS=60"
        )
    return value


@pytest.fixture
def torture(request: pytest.FixtureRequest) -> Callable[[Judge], None]:
    """Calls a judge with generators of known seeds, a few or until its time is over."""

    def run(judge: Judge) -> None:
        seconds = _number("TORTURE_SECONDS")
        given = _number("TORTURE_SEED")
        seed = 0 if given is None else int(given)
        if given is None and seconds is not None:
            seed = random.SystemRandom().randrange(10**9)
        print(f"first seed {seed}")
        end = time.monotonic() + (seconds or 0.0)
        count = 0

        def is_over() -> bool:
            if seconds is None or given is not None:
                return count == (_NUM_SEEDS if given is None else 1)
            return count > 0 and time.monotonic() >= end

        while not is_over():
            try:
                judge(random.Random(seed + count))
            except BaseException as error:
                error.add_note(
                    f"Repeat it: TORTURE_SEED={seed + count} python -m pytest "
                    f"'{request.node.nodeid}'"
                )
                raise
            count += 1
        print(f"{count} rounds")

    return run
