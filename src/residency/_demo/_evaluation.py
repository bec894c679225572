"""The case "evaluation": the Trainer evaluates a model, and its metrics want the predictions.

The stock loop keeps the logits of all batches on the device until the evaluation is over. The
capacity is what an evaluation of losses alone takes, plus the outputs of two batches. Real
Transformers run on all sides.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from residency._demo._corpus import heldout_batch, read_corpus
from residency._demo._frame import CaseRun, FrameMaker, Words
from residency._demo._model import as_samples, imported, make_model, make_trainer
from residency._demo._report import Promise, Report
from residency._demo._settings import ModelShape, Settings
from residency._units import format_bytes

_NUM_BATCHES = 8
WORDS = Words(
    snippet="""\
from residency.integrations.transformers import ResidencyCallback
trainer = Trainer(..., callbacks=[ResidencyCallback()])
trainer.evaluate()""",
    fits="finishes where the stock evaluation does not",
    fails=f"runs out of memory in {{phase}}, at batch {{step}} of {_NUM_BATCHES}",
)
_NUM_ROWS, _NUM_COLUMNS = 4, 64
_SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocabulary_size=16_384,
)
_LOGITS_BYTES = 4 * _NUM_ROWS * _NUM_COLUMNS * _SHAPE.vocabulary_size  # of a batch, in fp32
_LABELS_BYTES = 2 * 8 * _NUM_ROWS * _NUM_COLUMNS  # the batch's, and the copy that is on its way
_LOSSES_BYTES = 512  # a float for each row: a block of the device's allocator
_OUTPUT_BYTES = _LOGITS_BYTES + _LABELS_BYTES + _LOSSES_BYTES


def run(make_frame: FrameMaker, settings: Settings) -> Report:
    """Evaluates without a limit, stock under the capacity, and with the callback under it."""
    frame = make_frame(WORDS, _NUM_BATCHES)
    evaluate = partial(_evaluate, seed=settings.seed)
    alone = frame.run("losses alone, no limit", partial(evaluate, prediction_loss_only=True))
    reference = frame.run("Trainer, no limit", evaluate)
    capacity_bytes = alone.peak_bytes + 2 * _OUTPUT_BYTES
    frame.run("Trainer", evaluate, capacity_bytes)
    from residency.integrations.transformers import ResidencyCallback

    guarded = partial(evaluate, callbacks=(ResidencyCallback(),))
    ours = frame.run("Trainer, ResidencyCallback", guarded, capacity_bytes)
    return frame.report(
        reference,
        "logits, labels, metrics and the loss are equal bit for bit",
        {
            "model": f"Qwen3 architecture, {_SHAPE.vocabulary_size:,} tokens, fp32",
            "evaluation": f"{_NUM_BATCHES} batches of {_NUM_ROWS} x {_NUM_COLUMNS} bytes of text, "
            f"the logits of each are {format_bytes(_LOGITS_BYTES)}",
            "capacity": "peak with losses alone + outputs of 2 batches = "
            f"{format_bytes(capacity_bytes)}",
        },
        Promise(
            "holds the outputs of one batch at most",
            ours.peak_bytes <= alone.peak_bytes + _OUTPUT_BYTES,
            f"peak {format_bytes(ours.peak_bytes)} <= {format_bytes(alone.peak_bytes)} with losses "
            f"alone + {format_bytes(_OUTPUT_BYTES)}",
        ),
    )


def _evaluate(
    run: CaseRun, seed: int, callbacks: tuple[object, ...] = (), prediction_loss_only: bool = False
) -> None:
    class BatchCount(imported("transformers").TrainerCallback):  # type: ignore[misc]  # any version's
        """A callback that notes how far the evaluation is."""

        def on_prediction_step(self, *args: Any, **others: Any) -> None:
            run.enter("evaluate", (run.step or 0) + 1)

    def metrics(found: Any) -> dict[str, float]:
        run.computed["logits"] = torch.from_numpy(found.predictions)
        run.computed["labels"] = torch.from_numpy(found.label_ids)
        right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
        return {"right": float(right.mean())}

    texts = heldout_batch(read_corpus(), rows=_NUM_BATCHES * _NUM_ROWS, columns=_NUM_COLUMNS)
    trainer = make_trainer(
        run,
        make_model(_SHAPE, seed=seed),
        settings={
            "per_device_eval_batch_size": _NUM_ROWS,
            "prediction_loss_only": prediction_loss_only,
        },
        eval_dataset=as_samples(texts),
        compute_metrics=metrics,
        callbacks=[*callbacks, BatchCount()],
    )
    run.enter("evaluate", 1)
    found = trainer.evaluate()
    run.heldout_loss = found["eval_loss"]
    run.computed |= {"loss": run.heldout_loss, "right": found.get("eval_right")}
