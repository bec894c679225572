"""The list of cases, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from residency._demo._async_save import NAME as ASYNC_SAVE
from residency._demo._async_save import run_async_save
from residency._demo._bench import Bench, Face, open_bench
from residency._demo._best_adapter import NAME as BEST_ADAPTER
from residency._demo._best_adapter import run_best_adapter
from residency._demo._evaluation import NAME as EVALUATION
from residency._demo._evaluation import run_evaluation
from residency._demo._hand_off import NAME as HAND_OFF
from residency._demo._hand_off import run_hand_off
from residency._demo._optimizer_step import NAME as OPTIMIZER_STEP
from residency._demo._optimizer_step import run_optimizer_step
from residency._demo._progress import Show
from residency._demo._report import Report
from residency._demo._resume import NAME as RESUME
from residency._demo._resume import run_resume
from residency._demo._settings import Settings
from residency._errors import InvalidArgumentError


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        summary: What stock code does, and what is different here, in two sentences.
        face: As which device the simulated accelerator has to appear: CUDA for frameworks, which
            look for no other.
        run: Runs it on the bench, which tells its last argument how far it is.
    """

    summary: str
    run: Callable[[Bench, Settings, Show], Report]
    face: Face = "sim"


CASES: dict[str, Case] = {
    RESUME: Case(
        "A run is resumed from a torch.distributed.checkpoint. Stock code needs the parameters, "
        "the optimizer's state and a copy of it on the device; with residency the state goes to "
        "the host as it is read.",
        run_resume,
    ),
    ASYNC_SAVE: Case(
        "Lightning saves after each step, in the background, to a slow disk. Its AsyncCheckpointIO "
        "clones the checkpoint on the device for each save that waits; ours copies to the host.",
        run_async_save,
        face="cuda",
    ),
    OPTIMIZER_STEP: Case(
        "A model trains with AdamW, whose state takes twice the bytes of the parameters. With "
        "residency it stays on the host, and each step moves it through the device in buckets.",
        run_optimizer_step,
    ),
    BEST_ADAPTER: Case(
        "Transformers reloads the best PEFT adapter after the last step. Stock code reads the file "
        "onto the device, beside the adapter that is there; with residency it is read to the host, "
        "and copied in place.",
        run_best_adapter,
        face="cuda",
    ),
    EVALUATION: Case(
        "Transformers evaluates, and the metrics want the logits. The stock loop keeps those of "
        "all batches on the device; with residency a batch's go to the host while the next one is "
        "computed.",
        run_evaluation,
        face="cuda",
    ),
    HAND_OFF: Case(
        "A trainer and an inference engine, two processes, share one device. The trainer's cache "
        "grows until the engine has no room; with residency it gives back what the engine needs, "
        "and only then.",
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
    with open_bench(CASES[name].face, show) as bench:
        return CASES[name].run(bench, settings, show)


def unknown(name: str) -> InvalidArgumentError:
    """Returns the error for a name that no case has."""
    return InvalidArgumentError(f"There is no case {name!r}; expected one of: {', '.join(CASES)}.")
