"""The case "optimizer-step": AdamW under a capacity that its own state does not fit.

The capacity follows from the stock run by a formula and is not tuned: the stock peak less half of
the AdamW state. The offloaded run must then finish under it, bit for bit equal to the unlimited
stock run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from residency import offload_optimizer
from residency._demo._corpus import Corpus, heldout_batch, read_corpus, training_batch
from residency._demo._frame import CaseRun, FrameMaker, Words
from residency._demo._identity import count_values
from residency._demo._model import count_parameters, make_model, on_host
from residency._demo._report import Promise, Report
from residency._demo._settings import ModelShape, Settings
from residency._errors import RefusedError
from residency._units import format_bytes, spell_bytes

WORDS = Words(
    snippet="""\
optimizer = torch.optim.AdamW(model.parameters())
residency.offload_optimizer(optimizer, bucket="{bucket}", slots={slots})""",
    fits="fits where stock AdamW does not",
    fails="runs out of memory in the {phase} of step {step}{asked}",
    ours="offloaded",
)
_STATE_BYTES_PER_PARAMETER = 8  # AdamW in fp32: exp_avg and exp_avg_sq, 4 bytes each
_TAKEN_SHARE = 2  # the capacity is the stock peak less one part in this many of the state
_HELD_OUT_ROWS = 16

_OptimizerMaker = Callable[[torch.nn.Module], torch.optim.Optimizer]


def run(make_frame: FrameMaker, settings: Settings) -> Report:
    """Runs stock AdamW without and with a capacity, then the offloaded one, and compares.

    Raises:
        RefusedError: The device cannot hold the stock run to begin with.
    """
    corpus, bucket_bytes, slots = read_corpus(), settings.bucket_bytes, settings.num_slots
    snippet = WORDS.snippet.format(bucket=spell_bytes(bucket_bytes), slots=slots)
    frame = make_frame(dataclasses.replace(WORDS, snippet=snippet), settings.num_steps)

    def offloaded(model: torch.nn.Module) -> torch.optim.Optimizer:
        return offload_optimizer(_adamw(model), bucket=bucket_bytes, slots=slots)

    small = dataclasses.replace(settings, num_steps=2, model=ModelShape(num_layers=1))
    frame.warm_up(partial(_train, settings=small, corpus=corpus, make_optimizer=_adamw))
    train = partial(_train, settings=settings, corpus=corpus)
    reference = frame.run("AdamW, no limit", partial(train, make_optimizer=_adamw))
    num_parameters = count_parameters(settings.model)
    state_bytes = _STATE_BYTES_PER_PARAMETER * num_parameters
    capacity_bytes = reference.peak_bytes - state_bytes // _TAKEN_SHARE
    frame.run("AdamW", partial(train, make_optimizer=_adamw), capacity_bytes)
    ours = frame.run("AdamW, offloaded", partial(train, make_optimizer=offloaded), capacity_bytes)
    # AdamW's own scratch for the bucket it is stepping: one square root per element, half of the
    # state.
    scratch_bytes = bucket_bytes // 2
    bound_bytes = slots * bucket_bytes + scratch_bytes
    growth_bytes = ours.found["growth"]
    return frame.report(
        reference,
        f"all {count_values(reference.computed)} parameters, optimizer states, settings and losses "
        "are equal bit for bit",
        {
            "model": f"Qwen3 architecture, {num_parameters:,} parameters in fp32, "
            f"seed {settings.seed}",
            "text": f"Python's standard library, {format_bytes(corpus.train.numel())} to train on, "
            f"{format_bytes(corpus.heldout.numel())} held out (other files)",
            "steps": f"{settings.num_steps} of {settings.num_rows} x {settings.num_columns} bytes",
            "AdamW state": f"{_STATE_BYTES_PER_PARAMETER} B x parameters = "
            f"{format_bytes(state_bytes)}",
            "capacity": f"stock peak - AdamW state / {_TAKEN_SHARE} = "
            f"{format_bytes(capacity_bytes)}, the same for both limited runs",
        },
        Promise(
            "the step adds at most slots x bucket, and AdamW's scratch for one bucket",
            growth_bytes <= bound_bytes and ours.phase is None,
            f"{format_bytes(growth_bytes)} measured <= {slots} x {format_bytes(bucket_bytes)} + "
            f"{format_bytes(scratch_bytes)} = {format_bytes(bound_bytes)}",
        ),
        Promise(
            "every run gives its memory back",
            max(frame.left_bytes) <= 0,
            "left on the device after each run: " + ", ".join(map(format_bytes, frame.left_bytes)),
        ),
    )


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _train(
    run: CaseRun, settings: Settings, corpus: Corpus, make_optimizer: _OptimizerMaker
) -> None:
    rows, columns, run.found["growth"] = settings.num_rows, settings.num_columns, 0
    try:
        model = make_model(settings.model, seed=settings.seed).to(run.device)
        optimizer = make_optimizer(model)
    except torch.OutOfMemoryError:
        raise RefusedError(
            "The parameters of the model alone do not fit the device's capacity, so no optimizer "
            "setting can help. Choose a smaller model or a larger capacity."
        ) from None
    for step in range(1, settings.num_steps + 1):
        batch = training_batch(corpus, seed=settings.seed, step=step, rows=rows, columns=columns)
        batch = batch.to(run.device)
        run.enter("forward", step)
        loss = model(input_ids=batch, labels=batch).loss
        run.enter("backward", step)
        loss.backward()
        run.losses.append(loss.item())
        del loss
        run.enter("optimizer step", step)
        growth_bytes = run.growth_of(optimizer.step)
        run.found["growth"] = max(run.found["growth"], growth_bytes)
        optimizer.zero_grad(set_to_none=True)
    run.enter("eval")
    batch = heldout_batch(corpus, rows=_HELD_OUT_ROWS, columns=columns).to(run.device)
    with torch.no_grad():
        run.heldout_loss = model(input_ids=batch, labels=batch).loss.item()
    run.computed = {
        "parameters": on_host(dict(model.named_parameters())),
        "optimizer": on_host(optimizer.state_dict()),
        "losses": run.losses,
        "heldout_loss": run.heldout_loss,
    }
