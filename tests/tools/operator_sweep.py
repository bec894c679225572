"""Drives the worker processes of ``tests/sim/operators``: one that dies names what it died of."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from operator_differences import Difference

_WORKER = Path(__file__).parents[1] / "sim" / "operators" / "worker.py"
_SILENCE_SECONDS = 120.0


class Item(NamedTuple):
    """What a worker runs in one go."""

    mode: str  # "real" or "dry"
    kind: str  # "operator", "module" or "optimizer"
    name: str
    dtype: str
    variants: tuple[str, ...]
    most_samples: int


Key = tuple[str, str, str, str, str]  # mode, kind, name, dtype, variant
Answer = dict[str, Any]


class MissingError(Exception):
    """What torch's own tables need is not installed."""


class Worker:
    """A process that runs items in one mode."""

    def __init__(self, mode: str, log: IO[bytes]) -> None:
        source = str(Path(__file__).parents[2] / "src")
        path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        )
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self.names: Answer = self._line() or {}
        if "missing" in self.names:
            raise MissingError(self.names["missing"])
        if not self.names:
            raise RuntimeError(f"a worker ended before its first item: {self.end()}")

    def run(self, item: Item, answers: dict[Key, Answer]) -> bool:
        """Puts an answer in place for each variant; returns whether the process still lives."""
        begun = ""
        todo = [item.kind, item.name, item.dtype, list(item.variants), item.most_samples]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(todo).encode() + b"\n")
        self._process.stdin.flush()
        while line := self._line():
            begun = line.get("begins", begun)
            if "variant" in line:
                key = (item.mode, item.kind, item.name, item.dtype, line.pop("variant"))
                answers[key] = line
            if "ends" in line:
                return True
        detail = self.end()
        key = (item.mode, item.kind, item.name, item.dtype, begun or item.variants[0])
        answers[key] = {"status": "crash", "detail": detail, "samples": []}
        return False

    def _line(self) -> Answer | None:
        """Returns the next line, or None if the process ended or says nothing for too long."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not self._selector.select(_SILENCE_SECONDS):
                return None
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                return None
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: Answer = json.loads(line)
        return answer

    def end(self) -> str:
        """Ends the process; returns how it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        self._selector.close()
        self._process.stdout.close()
        return f"no line for {_SILENCE_SECONDS:.0f} s" if code is None else f"exit {code}"


Names = dict[str, list[str]]  # by kind


def sweep(
    folder: Path, items_of: Callable[[Names], list[Item]], drivers: list[tuple[str, ...]]
) -> dict[Key, Answer]:
    """Runs items, each in a worker of its mode; raises what a driver met.

    Args:
        folder: Where the processes write what they say beside their answers.
        items_of: Chooses the items out of the names in torch's tables.
        drivers: The modes of each thread's workers, of which one computes at a time.
    """
    todo: list[Item] = []
    answers: dict[Key, Answer] = {}
    errors: list[BaseException] = []
    chosen, lock = threading.Event(), threading.Lock()

    def take(modes: tuple[str, ...]) -> Item | None:
        with lock:
            found = next((item for item in todo if item.mode in modes), None)
            if found is not None:
                todo.remove(found)
            return found

    def drive(index: int) -> None:
        workers: dict[str, Worker] = {}
        try:
            with (folder / f"worker-{index}.log").open("ab") as log:
                modes = drivers[index]
                workers[modes[0]] = Worker(modes[0], log)
                if index == 0:
                    todo.extend(items_of(workers[modes[0]].names))
                    chosen.set()
                chosen.wait()
                while not errors and (item := take(modes)):
                    _run(item, workers, log, answers)
        except BaseException as error:
            errors.append(error)
        finally:
            chosen.set()
            for worker in workers.values():
                worker.end()

    threads = [threading.Thread(target=drive, args=(index,)) for index in range(len(drivers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers


def _run(
    item: Item, workers: dict[str, Worker], log: IO[bytes], answers: dict[Key, Answer]
) -> None:
    while item.variants:
        if item.mode not in workers:
            workers[item.mode] = Worker(item.mode, log)
        if workers[item.mode].run(item, answers):
            return
        del workers[item.mode]  # it died; the variants that it had not come to go on
        left = tuple(v for v in item.variants if (*item[:4], v) not in answers)
        item = item._replace(variants=left)


# ------------------------------------------------------------------------------------- verdicts


def _bytes_answer(real: Answer, dry: Answer) -> Answer:
    """Compares what both modes measured of each sample: peaks, and all of results but values."""
    for index, (one, other) in enumerate(zip(real["samples"], dry["samples"], strict=True)):
        if one[2] is None or other[2] is None:
            continue
        for what in ("peak_bytes", "forms"):
            if one[2][what] != other[2][what]:
                detail = f"sample {index}: {what} {_first_difference(one[2][what], other[2][what])}"
                return {"status": "different", "detail": detail}
    return {"status": "equal", "detail": ""}


def _first_difference(real: Any, dry: Any) -> str:
    if isinstance(real, list) and isinstance(dry, list) and len(real) == len(dry):
        real, dry = next((r, d) for r, d in zip(real, dry, strict=True) if r != d)
    return f"{real} in real mode, {dry} in dry mode"


def with_bytes(answers: dict[Key, Answer]) -> dict[Key, Answer]:
    """Returns the answers, and under the mode ``bytes`` those of comparing dry with real mode."""
    ran = ("equal", "close", "skipped", "different")
    found = dict(answers)
    for key, dry in answers.items():
        real = answers.get(("real", *key[1:]))
        if key[0] == "dry" and real and {real["status"], dry["status"]} <= set(ran):
            found["bytes", *key[1:]] = _bytes_answer(real, dry)
    return found


def surprises(answers: dict[Key, Answer], differences: list[Difference]) -> list[str]:
    """Returns a line for each run that is not equal and in no entry of the table."""
    lines = []
    for key, answer in sorted(answers.items()):
        status = answer["status"]
        if status in ("equal", "skipped"):
            continue
        if any(entry.holds_for(key) and entry.allows(status) for entry in differences):
            continue
        lines.append(f"{status}: {'/'.join(key)}: {answer['detail']}")
    return lines


def stale(answers: dict[Key, Answer], differences: list[Difference]) -> list[str]:
    """Returns a line for each entry of the table for which no run differs any more."""
    return [
        f"{entry.mode}/{entry.kind}/{entry.names} is no longer {entry.status}: remove the entry"
        for entry in differences
        if not any(entry.holds_for(k) and entry.allows(a["status"]) for k, a in answers.items())
    ]


# ---------------------------------------------------------------------------------------- choices

LAYOUTS = ("contiguous", "strided", "transposed", "channels_last")
VARIANTS = (*LAYOUTS, "side_stream", "in_place", "out", "forward_mode", "double_backward")
IMPLEMENTATIONS = ("loop", "foreach", "fused")


def items_for(kind: str, names: list[str], *, most_samples: int) -> list[Item]:
    """Returns the runs of these names in float32: real in every variant, and dry."""
    real, dry = {
        "operator": (VARIANTS, LAYOUTS[:1]),
        "module": (("train", "eval"), ("train", "eval")),
        "optimizer": (IMPLEMENTATIONS, IMPLEMENTATIONS),
    }[kind]
    return [
        Item(mode, kind, name, "float32", variants, most_samples)
        for name in names
        for mode, variants in (("real", real), ("dry", dry))
    ]
