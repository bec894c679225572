"""Shows where the processes of a test are that nears its limit, and ends them.

A test that waits for a process fails with the line that waits, which says nothing of the process.
So some seconds before, each process that the test has started gets SIGABRT, at which Python's fault
handler writes the lines of its threads: to stderr, which most tests show, or to a file of a dry
run, which the test's report shows. The state of each thread stands there, too, as Linux has it: of
a thread that runs nothing in Python, whether it computes or waits for a lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import limits
import pytest

_SHARE = 0.9  # of the time that a test waits for a process
_SECONDS_TO_WRITE = 2.0
_PROCESSES = Path("/proc")


def pytest_configure() -> None:
    """Lets each process of a test write where it is when it is ended."""
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, object]:
    """Ends a test's processes before pytest-timeout ends the test."""
    result = yield
    end = signal.getsignal(signal.SIGALRM)
    if not callable(end) or not settings.timeout:  # pytest-timeout's other method
        return result
    older = set(_descendants())  # such as servers of several tests

    def look(number: int, frame: object) -> None:
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout - seconds)
        text = "".join(_ended(each for each in _descendants() if each not in older))
        item.add_report_section("call", "processes", text)

    seconds = _SHARE * limits.worker_seconds(settings.timeout)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return result


def _descendants() -> list[int]:
    """Returns the processes below this one."""
    children: dict[int, list[int]] = {}
    for file in _PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = [os.getpid()]
    for pid in found:  # grows meanwhile
        found += children.get(pid, [])
    return found[1:]


def _ended(processes: Iterable[int]) -> Iterator[str]:
    """Ends processes; yields what each of them was doing."""
    with ExitStack() as opened:
        written: dict[int, list[IO[str]]] = {}
        for pid in list(processes):
            yield _state_of(_PROCESSES / str(pid))
            written[pid] = [opened.enter_context(file) for file in _crash_files(pid)]
        for pid in written:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        time.sleep(_SECONDS_TO_WRITE)  # of ends of processes that are others' children
        for pid, files in written.items():
            for file in files:
                yield f"\n{pid} wrote:\n{file.read()}"


def _state_of(process: Path) -> str:
    """Returns a process's words, and for each of its threads where Linux has it."""
    words = _read(process / "cmdline").replace("\0", " ")
    lines = [f"\n{process.name}: {words[:300]}"]
    for thread in sorted(process.glob("task/*")):
        state = _read(thread / "stat").rpartition(")")[2].split()[:1]
        lines.append(f"  {_read(thread / 'comm').strip()}: {state} {_read(thread / 'wchan')}")
    return "\n".join(lines) + "\n"


def _crash_files(pid: int) -> Iterator[IO[str]]:
    """Opens the files to which a process's fault handler writes, if that is not stderr."""
    for link in _PROCESSES.glob(f"{pid}/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link).endswith(".crash"):
                yield link.open()


def _read(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""
