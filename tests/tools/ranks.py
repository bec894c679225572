"""Starts a script as several processes, and waits for their ends."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from limits import WORKER_SECONDS
from warm_process import Running, Server
from workers import environment

from residency.testing import simulated_device_type

PROGRAM = Path(__file__).with_name("rank_program.py")


@functools.cache
def _server() -> Server:
    folder = TemporaryDirectory(prefix="ranks-")
    server = Server(Path(folder.name), PROGRAM)
    atexit.register(_close, os.getpid(), server, folder)
    return server


def _close(process: int, server: Server, folder: TemporaryDirectory[str]) -> None:
    if os.getpid() == process:  # and not in a fork, which Python may end as any other process
        server.close()
        folder.cleanup()


def _start(words: list[str], base: Path) -> Running:
    """Starts a script as a fork where that is the same: a real device may know of a process that
    imports torch already, and what records lines begins with a process.
    """
    variables = environment()
    if simulated_device_type() is not None and "COVERED_LINES_FOLDER" not in os.environ:
        return _server().start("script", words=words, environment=variables)
    with base.with_suffix(".output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words], env=variables, stdout=output, stderr=subprocess.STDOUT
        )
    return Running(process.pid, base, process.wait)


def run_ranks(
    scripts: Sequence[Sequence[object]], folder: Path, *, killed: Container[int] = ()
) -> list[str]:
    """Runs scripts with their arguments, all at once; returns what each wrote.

    Raises:
        AssertionError: One did not end well, or not as one that is killed.
    """
    running = [
        _start(list(map(str, words)), folder / f"process{rank}")
        for rank, words in enumerate(scripts)
    ]
    try:
        for rank, process in enumerate(running):
            status = process.end(WORKER_SECONDS)
            assert status == (-signal.SIGKILL if rank in killed else 0), process.said()
    finally:
        for process in running:
            if process.status is None:
                process.send(signal.SIGKILL)
                process.end()
    return [process.said() for process in running]
