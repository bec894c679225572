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
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from residency._demo._child import Child
from residency._demo._frame import CaseRun, FrameMaker, Words
from residency._demo._report import Promise, Report
from residency._demo._settings import ModelShape, Settings
from residency._memory import find_growth
from residency._units import format_bytes, parse_bytes

_NUM_STEPS = 50
_LARGE_BYTES = parse_bytes("512MiB")  # of a simulated device, whose bytes are filled
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
_NUM_RUNS = 3

_Pair = tuple[Child, Child, str]


def run(make_frame: FrameMaker, settings: Settings) -> Report:
    """Runs the trainer alone, then beside the engine, then with hand-offs."""
    num_steps = max(settings.num_steps, _NUM_STEPS)
    settings = dataclasses.replace(settings, num_steps=num_steps, num_columns=256, model=_SHAPE)
    words = Words(
        snippet="""\
with residency.hand_off(0, peer="/run/gpu0.sock"):       # the trainer, after each step
    rollouts = engine.generate()
with residency.take_over("20GiB", peer="/run/gpu0.sock"):    # the engine, in its own process
    ...""",
        fits="the engine always has its block",
        fails="it is out of memory after step {step}",
        finishes=f"it has it {num_steps} times",
        ours="with hand_off",
    )
    frame = make_frame(words, num_steps)
    with closing(_pairs(settings, _NUM_RUNS)) as pairs:
        alone = _run(frame.begin("alone, no limit", None), next(pairs))
        first, last = (alone.found["figures"][at]["reserved"] for at in (_FIRST_STEPS - 1, -1))
        capacity_bytes = alone.peak_bytes
        block_bytes = capacity_bytes - first - capacity_bytes // _MARGIN_SHARE
        room_bytes = capacity_bytes + alone.found["outside"]
        stock = frame.begin("side by side", capacity_bytes)
        _run(stock, next(pairs), room_bytes, block_bytes)
        ours = frame.begin("side by side, hand_off", capacity_bytes)
        _run(ours, next(pairs), room_bytes, block_bytes, is_guarded=True)
    return frame.report(
        alone,
        f"{len(alone.losses)} losses and {len(alone.computed['sums'])} parameters are equal bit "
        "for bit",
        {
            "processes": "a trainer (Qwen3 architecture, AdamW) and an engine, on one device",
            "steps": f"{num_steps} of {settings.num_rows} x 26..{settings.num_columns} bytes",
            "stock reserve": f"{format_bytes(first)} after step {_FIRST_STEPS}, "
            f"{format_bytes(last)} at the end",
            "capacity": "what the trainer reserves at most = "
            f"{format_bytes(capacity_bytes)}; the engine holds the rest of the device",
            "block": f"what is free after step {_FIRST_STEPS}, less 1/{_MARGIN_SHARE} of that "
            f"reserve = {format_bytes(block_bytes)}",
        },
        _promise_flat(ours.found["handed"]),
        _promise_only_where_needed(ours.found["handed"], block_bytes),
    )


def _pairs(settings: Settings, num_pairs: int) -> Generator[_Pair, None, None]:
    """Yields a trainer, an engine, and the path of the socket that they meet at.

    The processes of the next pair make their imports while one works, and end when they are over.
    """
    with ExitStack() as ends:

        def start() -> list[Child]:
            pair = [Child("residency._demo._two_processes", role) for role in ("trainer", "engine")]
            for child in pair:
                ends.callback(child.end)
            return pair

        ahead = start()
        for number in range(1, num_pairs + 1):
            trainer, engine = ahead
            share = f"demo-{os.getpid()}-{time.monotonic_ns()}"
            device: dict[str, Any] = {"share": share, "capacity_bytes": _LARGE_BYTES}
            trainer.ask(order="begin", settings=dataclasses.asdict(settings), **device)
            engine.ask(order="begin", **device)
            if number < num_pairs:
                ahead = start()
            with tempfile.TemporaryDirectory() as folder:
                yield trainer, engine, str(Path(folder, "device.sock"))
            trainer.end()
            engine.end()


def _run(
    run: CaseRun,
    pair: _Pair,
    room_bytes: int | None = None,
    block_bytes: int = 0,
    *,
    is_guarded: bool = False,
) -> CaseRun:
    """Trains, in so much room of the device, and lets the engine have its block after each step."""
    trainer, engine, peer = pair
    begin, figures, handed = trainer.ask(order="memory"), [], []
    if room_bytes is not None:
        engine.ask(order="leave", num_bytes=room_bytes - begin["reserved"])
    started = time.perf_counter()
    for step in range(1, run.num_steps + 1):
        run.enter("step", step)
        figures.append(trainer.ask(order="step", number=step))
        if room_bytes is None:
            continue
        if is_guarded:
            trainer.send(order="hand_off", peer=peer)
            answer = engine.ask(order="take_over", num_bytes=block_bytes, peer=peer)
            handed.append(trainer.receive())
        else:
            answer = engine.ask(order="allocate", num_bytes=block_bytes)
        if answer["is_out_of_memory"]:
            run.phase = "engine's block"
            break
    else:
        run.phase = run.step = None
    run.show(run.label, "eval", run.num_steps, run.num_steps)
    run.computed = trainer.ask(order="outcome")
    run.losses = run.computed["losses"]
    run.peak_bytes = max(after["peak"] for after in figures)
    run.seconds = time.perf_counter() - started
    # What the trainer's context gained.
    outside_bytes = max(0, max(after["outside"] for after in figures) - begin["outside"])
    run.found = {"figures": figures, "handed": handed, "outside": outside_bytes}
    return run


def _promise_flat(handed: list[dict[str, Any]]) -> Promise:
    reserved = [figures["inside"]["reserved"] for figures in handed]
    growth = find_growth("reserved", reserved)
    total = 0.0 if growth is None else growth.bytes_per_visit * growth.num_visits
    return Promise(
        "the trainer's reserve at the boundary does not creep: its trend is within 2 %",
        len(reserved) > 2 and abs(total) <= _FLAT_SHARE * max(reserved),
        f"{format_bytes(min(reserved))} to {format_bytes(max(reserved))}, "
        f"over the run it rises by {format_bytes(round(total))}",
    )


def _promise_only_where_needed(handed: list[dict[str, Any]], block_bytes: int) -> Promise:
    flushed = [
        figures["before"]["free"]
        for figures in handed
        if figures["inside"]["num_flushes"] > figures["before"]["num_flushes"]
    ]
    needless = sum(free_bytes >= block_bytes for free_bytes in flushed)
    return Promise(
        "the cache is emptied only where the block needs it",
        needless == 0 and bool(flushed),
        f"after {len(flushed)} of {len(handed)} steps, {needless} of them needlessly",
    )
