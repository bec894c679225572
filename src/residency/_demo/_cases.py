"""The list of cases, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from residency._demo._async_save import NAME as ASYNC_SAVE
from residency._demo._async_save import run_async_save
from residency._demo._bench import Bench, Face, open_bench
from residency._demo._best_adapter import NAME as BEST_ADAPTER
from residency._demo._best_adapter import run_best_adapter
from residency._demo._hand_off import NAME as HAND_OFF
from residency._demo._hand_off import run_hand_off
from residency._demo._optimizer_step import NAME as OPTIMIZER_STEP
from residency._demo._optimizer_step import run_optimizer_step
from residency._demo._progress import Show
from residency._demo._report import Report
from residency._demo._settings import Settings
from residency._errors import InvalidArgumentError


@dataclass(frozen=True)
class Case:
    """Describes one case.

    Attributes:
        summary: What it shows, in one sentence.
        face: As which device the simulated accelerator has to appear: CUDA for frameworks, which
            look for no other.
        run: Runs it on the bench, which tells its last argument how far it is.
    """

    summary: str
    run: Callable[[Bench, Settings, Show], Report]
    face: Face = "sim"


CASES: dict[str, Case] = {
    OPTIMIZER_STEP: Case(
        "AdamW's state lives on the host and streams through the step, bit for bit the same.",
        run_optimizer_step,
    ),
    ASYNC_SAVE: Case(
        "Lightning saves in the background, without a copy of the checkpoint on the device.",
        run_async_save,
        face="cuda",
    ),
    BEST_ADAPTER: Case(
        "Transformers reloads the best PEFT adapter at the end, without a second copy of it.",
        run_best_adapter,
        face="cuda",
    ),
    HAND_OFF: Case(
        "A trainer hands its device to an inference engine in another process, and proves it.",
        run_hand_off,
    ),
}


def run_case(name: str, settings: Settings, show: Show) -> Report:
    """Runs one case on the best device of this machine.

    Raises:
        InvalidArgumentError: There is no such case.
        RefusedError: The case cannot run here; the message says why.
    """
    if name not in CASES:
        raise unknown(name)
    with open_bench(CASES[name].face) as bench:
        return CASES[name].run(bench, settings, show)


def unknown(name: str) -> InvalidArgumentError:
    """Returns the error for a name that no case has."""
    return InvalidArgumentError(f"There is no case {name!r}; expected one of: {', '.join(CASES)}.")
