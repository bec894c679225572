"""Runs cases in processes of their own, whose device and imports no other case has touched.

Where there is no GPU, a case of a framework has the simulated accelerator in CUDA's place, which a
process can decide once. The next case's process makes its imports while one case works.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

from residency._demo._cases import CASES, run_case, unknown
from residency._demo._child import Child, answer, messages
from residency._demo._progress import Show
from residency._demo._report import Report, report_from
from residency._demo._settings import Settings, settings_from
from residency._errors import BuildError, RefusedError

_START = "start of a process"


class Apart:
    """A place for cases in processes of their own; its ``with`` ends those that are left."""

    def __init__(self, settings: Settings) -> None:
        """Starts no process yet.

        Args:
            settings: Those of every case.
        """
        self._settings = settings
        self._begun: dict[str, Child] = {}

    def __enter__(self) -> Apart:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the processes that have begun and were not needed."""
        with ExitStack() as ends:
            while self._begun:
                ends.callback(self._begun.popitem()[1].end)

    def run(self, name: str, show: Show, *, then: str | None = None) -> Report:
        """Runs one case.

        Args:
            name: The case.
            show: Is called with its progress.
            then: The case that comes next, if any; its process begins while this one works.

        Raises:
            InvalidArgumentError: There is no such case.
            RefusedError: The case cannot run here; the message says why.
            ResidencyError: It failed.
        """
        self._begin(name)
        child = self._begun[name]
        show(_START, "imports", 1, 1)
        while "is_ready" not in (message := child.receive()):
            show(*message["show"])
        show(_START, "done", 2, 1)
        child.send(go=True)
        if then is not None:
            self._begin(then)
        while "report" not in (message := child.receive()):
            show(*message["show"])
        self._begun.pop(name).end()
        return report_from(message["report"])

    def _begin(self, name: str) -> None:
        if name not in CASES:
            raise unknown(name)
        if name not in self._begun:
            self._begun[name] = child = Child(__name__, "serve")
            child.send(name=name, settings=dataclasses.asdict(self._settings))


def serve() -> None:
    """Runs the case that is asked for, once it may; the process's own part."""
    orders = messages()
    order = next(orders)

    def wait() -> None:
        answer(is_ready=True)
        if next(orders, None) is None:  # it is not wanted any more
            raise SystemExit

    try:
        report = run_case(
            order["name"],
            settings_from(order["settings"]),
            lambda *progress: answer(show=progress),
            wait,
        )
    except (BuildError, RefusedError) as error:
        answer(refused=str(error))
    else:
        answer(report=dataclasses.asdict(report))
