"""Processes that begin in milliseconds: forks of a warm one, which has imported and used no device.

A program imports what its tasks need and calls `serve`; a test starts it as a `Server`. A request
is a line of JSON on the program's standard input, the answer a number in a line: the process that
was forked, or the exit status of one that ended. A fork does its task and then ends as any other
process of Python does. What it notes in a log, line by line, is there after a kill, since the
kernel has it.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HANG_SECONDS = 600.0  # a machine may be busy with much else


class Log:
    """Appends events to a file, a line each, in one system call."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, event: str, **more: Any) -> None:
        os.write(self._file, json.dumps({"event": event, **more}).encode() + b"\n")


Task = Callable[[dict[str, Any], Log], None]


def become(request: dict[str, Any]) -> None:
    """Ends the inheritance of a fork: its own output, and no input."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)


def serve(tasks: dict[str, Task]) -> None:
    """Answers requests until there are no more; a fork returns when its task is over."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                become(request)
                tasks[request["task"]](request, Log(request["log"]))
                return
        print(answer, flush=True)


class Running:
    """A forked program: its log, and its end."""

    def __init__(self, pid: int, base: Path, reap: Callable[[], int]) -> None:
        self.pid, self._reap = pid, reap
        self.log, self.output, self.errors = (
            base.with_suffix(kind) for kind in (".log", ".output", ".errors")
        )
        self._end = os.pidfd_open(pid)
        self.status: int | None = None

    def events(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        lines = self.log.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    def is_over(self, seconds: float = 0.0) -> bool:
        return bool(select.select([self._end], [], [], seconds)[0])

    def send(self, number: int) -> None:
        signal.pidfd_send_signal(self._end, number)

    def said(self) -> str:
        files = [file for file in (self.output, self.errors) if file.exists()]
        return "".join(file.read_text() for file in files)

    def end(self, seconds: float = HANG_SECONDS) -> int:
        """Waits until it ended; returns its status, which is negative for a signal's number."""
        if self.status is None:
            is_over = self.is_over(seconds)
            if not is_over:
                self.send(signal.SIGABRT)
                self.is_over(10.0)
                self.send(signal.SIGKILL)
            self.status = self._reap()
            os.close(self._end)
            assert is_over, f"no end after {seconds} s: {self.said()} {self.events()[-5:]}"
        return self.status


class Server:
    """The warm process, and requests to it."""

    def __init__(self, folder: Path, program: Path) -> None:
        self._folder = folder
        self._count = 0
        self._lock = threading.Lock()  # of a request and its answer
        places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(program)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def start(self, task: str, **request: Any) -> Running:
        self._count += 1
        base = self._folder / str(self._count)
        named = {kind: f"{base}.{kind}" for kind in ("log", "output", "errors")}
        pid = self.ask(request | named | {"task": task})
        reap = functools.partial(self.ask, {"reap": pid})
        return Running(pid, base, reap)

    def run(self, task: str, **request: Any) -> Running:
        running = self.start(task, **request)
        running.end()
        return running

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(HANG_SECONDS)
        self._process.stdout.close()
