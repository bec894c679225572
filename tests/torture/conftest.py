"""Runs a judge again and again, each time with a new seed, for as long as it may take.

``TORTURE_SECONDS`` is the time of each file of judges, which its tests share. ``TORTURE_ROUNDS`` is
how many seeds a test runs at most; a few where neither is given. They follow a first one, which is
new in each run and printed at its end; with ``TORTURE_FROM``, any text, it is the one of that text.
``TORTURE_SEED`` runs one seed alone. The judges are written from the public documentation: stock
torch, stock safetensors and plain arithmetic say what is right, and nothing private of the library
is imported.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable

import pytest

_NUM_SEEDS = 2
_ROUNDS = "rounds of torture"

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
        most = _number("TORTURE_ROUNDS")
        if most is None:
            most = _NUM_SEEDS if seconds is None else math.inf
        text = os.environ.get("TORTURE_FROM")
        chance = random.Random(text) if text else random.SystemRandom()
        seed = chance.randrange(10**9) if given is None else int(given)
        if seconds is not None:
            seconds /= sum(item.path == request.path for item in request.session.items)
        end = time.monotonic() + (seconds or 0.0)
        count = 0

        def is_over() -> bool:
            if given is not None or seconds is None:
                return count >= (most if given is None else 1)
            return count >= most or (count > 0 and time.monotonic() >= end)

        try:
            while not is_over():
                judge(random.Random(seed + count))
                count += 1
        except BaseException as error:
            error.add_note(
                f"Repeat it: TORTURE_SEED={seed + count} python -m pytest '{request.node.nodeid}'"
            )
            raise
        finally:
            request.node.user_properties.append((_ROUNDS, (seed, count)))

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many rounds each judge passed, and from which seed."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _ROUNDS and report.when == "call":
                    line = f"{value[1]} rounds from seed {value[0]}: {report.nodeid}"
                    terminalreporter.write_line(line)
