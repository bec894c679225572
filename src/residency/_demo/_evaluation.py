"""The case "evaluation": the Trainer evaluates a model, and its metrics want the predictions.

The stock loop keeps the logits of all batches on the device until the evaluation is over. The
capacity is what an evaluation of losses alone takes, plus the outputs of two batches. Real
Transformers run on all sides.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from residency import _device
from residency._demo._bench import Bench
from residency._demo._corpus import heldout_batch, read_corpus
from residency._demo._identity import different_values
from residency._demo._names import EVALUATION as NAME
from residency._demo._progress import Show
from residency._demo._report import CaseRow, LimitedRun, Promise, Report
from residency._demo._settings import Settings
from residency._demo._training import asked_bytes
from residency._errors import RefusedError
from residency._units import format_bytes

SNIPPET = """\
from residency.integrations.transformers import ResidencyCallback
trainer = Trainer(..., callbacks=[ResidencyCallback()])
trainer.evaluate()"""

_NUM_BATCHES = 8
_NUM_ROWS, _NUM_COLUMNS = 4, 64
_VOCABULARY_SIZE = 16_384
_LOGITS_BYTES = 4 * _NUM_ROWS * _NUM_COLUMNS * _VOCABULARY_SIZE  # of a batch, in fp32
_LABELS_BYTES = 2 * 8 * _NUM_ROWS * _NUM_COLUMNS  # the batch's, and the copy that is on its way
_LOSSES_BYTES = 512  # a float for each row: a block of the device's allocator
_OUTPUT_BYTES = _LOGITS_BYTES + _LABELS_BYTES + _LOSSES_BYTES
_LABELS = ("losses alone, no limit", "Trainer, no limit", "Trainer", "Trainer, ResidencyCallback")


@dataclass(kw_only=True)
class _EvaluationRun(LimitedRun):
    """The figures of one run."""

    computed: dict[str, object] = field(default_factory=dict)
    heldout_loss: float | None = None


def run_evaluation(bench: Bench, settings: Settings, show: Show) -> Report:
    """Evaluates without a limit, stock under the capacity, and with the callback under it.

    Raises:
        RefusedError: Transformers is not installed.
    """

    def run(label: str, capacity_bytes: int | None, *callbacks: Any, **how: Any) -> _EvaluationRun:
        bench.limit(capacity_bytes)
        show(label, "evaluate", 0, _NUM_BATCHES)

        def advance(batch: int) -> None:
            show(label, "evaluate", batch, _NUM_BATCHES)

        try:
            done = _evaluate(settings, callbacks, advance, **how)
        finally:
            bench.settle()
        if done.phase is None:
            show(label, "eval", _NUM_BATCHES, _NUM_BATCHES)
        return done

    alone = run(_LABELS[0], None, prediction_loss_only=True)
    reference = run(_LABELS[1], None)
    capacity_bytes = alone.peak_bytes + 2 * _OUTPUT_BYTES
    stock = run(_LABELS[2], capacity_bytes)
    ours = run(_LABELS[3], capacity_bytes, _callback())
    different = different_values(reference.computed, ours.computed)
    return Report(
        case=NAME,
        device=bench.describe(),
        facts={
            "model": f"Qwen3 architecture, {_VOCABULARY_SIZE:,} tokens, fp32",
            "evaluation": f"{_NUM_BATCHES} batches of {_NUM_ROWS} x {_NUM_COLUMNS} bytes of text, "
            f"the logits of each are {format_bytes(_LOGITS_BYTES)}",
            "capacity": f"peak with losses alone + outputs of 2 batches = "
            f"{format_bytes(capacity_bytes)}",
        },
        rows=(
            _row(alone, _LABELS[0], None, None),
            _row(reference, _LABELS[1], None, None),
            _row(stock, _LABELS[2], capacity_bytes, None),
            _row(ours, _LABELS[3], capacity_bytes, not different),
        ),
        promises=_promises(alone, stock, ours, different),
        snippet=SNIPPET,
    )


def _promises(
    alone: _EvaluationRun, stock: _EvaluationRun, ours: _EvaluationRun, different: list[str]
) -> tuple[Promise, ...]:
    same = "logits, labels, metrics and the loss are equal bit for bit"
    if different:
        same = f"{len(different)} values differ, the first is {different[0]}"
    most_bytes = alone.peak_bytes + _OUTPUT_BYTES
    return (
        Promise(
            "finishes where the stock evaluation does not",
            stock.phase is not None and ours.phase is None,
            f"stock {_ending(stock)}; ours {_ending(ours)}",
        ),
        Promise("computes the same", not different, same),
        Promise(
            "holds the outputs of one batch at most",
            ours.peak_bytes <= most_bytes,
            f"peak {format_bytes(ours.peak_bytes)} <= {format_bytes(alone.peak_bytes)} with losses "
            f"alone + {format_bytes(_OUTPUT_BYTES)}",
        ),
    )


def _row(
    run: _EvaluationRun, label: str, capacity_bytes: int | None, identical: bool | None
) -> CaseRow:
    row = run.row(NAME, label, capacity_bytes, identical)
    return replace(row, heldout_loss=run.heldout_loss)


def _callback() -> object:
    from residency.integrations.transformers import ResidencyCallback

    return ResidencyCallback()


def _make_model(settings: Settings) -> Any:
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise RefusedError(
            f"The case runs Transformers, which cannot be imported ({error}). "
            "Install it with: pip install 'residency[demo]'"
        ) from error
    config = Qwen3Config(
        vocab_size=_VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        use_cache=False,
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]  # any configuration takes it
    )
    torch.manual_seed(settings.seed)
    return Qwen3ForCausalLM(config)


def _evaluate(
    settings: Settings,
    callbacks: tuple[Any, ...],
    advance: Callable[[int], None],
    *,
    prediction_loss_only: bool = False,
) -> _EvaluationRun:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run, started = _EvaluationRun(), time.perf_counter()
    model = _make_model(settings)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=folder,
                per_device_eval_batch_size=_NUM_ROWS,
                prediction_loss_only=prediction_loss_only,
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            # Transformers takes any sequence.
            eval_dataset=_texts(),  # pyright: ignore[reportArgumentType]
            compute_metrics=lambda found: _metrics(run, found),
            callbacks=[*callbacks, _make_watch(run, advance)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        _device.reset_peak()
        run.phase, run.step = "evaluate", 1
        try:
            metrics = trainer.evaluate()
            run.phase = run.step = None
        except torch.OutOfMemoryError as error:
            run.asked_bytes = asked_bytes(str(error))
            error.__traceback__ = None  # its frames hold the outputs
        run.peak_bytes = _device.max_memory_allocated()
        if run.phase is None:
            run.heldout_loss = metrics["eval_loss"]
            run.computed |= {"loss": run.heldout_loss, "right": metrics.get("eval_right")}
    run.seconds = time.perf_counter() - started
    return run


def _texts() -> list[dict[str, torch.Tensor]]:
    rows = heldout_batch(read_corpus(), rows=_NUM_BATCHES * _NUM_ROWS, columns=_NUM_COLUMNS)
    return [{"input_ids": row, "labels": row} for row in rows]


def _metrics(run: _EvaluationRun, found: Any) -> dict[str, float]:
    """Returns how many tokens are the likeliest ones, and keeps what it was given."""
    run.computed["logits"] = torch.from_numpy(found.predictions)
    run.computed["labels"] = torch.from_numpy(found.label_ids)
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"right": float(right.mean())}


def _make_watch(run: _EvaluationRun, advance: Callable[[int], None]) -> Any:
    """Returns a callback that notes how far the evaluation is."""
    import transformers

    class BatchCount(transformers.TrainerCallback):  # type: ignore[misc]  # follow_imports = skip
        """A callback that counts batches."""

        def on_prediction_step(self, *args: Any, **others: Any) -> None:
            run.step = (run.step or 0) + 1
            advance(run.step)

    return BatchCount()


def _ending(run: _EvaluationRun) -> str:
    if run.phase is None:
        return "finishes"
    return f"runs out of memory in {run.phase}, at batch {run.step} of {_NUM_BATCHES}"
