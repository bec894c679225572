"""What the programs that judge the simulated accelerator in CUDA's place share."""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

MIB = 1 << 20


class Actions:
    """Draws actions at random and keeps their names for the error."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.log: list[str] = []

    def note(self, said: object) -> None:
        self.log.append(str(said))

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            error.add_note("\n".join(["actions:", *self.log]))
            raise


@contextlib.contextmanager
def fails(words: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Wants an error whose text has words that match a pattern."""
    expected = kinds or (RuntimeError, ValueError)
    found: BaseException | None = None
    try:
        yield
    except expected as error:
        found = error
    assert found is not None, f"nothing said {words!r}"
    assert re.search(words, str(found)), f"{found!r} does not say {words!r}"


def on_thread(call: Callable[[], Any]) -> Any:
    """Runs a call on a new thread; returns its result or raises its error."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def in_a_fork(call: Callable[[], None]) -> tuple[int, str]:
    """Runs a call in a forked child; returns its status and the text of its error."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        status = 0
        try:
            call()
        except BaseException as error:
            status = 1
            os.write(theirs, str(error).encode()[:4000])
        os._exit(status)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said
