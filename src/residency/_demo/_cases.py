"""The list of cases, in the order in which they are shown.

A case's own module, and torch with it, is imported where the case runs: the process that shows the
progress needs neither, and begins at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from residency._demo._progress import Show
from residency._demo._report import Report
from residency._demo._settings import Settings
from residency._errors import InvalidArgumentError

if TYPE_CHECKING:
    from residency._demo._bench import Face


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        summary: What stock code does, and what is different here, in two sentences.
        face: As which device the simulated accelerator has to appear: CUDA for frameworks, which
            look for no other.
    """

    summary: str
    face: Face = "sim"


CASES: dict[str, Case] = {
    "resume": Case(
        "A run is resumed from a torch.distributed.checkpoint. Stock code needs the parameters, "
        "the optimizer's state and a copy of it on the device; with residency the state goes to "
        "the host as it is read.",
    ),
    "async-save": Case(
        "Lightning saves after each step, in the background, to a slow disk. Its AsyncCheckpointIO "
        "clones the checkpoint on the device for each save that waits; ours copies to the host.",
        face="cuda",
    ),
    "optimizer-step": Case(
        "A model trains with AdamW, whose state takes twice the bytes of the parameters. With "
        "residency it stays on the host, and each step moves it through the device in buckets.",
    ),
    "best-adapter": Case(
        "Transformers reloads the best PEFT adapter after the last step. Stock code reads the file "
        "onto the device, beside the adapter that is there; with residency it is read to the host, "
        "and copied in place.",
        face="cuda",
    ),
    "evaluation": Case(
        "Transformers evaluates, and the metrics want the logits. The stock loop keeps those of "
        "all batches on the device; with residency a batch's go to the host while the next one is "
        "computed.",
        face="cuda",
    ),
    "hand-off": Case(
        "A trainer and an inference engine, two processes, share one device. The trainer's cache "
        "grows until the engine has no room; with residency it gives back what the engine needs, "
        "and only then.",
    ),
}


def run_case(
    name: str, settings: Settings, show: Show, wait: Callable[[], None] = lambda: None
) -> Report:
    """Runs one case on the best device of this machine.

    Args:
        name: The case.
        settings: Its options.
        show: Is called with its progress.
        wait: Is called once, when all is there that the case needs. Before the device is touched,
            if that is a real one, whose memory another case may just then measure.

    Raises:
        InvalidArgumentError: There is no such case.
        RefusedError: The case cannot run here; the message says why.
    """
    if name not in CASES:
        raise unknown(name)
    open_bench, find_device = _imported("_bench.open_bench"), _imported("_bench.real_device")
    is_real = find_device() is not None
    if is_real:
        wait()
    with open_bench(CASES[name].face, show) as bench:
        run = _imported(f"_{name.replace('-', '_')}.run")
        make_frame = partial(_imported("_frame.Frame"), name, bench, show)
        if not is_real:
            wait()
        report: Report = run(make_frame, settings)
    return report


def _imported(where: str) -> Any:
    """Returns what a module of this package has, such as ``_resume.run``."""
    module, _, name = where.partition(".")
    package = __name__.rpartition(".")[0]
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def unknown(name: str) -> InvalidArgumentError:
    """Returns the error for a name that no case has."""
    return InvalidArgumentError(f"There is no case {name!r}; expected one of: {', '.join(CASES)}.")
