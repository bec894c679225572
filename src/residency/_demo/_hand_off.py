"""The case "hand-off": a trainer and an inference engine, two processes that share one device.

The trainer's batches change in length, so that its allocator keeps more and more; after each step
the engine needs the same block. The sizes follow from a run without a limit, and are not tuned: the
two have what the trainer reserves at most, and the engine holds the rest of the device; the block
is what is free after the first steps, less a hundredth of that. Stock, the engine lacks memory;
with a hand-off it always has its block, and the cache is emptied only where the figures ask for it.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residency._demo._bench import Bench
from residency._demo._names import HAND_OFF as NAME
from residency._demo._progress import Show
from residency._demo._report import CaseRow, Promise, Report
from residency._demo._settings import ModelShape, Settings
from residency._demo._two_processes import Process
from residency._memory import find_growth
from residency._units import format_bytes, parse_bytes

SNIPPET = """\
with residency.hand_off(0, peer="/run/gpu0.sock"):       # the trainer, after each step
    rollouts = engine.generate()
with residency.take_over("20GiB", peer="/run/gpu0.sock"):    # the engine, in its own process
    ..."""

_NUM_STEPS = 50
_LARGE_BYTES = parse_bytes("8GiB")  # of a simulated device
_FIRST_STEPS = 4
_MARGIN_SHARE = 100  # of the trainer's reserve: what the block leaves
_FLAT_SHARE = 0.02
_SHAPE = ModelShape(
    num_layers=2,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=2,
    num_key_value_heads=1,
)
_LABELS = ("alone, no limit", "side by side", "side by side, hand_off")


@dataclass
class _TwoProcessRun:
    """The figures of one run of both processes."""

    begin: dict[str, Any] = field(default_factory=dict)
    boundaries: list[dict[str, Any]] = field(default_factory=list)
    handed: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, Any] = field(default_factory=dict)
    failed_step: int | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        return max((figures["peak"] for figures in self.boundaries), default=0)

    @property
    def room_bytes(self) -> int:
        """The most bytes of the trainer's allocator, and those that its context gained."""
        outside: int = max(figures["outside"] for figures in self.boundaries)
        return self.peak_bytes + max(0, outside - int(self.begin["outside"]))


def run_hand_off(bench: Bench, settings: Settings, show: Show) -> Report:
    """Runs the trainer alone, then beside the engine, then with hand-offs."""
    settings = dataclasses.replace(
        settings, num_steps=max(settings.num_steps, _NUM_STEPS), num_columns=256, model=_SHAPE
    )
    with _Pairs(settings, len(_LABELS)) as pairs:
        alone = _run(_LABELS[0], pairs, show)
        early = alone.boundaries[_FIRST_STEPS - 1]
        capacity_bytes = alone.peak_bytes
        block_bytes = capacity_bytes - early["reserved"] - capacity_bytes // _MARGIN_SHARE
        stock = _run(_LABELS[1], pairs, show, alone, block_bytes=block_bytes)
        guarded = _run(_LABELS[2], pairs, show, alone, block_bytes=block_bytes, guard=True)
    is_same = guarded.outcome == alone.outcome
    return Report(
        case=NAME,
        device=bench.describe(),
        facts=_facts(settings, alone, block_bytes),
        rows=(
            _row(_LABELS[0], None, alone, None),
            _row(_LABELS[1], capacity_bytes, stock, None),
            _row(_LABELS[2], capacity_bytes, guarded, is_same),
        ),
        promises=(
            Promise(
                name="the engine always has its block",
                held=stock.failed_step is not None and guarded.failed_step is None,
                detail=f"stock {_ending(stock, settings)}; with hand_off "
                f"{_ending(guarded, settings)}",
            ),
            Promise(
                name="computes the same",
                held=is_same,
                detail=f"{len(alone.outcome['losses'])} losses and {len(alone.outcome['sums'])} "
                "parameters are equal bit for bit"
                if is_same
                else "losses or parameters differ",
            ),
            _promise_flat(guarded),
            _promise_only_where_needed(guarded, block_bytes),
        ),
        snippet=SNIPPET,
    )


def _run(
    label: str,
    pairs: _Pairs,
    show: Show,
    alone: _TwoProcessRun | None = None,
    *,
    block_bytes: int | None = None,
    guard: bool = False,
) -> _TwoProcessRun:
    """Makes a run, on what the trainer had when it was alone if that is given."""
    run = _TwoProcessRun()
    num_steps = pairs.settings.num_steps
    with pairs.next() as (trainer, engine, peer):
        run.begin = trainer.ask("memory")
        if alone is not None:
            engine.ask("leave", num_bytes=alone.room_bytes - run.begin["reserved"])
        started = time.perf_counter()
        for number in range(1, num_steps + 1):
            show(label, "step", number, num_steps)
            run.boundaries.append(trainer.ask("step", number=number))
            if block_bytes is None:
                continue
            if guard:
                trainer.send("hand_off", peer=peer)
                answer = engine.ask("take_over", num_bytes=block_bytes, peer=peer)
                run.handed.append(trainer.receive())
            else:
                answer = engine.ask("allocate", num_bytes=block_bytes)
            if answer["is_out_of_memory"]:
                run.failed_step, run.message = number, answer["message"]
                break
        show(label, "eval", num_steps, num_steps)
        run.outcome = trainer.ask("outcome")
        run.seconds = time.perf_counter() - started
    return run


class _Pairs:
    """A trainer and an engine for each run; those of the next run make their imports during one.

    Attributes:
        settings: Those of every run.
    """

    def __init__(self, settings: Settings, num_runs: int) -> None:
        self.settings = settings
        self._num_left = num_runs
        self._ends = ExitStack()
        self._begun: list[Process] = []

    def __enter__(self) -> _Pairs:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def _start(self) -> None:
        if self._num_left:
            self._num_left -= 1
            for role in ("trainer", "engine"):
                self._begun.append(Process(role))
                self._ends.callback(self._begun[-1].end)

    @contextmanager
    def next(self) -> Iterator[tuple[Process, Process, str]]:
        """Gives a run its two processes, and the path of the socket that they meet at."""
        trainer, engine = self._begun
        self._begun, ends, self._ends = [], self._ends, ExitStack()
        with ends, tempfile.TemporaryDirectory() as folder:
            options = {
                "share": f"demo-{os.getpid()}-{time.monotonic_ns()}",
                "capacity_bytes": _LARGE_BYTES,
            }
            trainer.begin(settings=dataclasses.asdict(self.settings), **options)
            engine.begin(**options)
            self._start()
            yield trainer, engine, str(Path(folder, "device.sock"))


def _facts(settings: Settings, alone: _TwoProcessRun, block_bytes: int) -> dict[str, str]:
    first, last = (alone.boundaries[at]["reserved"] for at in (_FIRST_STEPS - 1, -1))
    return {
        "processes": "a trainer (Qwen3 architecture, AdamW) and an engine, on one device",
        "steps": f"{settings.num_steps} of {settings.num_rows} x 26..{settings.num_columns} bytes",
        "stock reserve": f"{format_bytes(first)} after step {_FIRST_STEPS}, "
        f"{format_bytes(last)} at the end",
        "capacity": "what the trainer reserves at most = "
        f"{format_bytes(alone.peak_bytes)}; the engine holds the rest of the device",
        "block": f"what is free after step {_FIRST_STEPS}, less 1/{_MARGIN_SHARE} of that reserve "
        f"= {format_bytes(block_bytes)}",
    }


def _row(
    setting: str, capacity_bytes: int | None, run: _TwoProcessRun, identical: bool | None
) -> CaseRow:
    failed = run.failed_step is not None
    losses = run.outcome["losses"]
    return CaseRow(
        case=NAME,
        setting=setting,
        capacity_bytes=capacity_bytes,
        peak_bytes=run.peak_bytes,
        outcome="out of memory" if failed else "finished",
        phase="engine's block" if failed else None,
        step=run.failed_step,
        asked_bytes=None,
        first_loss=losses[0],
        last_loss=losses[-1],
        heldout_loss=None,
        identical=identical,
        seconds=run.seconds,
    )


def _ending(run: _TwoProcessRun, settings: Settings) -> str:
    if run.failed_step is None:
        return f"it has it {settings.num_steps} times"
    return f"it is out of memory after step {run.failed_step}"


def _promise_flat(run: _TwoProcessRun) -> Promise:
    reserved = [handed["inside"]["reserved"] for handed in run.handed]
    growth = find_growth("reserved", reserved)
    total = 0.0 if growth is None else growth.bytes_per_visit * growth.num_visits
    held = len(reserved) > 2 and abs(total) <= _FLAT_SHARE * max(reserved)
    return Promise(
        name="the trainer's reserve at the boundary does not creep: its trend is within 2 %",
        held=held,
        detail=f"{format_bytes(min(reserved))} to {format_bytes(max(reserved))}, "
        f"over the run it rises by {format_bytes(round(total))}",
    )


def _promise_only_where_needed(run: _TwoProcessRun, block_bytes: int) -> Promise:
    needless = flushed = 0
    for handed in run.handed:
        before, inside = handed["before"], handed["inside"]
        count = inside["num_flushes"] - before["num_flushes"]
        flushed += count > 0
        needless += count > 0 and before["free"] >= block_bytes
    return Promise(
        name="the cache is emptied only where the block needs it",
        held=needless == 0 and flushed > 0,
        detail=f"after {flushed} of {len(run.handed)} steps, {needless} of them needlessly",
    )
