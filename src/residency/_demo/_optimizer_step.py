"""The case "optimizer-step": AdamW under a capacity that its own state does not fit.

The capacity follows from the stock run by a formula and is not tuned: the stock peak less half of
the AdamW state. The offloaded run must then finish under it, bit for bit equal to the unlimited
stock run.
"""

from __future__ import annotations

import dataclasses

import torch

from residency import offload_optimizer
from residency._demo._bench import Bench
from residency._demo._corpus import Corpus, read_corpus
from residency._demo._identity import count_values, differences
from residency._demo._names import OPTIMIZER_STEP as NAME
from residency._demo._progress import Show
from residency._demo._report import CaseRow, Promise, Report
from residency._demo._settings import ModelShape, Settings
from residency._demo._training import OptimizerMaker, TrainingOutcome, make_model, train
from residency._errors import RefusedError
from residency._units import format_bytes, spell_bytes

SNIPPET = """\
optimizer = torch.optim.AdamW(model.parameters())
residency.offload_optimizer(optimizer, bucket="{bucket}", slots={slots})"""

_STATE_BYTES_PER_PARAMETER = 8  # AdamW in fp32: exp_avg and exp_avg_sq, 4 bytes each
_TAKEN_SHARE = 2  # the capacity is the stock peak less one part in this many of the state
_LEARNING_RATE = 1e-3
_LABELS = ("AdamW, no limit", "AdamW", "AdamW, offloaded")


def run_optimizer_step(bench: Bench, settings: Settings, show: Show) -> Report:
    """Runs stock AdamW without and with a capacity, then the offloaded one, and compares.

    Raises:
        RefusedError: The device cannot hold the stock run to begin with.
    """
    corpus = read_corpus()
    num_parameters = _count_parameters(settings)
    _warm_up(bench, settings, corpus)
    left: list[int] = []

    def run(
        label: str, make_optimizer: OptimizerMaker, capacity_bytes: int | None
    ) -> TrainingOutcome:
        def advance(phase: str, step: int) -> None:
            show(label, phase, step, settings.num_steps)

        bench.limit(capacity_bytes)
        try:
            return train(bench.device, settings, corpus, make_optimizer, advance)
        finally:
            left.append(bench.settle())

    def make_offloaded(model: torch.nn.Module) -> torch.optim.Optimizer:
        bucket, slots = settings.bucket_bytes, settings.num_slots
        return offload_optimizer(make_adamw(model), bucket=bucket, slots=slots)

    reference = run(_LABELS[0], make_adamw, None)
    _require_finished(reference)
    state_bytes = _STATE_BYTES_PER_PARAMETER * num_parameters
    capacity_bytes = reference.peak_bytes() - state_bytes // _TAKEN_SHARE
    stock = run(_LABELS[1], make_adamw, capacity_bytes)
    offloaded = run(_LABELS[2], make_offloaded, capacity_bytes)
    different = differences(reference, offloaded)
    return Report(
        case=NAME,
        device=bench.describe(),
        facts=_facts(settings, corpus, num_parameters, capacity_bytes),
        rows=(
            _row(_LABELS[0], None, reference, None),
            _row(_LABELS[1], capacity_bytes, stock, None),
            _row(_LABELS[2], capacity_bytes, offloaded, not different),
        ),
        promises=(
            _promise_fits(stock, offloaded),
            _promise_identical(different, count_values(reference)),
            _promise_bound(offloaded, settings),
            _promise_gives_back(left),
        ),
        snippet=_snippet(settings),
    )


def make_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns torch's own AdamW with its default implementation."""
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)


def _snippet(settings: Settings) -> str:
    return SNIPPET.format(bucket=spell_bytes(settings.bucket_bytes), slots=settings.num_slots)


def _count_parameters(settings: Settings) -> int:
    with torch.device("meta"):
        model = make_model(settings.model, seed=settings.seed, num_columns=settings.num_columns)
    return sum(parameter.numel() for parameter in model.parameters())


def _warm_up(bench: Bench, settings: Settings, corpus: Corpus) -> None:
    """Lets the device's libraries take the workspaces that they keep while the process lives."""
    small = dataclasses.replace(settings, num_steps=2, model=ModelShape(num_layers=1))
    bench.limit(None)
    _require_finished(train(bench.device, small, corpus, make_adamw, lambda *_: None))
    bench.mark_empty()


def _require_finished(outcome: TrainingOutcome) -> None:
    if outcome.failed_phase is not None:
        raise RefusedError(
            f"Stock AdamW {_ending(outcome)}, with no limit of ours, so nothing can be compared. "
            "Free the device or run on a larger one."
        )


def _facts(
    settings: Settings, corpus: Corpus, num_parameters: int, capacity_bytes: int
) -> dict[str, str]:
    state_bytes = _STATE_BYTES_PER_PARAMETER * num_parameters
    return {
        "model": f"Qwen3 architecture, {num_parameters:,} parameters in fp32, seed {settings.seed}",
        "text": (
            f"Python's standard library, {format_bytes(corpus.train.numel())} to train on, "
            f"{format_bytes(corpus.heldout.numel())} held out (other files)"
        ),
        "steps": f"{settings.num_steps} of {settings.num_rows} x {settings.num_columns} bytes",
        "AdamW state": f"{_STATE_BYTES_PER_PARAMETER} B x parameters = {format_bytes(state_bytes)}",
        "capacity": (
            f"stock peak - AdamW state / {_TAKEN_SHARE} = {format_bytes(capacity_bytes)}, "
            "the same for both limited runs"
        ),
    }


def _row(
    setting: str, capacity_bytes: int | None, outcome: TrainingOutcome, identical: bool | None
) -> CaseRow:
    failed = outcome.failed_phase is not None
    return CaseRow(
        case=NAME,
        setting=setting,
        capacity_bytes=capacity_bytes,
        peak_bytes=outcome.peak_bytes(),
        outcome="out of memory" if failed else "finished",
        phase=outcome.failed_phase,
        step=outcome.failed_step,
        asked_bytes=outcome.asked_bytes,
        first_loss=outcome.losses[0] if outcome.losses else None,
        last_loss=outcome.losses[-1] if outcome.losses else None,
        heldout_loss=outcome.heldout_loss,
        identical=identical,
        seconds=outcome.seconds,
    )


def _promise_fits(stock: TrainingOutcome, offloaded: TrainingOutcome) -> Promise:
    return Promise(
        name="fits where stock AdamW does not",
        held=stock.failed_phase is not None and offloaded.failed_phase is None,
        detail=f"stock {_ending(stock)}; offloaded {_ending(offloaded)}",
    )


def _ending(outcome: TrainingOutcome) -> str:
    if outcome.failed_phase is None:
        return "finishes"
    where = f"{outcome.failed_phase} of step {outcome.failed_step}"
    if outcome.asked_bytes is None:
        return f"runs out of memory in the {where}"
    return f"runs out of memory in the {where}, asking for {format_bytes(outcome.asked_bytes)}"


def _promise_identical(different: list[str], num_values: int) -> Promise:
    detail = (
        f"all {num_values} parameters, optimizer states, settings and losses are equal bit for bit"
    )
    if different:
        detail = f"{len(different)} values differ, the first is {different[0]}"
    return Promise(name="computes the same", held=not different, detail=detail)


def _promise_bound(offloaded: TrainingOutcome, settings: Settings) -> Promise:
    # AdamW's own scratch for the bucket it is stepping: one square root per element, half of the
    # state.
    scratch_bytes = settings.bucket_bytes // 2
    bound_bytes = settings.num_slots * settings.bucket_bytes + scratch_bytes
    return Promise(
        name="the step adds at most slots x bucket, and AdamW's scratch for one bucket",
        held=offloaded.step_growth_bytes <= bound_bytes and offloaded.failed_phase is None,
        detail=(
            f"{format_bytes(offloaded.step_growth_bytes)} measured <= "
            f"{settings.num_slots} x {format_bytes(settings.bucket_bytes)} + "
            f"{format_bytes(scratch_bytes)} = {format_bytes(bound_bytes)}"
        ),
    )


def _promise_gives_back(left: list[int]) -> Promise:
    return Promise(
        name="every run gives its memory back",
        held=max(left) <= 0,
        detail="left on the device after each run: "
        + ", ".join(format_bytes(value) for value in left),
    )
