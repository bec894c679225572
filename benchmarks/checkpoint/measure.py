"""Starts a case in a process of its own, and watches the memory of it and its children."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_SECONDS_BETWEEN_LOOKS = 0.02
_TIMEOUT_SECONDS = 120.0


class CaseFailedError(Exception):
    """A case ended with an error; its last lines say which."""


def run_case(
    kind: str,
    *,
    name: str = "",
    num_bytes: int,
    folder: Path,
    repeat: int = 1,
    memory: bool = False,
) -> dict[str, Any]:
    """Runs one case; with ``memory``, its figure is the peak of extra bytes under ``"memory"``."""
    os.sync()  # what an earlier case left for later would slow this one
    own = Path(tempfile.mkdtemp(dir=folder)) if kind in ("save", "steps") else folder
    command = [sys.executable, "-m", "benchmarks.checkpoint.case", kind, "--name", name]
    command += ["--bytes", str(num_bytes), "--folder", str(own), "--repeat", str(repeat)]
    if memory:
        command.append("--gate")
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        timer = threading.Timer(_TIMEOUT_SECONDS, process.kill)
        timer.start()
        try:
            extra = _watch(process) if memory else None
            out, _ = process.communicate()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            if own != folder:
                shutil.rmtree(own, ignore_errors=True)
        if process.returncode:
            errors.seek(0)
            raise CaseFailedError("\n".join(errors.read().splitlines()[-4:]))
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    if memory:
        found["memory"] = extra
    return found


def _watch(process: subprocess.Popen[str]) -> int | None:
    """Returns the most bytes that the process and its children took between its two words."""
    assert process.stdout is not None
    if process.stdout.readline().strip() != "begin":
        return None
    base = _tree_bytes(process.pid)
    is_over = threading.Event()
    peak = base

    def look() -> None:
        nonlocal peak
        while not is_over.is_set():
            peak = max(peak, _tree_bytes(process.pid))
            is_over.wait(_SECONDS_BETWEEN_LOOKS)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        _say_go_on(process)
        process.stdout.readline()
    finally:
        is_over.set()
        watcher.join()
    peak = max(peak, _tree_bytes(process.pid))
    _say_go_on(process)
    return peak - base


def _say_go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # the process ended with an error, which its status tells


def _tree_bytes(pid: int) -> int:
    """Returns the proportional share of memory that a process and its children have."""
    total = 0
    pending = [pid]
    while pending:
        each = pending.pop()
        try:
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
            for thread in Path(f"/proc/{each}/task").iterdir():
                children = (thread / "children").read_text().split()
                pending += [int(child) for child in children]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended
    return total
