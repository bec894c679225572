"""Runs a case in a process of its own, whose device and imports no other case has touched.

Where there is no GPU, a case of a framework has the simulated accelerator in CUDA's place, which a
process can decide once.
"""

from __future__ import annotations

import dataclasses

from residency._demo._cases import CASES, run_case, unknown
from residency._demo._child import Child, answer, messages
from residency._demo._progress import Show
from residency._demo._report import Report, report_from
from residency._demo._settings import Settings, settings_from
from residency._errors import BuildError, RefusedError

_START = "start of a process"


def run_apart(name: str, settings: Settings, show: Show) -> Report:
    """Runs one case in its own process.

    Raises:
        InvalidArgumentError: There is no such case.
        RefusedError: The case cannot run here; the message says why.
        ResidencyError: It failed.
    """
    if name not in CASES:
        raise unknown(name)
    child = Child(__name__, "serve")
    try:
        child.send(name=name, settings=dataclasses.asdict(settings))
        show(_START, "imports", 1, 1)
        message = child.receive()
        show(_START, "done", 2, 1)
        while "report" not in message:
            show(*message["show"])
            message = child.receive()
        return report_from(message["report"])
    finally:
        child.end()


def serve() -> None:
    """Runs the case that is asked for; the process's own part."""
    for order in messages():
        try:
            report = run_case(
                order["name"],
                settings_from(order["settings"]),
                lambda *progress: answer(show=progress),
            )
        except (BuildError, RefusedError) as error:
            answer(refused=str(error))
        else:
            answer(report=dataclasses.asdict(report))
        return
