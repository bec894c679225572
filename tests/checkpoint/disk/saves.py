"""Small saves and systems that fail, for tests and for processes that are killed; without torch.

As a script it is such a process: ``saves.py kill DIRECTORY SCENARIO`` kills a save at every system
call, ``saves.py rank DIRECTORY RANK WORLD_SIZE TOKEN [CALL:COUNT]`` is one rank of a
save, which waits ``$RANK_TIMEOUT`` seconds for others, and may be killed at a call.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from residency._checkpoint._disk._manifest import Record, file_name
from residency._checkpoint._disk._parts import FilePlan, Part
from residency._checkpoint._disk._publish import CheckpointDirectory, SaveRequest
from residency._checkpoint._disk._system import System
from residency._checkpoint._disk._verify import verify_save

CHUNK_BYTES = 8192
# Whole pages, a ragged end, nothing at all, a few bytes: three chunks and the rest of a fourth.
SHAPES = {
    "model": {"model.pages": 16384, "model.ragged": 12001, "model.empty": 0, "model.few": 5},
    "optimizer": {"optimizer.ragged": 9001},
}
# Calls that take no part in what is kept: failing them is no failure of the disk.
CLOCKS = {"sleep"}


def tensors(seed: int, rank: int = 0) -> dict[str, bytes]:
    """The bytes of a state."""
    draw = random.Random(1000 * rank + seed)
    return {n: draw.randbytes(size) for names in SHAPES.values() for n, size in names.items()}


def in_pages(data: bytes) -> memoryview:
    """The bytes in memory of their own, which begins at a page."""
    view = memoryview(mmap.mmap(-1, max(len(data), 1)))
    view[: len(data)] = data
    return view[: len(data)]


def request(
    step: int,
    seed: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    token: str | None = None,
    released: Counter[str] | None = None,
    metrics: dict[str, float] | None = None,
) -> SaveRequest:
    """One rank's share of a save of the state of a seed."""
    released = Counter() if released is None else released
    state = tensors(seed, rank)

    def part(name: str) -> Part:
        data = in_pages(state[name])
        record = Record(name, "U8", (len(data),), len(data))
        return Part(record, lambda: data, lambda: released.update([name]))

    files = [
        FilePlan(file_name(top, rank=rank, world_size=world_size), [part(n) for n in names])
        for top, names in SHAPES.items()
    ]
    return SaveRequest(
        step,
        files,
        {"tree": {"seed": seed, "rank": rank}},
        {"loss": float(seed)} if metrics is None else metrics,
        rank,
        world_size,
        f"token-{step}-{seed}" if token is None else token,
    )


def directory(path: Path, system: System | None = None) -> CheckpointDirectory:
    return CheckpointDirectory(path, system=system or System(), chunk_bytes=CHUNK_BYTES)


def save(path: Path, step: int, seed: int, system: System | None = None) -> None:
    directory(path, system or Unsynced()).save(request(step, seed), timeout_seconds=0)


def contents(path: Path, step: int) -> dict[str, bytes]:
    """The tensors of a published save, which verifies, with the seed that its document has."""
    where = directory(path)
    assert verify_save(where, step).damages == ()
    found = where.open(step)
    names: dict[str, bytes] = {}
    for name, entries in found.entries.items():
        for entry in entries:
            data = (found.folder / entry.file).read_bytes()
            names[name] = data[entry.start : entry.start + entry.num_bytes]
    seed = found.documents[0]["tree"]["seed"]
    assert names == tensors(seed), "the tensors are not those of the document"
    return names


def check_whole(path: Path, allowed: dict[int, set[int]]) -> None:
    """Checks that each published save is one of the states that its step may have."""
    steps = directory(path).steps()
    for step, seeds in allowed.items():
        if 0 not in seeds:  # 0 stands for none
            assert step in steps, f"step {step} is lost: {os.listdir(path)}"
        if step in steps:
            found = contents(path, step)
            assert found in [tensors(seed) for seed in seeds], f"step {step} is another state"
    assert set(steps) <= set(allowed)


class Unsynced(System):
    """Does not wait for the disk: a process that is killed loses nothing by that."""

    def perform(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return None if name == "fsync" else function(*arguments)


class FaultySystem(Unsynced):
    """Counts calls, and lets one of them fail.

    Args:
        at: Which call fails, from 0; None for none.
        fault: Makes the call fail: is given its name, what makes it, and its arguments.
    """

    def __init__(self, at: int | None = None, fault: Callable[..., Any] | None = None) -> None:
        self._lock = threading.Lock()
        self.arm(at, fault)

    def arm(self, at: int | None = None, fault: Callable[..., Any] | None = None) -> None:
        """Counts from 0 again, for another fault or none."""
        self.names: list[str] = []
        self._at = at
        self._fault = fault

    def perform(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name in CLOCKS:
            return super().perform(name, function, *arguments)
        with self._lock:
            self.names.append(name)
            is_hit = len(self.names) - 1 == self._at
        if is_hit and self._fault is not None:
            return self._fault(name, function, *arguments)
        return super().perform(name, function, *arguments)


def failing(number: int) -> Callable[..., Any]:
    """Does nothing and raises the system's error."""

    def fault(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fault


def shortening(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Reads or writes half of what was asked for."""
    if name in {"pwritev", "preadv"}:
        fd, buffers, offset = arguments
        first = memoryview(buffers[0])
        return function(fd, [first[: -(-first.nbytes // 2)]], offset)
    return function(*arguments)


def killing(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Ends the process as no handler can prevent."""
    os.kill(os.getpid(), signal.SIGKILL)


def killing_after_half(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        shortening(name, function, *arguments)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


SCENARIOS: dict[str, tuple[list[tuple[int, int]], tuple[int, int], dict[int, set[int]]]] = {
    # What was saved before, as (step, seed); what is saved; which states each step may then have.
    "first": ([], (2, 22), {2: {0, 22}}),
    "next": ([(1, 11)], (2, 22), {1: {11}, 2: {0, 22}}),
    "again": ([(1, 11)], (1, 22), {1: {11, 22}}),
    "another-again": ([(1, 11), (2, 12)], (1, 22), {1: {11, 22}, 2: {12}}),
}


def prepare(path: Path, scenario: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    for step, seed in SCENARIOS[scenario][0]:
        save(path, step, seed)


def num_calls(path: Path, scenario: str) -> int:
    """How many calls the save of a scenario makes."""
    prepare(path, scenario)
    system = FaultySystem()
    save(path, *SCENARIOS[scenario][1], system)
    return len(system.names)


def check_after_fault(path: Path, scenario: str) -> None:
    """Checks what a fault left, that the next save works, and that it leaves nothing behind."""
    _, (step, _), allowed = SCENARIOS[scenario]
    check_whole(path, allowed)
    save(path, step, 33)
    check_whole(path, {**allowed, step: {33}})
    left = [name for name in os.listdir(path) if not name.startswith("step-")]
    assert sorted(left) == [".lock", "latest"], left
    assert os.readlink(path / "latest") == f"step-{max(allowed):08d}"


def kill_at_every_call(path: Path, scenario: str) -> dict[str, int]:
    """Kills a save at every call; returns how many were killed and how many ended before."""
    outcomes: Counter[str] = Counter()
    for fault in (killing, killing_after_half):
        for at in range(num_calls(path, scenario)):
            prepare(path, scenario)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    save(path, *SCENARIOS[scenario][1], FaultySystem(at, fault))
                    status = 0
                finally:
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            outcomes["killed" if os.WIFSIGNALED(status) else f"ended {status}"] += 1
            check_after_fault(path, scenario)
    return dict(outcomes)


class KilledAt(System):
    """Ends the process before the n-th call of a name: ``"rename:2"``."""

    def __init__(self, where: str) -> None:
        self._name, count = where.split(":")
        self._left = int(count)
        self._lock = threading.Lock()

    def perform(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            self._left -= name == self._name
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)


def run_rank(path: Path, rank: int, world_size: int, token: str, system: System) -> None:
    """Saves as one rank of step 2; prints the error, if there is one."""
    share = request(2, 22, rank=rank, world_size=world_size, token=token)
    timeout = float(os.environ["RANK_TIMEOUT"])
    try:
        directory(path, system).save(share, timeout_seconds=timeout)
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
    else:
        print(json.dumps({"error": None}))


if __name__ == "__main__":
    assert "torch" not in sys.modules, "the disk layer imports torch"
    if sys.argv[1] == "kill":
        print(json.dumps(kill_at_every_call(Path(sys.argv[2]), sys.argv[3])))
    else:
        chosen = KilledAt(sys.argv[6]) if len(sys.argv) > 6 else System()
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], chosen)
