"""A process of its own for a part of the demo, that is spoken to in lines of JSON.

A case that runs apart finds a device and a set of imports that no other has touched. What such a
process writes on stderr is kept, and shown only if it fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from residency._errors import RefusedError, ResidencyError

_MOST_COMPLAINTS = 2000


class Child:
    """Such a process, from the side that started it."""

    def __init__(self, module: str, function: str) -> None:
        """Starts a function of this package in a new Python.

        Args:
            module: Where it is.
            function: It takes no arguments; it reads `messages` and calls `answer`.
        """
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import {function}; {function}()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env=os.environ | {"RESIDENCY_SIM_SHARE": ""},
        )

    def send(self, **message: object) -> None:
        """Sends a message."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def ask(self, **message: object) -> dict[str, Any]:
        """Sends a message, and waits for the next one."""
        self.send(**message)
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Waits for the next message.

        Raises:
            RefusedError: The process says that it cannot be done.
            ResidencyError: The process ended, or its task failed.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue  # a framework prints
            message: dict[str, object] = json.loads(line)
            if "refused" in message:
                raise RefusedError(message["refused"])
            if "failed" in message:
                raise ResidencyError(f"A process of the demo failed: {message['failed']}")
            return message
        status = self._process.wait()
        self._complaints.seek(0)
        raise ResidencyError(
            f"A process of the demo ended with status {status}: "
            f"{self._complaints.read()[-_MOST_COMPLAINTS:]}"
        )

    def end(self) -> None:
        """Lets it end, and waits for that; a second time does nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._complaints.close()


def messages() -> Iterator[dict[str, Any]]:
    """Yields what comes, in the process that was started."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(**message: object) -> None:
    """Sends a message to the side that started this process."""
    print("\n" + json.dumps(message), flush=True)  # a framework may have begun a line
