"""Starts Python processes that find this package as the tests do, and waits for their ends.

For what a fork of ``ranks.py`` cannot be: a process that has imported torch in no way yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import limits

import residency


def environment(folder: Path | None = None) -> dict[str, str]:
    """Returns this process's environment, with what a process of the tests needs.

    Args:
        folder: Where it finds modules, beside this package and the script's own folder.
    """
    source = str(Path(residency.__file__).parents[1])
    path = [source, str(folder or ""), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}


def start(
    *words: object, folder: Path | None = None, variables: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts Python with words behind it.

    Args:
        words: Python's own flags, a script or ``-c`` and code, and arguments.
        folder: Where it finds modules, beside the script's own folder.
        variables: Of its environment, beside this process's.
    """
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=environment(folder) | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes: subprocess.Popen[str], seconds: float | None = None) -> list[str]:
    """Waits for processes; returns what each of them wrote.

    Args:
        processes: From `start`.
        seconds: How long for each, where the test has a limit of its own.

    Raises:
        AssertionError: One did not end well, with what it wrote last.
    """
    written = []
    try:
        for process in processes:
            written.append(process.communicate(timeout=seconds or limits.WORKER_SECONDS)[0])
            assert process.returncode == 0, written[-1][-5000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return written
