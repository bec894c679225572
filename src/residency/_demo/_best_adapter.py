"""The case "best-adapter": the Trainer reloads the best LoRA adapter when training is over.

PEFT reads the whole adapter file onto the device first, beside the parameters that it goes into.
The adapter here trains the embedding too, so that its file has the embedding's weights, as PEFT
saves it. The capacity is a formula: the frozen weights, four times the trained ones (weights,
gradients, AdamW's two moments), and seven eighths of the embedding for activations. Training fits
in it; the stock reload does not. Real Transformers and PEFT run on all sides.
"""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from residency import _device
from residency._demo._bench import Bench
from residency._demo._corpus import read_corpus, training_batch
from residency._demo._identity import different_values
from residency._demo._names import BEST_ADAPTER as NAME
from residency._demo._progress import Show
from residency._demo._report import LimitedRun, Promise, Report
from residency._demo._settings import Settings
from residency._demo._training import asked_bytes
from residency._errors import RefusedError
from residency._units import format_bytes

SNIPPET = """\
from residency.integrations.transformers import ResidencyCallback
trainer = Trainer(..., callbacks=[ResidencyCallback()])"""

_NUM_STEPS = 2
_NUM_ROWS, _NUM_COLUMNS = 2, 16
_VOCABULARY_SIZE, _HIDDEN_SIZE = 16_000, 960
_LABELS = ("Trainer, no limit", "Trainer", "Trainer, ResidencyCallback")
_RELOAD = "_load_best_model"


@dataclass(kw_only=True)
class _AdapterRun(LimitedRun):
    """The figures of one run."""

    adapter: dict[str, torch.Tensor] = field(default_factory=dict)
    file: dict[str, torch.Tensor] = field(default_factory=dict)
    reload_bytes: int | None = None


@dataclass
class _Sizes:
    """The bytes of the model's parts."""

    frozen: int
    trained: int
    embedding: int

    @property
    def capacity(self) -> int:
        return self.frozen + 4 * self.trained + self.embedding * 7 // 8


def run_best_adapter(bench: Bench, settings: Settings, show: Show) -> Report:
    """Trains without a limit, stock under the capacity, and with the callback under it.

    Raises:
        RefusedError: Transformers or PEFT is not installed.
    """
    sizes = _measure(_make_model(settings))

    def callback() -> object:
        from residency.integrations.transformers import ResidencyCallback

        return ResidencyCallback(bucket="1MiB")

    def run(label: str, capacity_bytes: int | None, *callbacks: Any) -> _AdapterRun:
        bench.limit(capacity_bytes)
        show(label, "train", 1, _NUM_STEPS)
        try:
            done = _train(settings, callbacks)
        finally:
            bench.settle()
        if done.phase is None:
            show(label, "eval", _NUM_STEPS, _NUM_STEPS)
        return done

    reference = run(_LABELS[0], None)
    stock = run(_LABELS[1], sizes.capacity)
    ours = run(_LABELS[2], sizes.capacity, callback())
    different = different_values(_computed(reference), _computed(ours))
    return Report(
        case=NAME,
        device=bench.describe(),
        facts={
            "model": "Qwen3 architecture, LoRA of rank 8 on attention and the embedding: frozen "
            f"{format_bytes(sizes.frozen)}, trained {format_bytes(sizes.trained)}, adapter file "
            f"{format_bytes(sum(value.nbytes for value in reference.file.values()))}",
            "steps": f"{_NUM_STEPS} of {_NUM_ROWS} x {_NUM_COLUMNS} bytes of text, evaluated and "
            "saved after each, best one loaded at the end",
            "capacity": f"frozen + 4 x trained + 7/8 embedding = {format_bytes(sizes.capacity)}",
        },
        rows=(
            reference.row(NAME, _LABELS[0], None, None),
            stock.row(NAME, _LABELS[1], sizes.capacity, None),
            ours.row(NAME, _LABELS[2], sizes.capacity, not different),
        ),
        promises=_promises(reference, stock, ours, different),
        snippet=SNIPPET,
    )


def _promises(
    reference: _AdapterRun, stock: _AdapterRun, ours: _AdapterRun, different: list[str]
) -> tuple[Promise, ...]:
    largest = max(value.nbytes for value in reference.file.values())
    same = f"{len(ours.adapter)} tensors of the adapter and all losses are equal bit for bit"
    if different:
        same = f"{len(different)} values differ, the first is {different[0]}"
    is_file = bool(ours.file) and not different_values(ours.file, ours.adapter)
    return (
        Promise(
            "finishes where the stock reload does not",
            stock.phase == _RELOAD and ours.phase is None,
            f"stock {_ending(stock)}; ours {_ending(ours)}",
        ),
        Promise("computes the same", not different, same),
        Promise(
            "the adapter in the model is the file's",
            is_file,
            f"{len(ours.file)} tensors of the best checkpoint compared",
        ),
        Promise(
            "the reload takes no more device memory than the largest tensor",
            ours.reload_bytes is not None and ours.reload_bytes <= largest,
            f"{format_bytes(ours.reload_bytes or 0)} <= {format_bytes(largest)}; stock, without a "
            f"limit, {format_bytes(reference.reload_bytes or 0)}",
        ),
    )


def _make_model(settings: Settings) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise RefusedError(
            f"The case runs Transformers and PEFT, of which one cannot be imported ({error}). "
            "Install them with: pip install 'residency[demo]'"
        ) from error
    config = Qwen3Config(
        vocab_size=_VOCABULARY_SIZE,
        hidden_size=_HIDDEN_SIZE,
        intermediate_size=_HIDDEN_SIZE // 4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]  # any configuration takes it
    )
    torch.manual_seed(settings.seed)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "embed_tokens"])
    return get_peft_model(Qwen3ForCausalLM(config), lora)


def _measure(model: torch.nn.Module) -> _Sizes:
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes
    return _Sizes(sizes[False], sizes[True], 4 * _VOCABULARY_SIZE * _HIDDEN_SIZE)


def _train(settings: Settings, callbacks: tuple[Any, ...]) -> _AdapterRun:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run, started = _AdapterRun(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = transformers.Trainer(
            model=_make_model(settings),
            args=_arguments(folder, settings),
            # Transformers takes any sequence.
            train_dataset=_texts(settings, 1),  # pyright: ignore[reportArgumentType]
            eval_dataset=_texts(settings, 2),  # pyright: ignore[reportArgumentType]
            callbacks=list(callbacks),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        _watch_reload(trainer, run)
        _device.reset_peak()
        try:
            trainer.train()
        except torch.OutOfMemoryError as error:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            run.phase = _RELOAD if _RELOAD in frames else "training"
            run.step = _NUM_STEPS
            run.asked_bytes = asked_bytes(str(error))
            error.__traceback__ = None  # its frames hold the model
        run.peak_bytes = max(run.peak_bytes, _device.max_memory_allocated())
        run.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if run.phase is None:
            run.file, run.adapter = _read_both(trainer)
    run.seconds = time.perf_counter() - started
    return run


def _watch_reload(trainer: object, run: _AdapterRun) -> None:
    """Notes the device bytes that the reload takes beside what there is."""
    stock: Callable[[], None] = getattr(trainer, _RELOAD)

    def reload() -> None:
        run.peak_bytes = _device.max_memory_allocated()
        _device.reset_peak()
        before = _device.memory_allocated()
        stock()
        run.reload_bytes = _device.max_memory_allocated() - before

    setattr(trainer, _RELOAD, reload)


def _arguments(folder: str, settings: Settings) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        max_steps=_NUM_STEPS,
        learning_rate=1e-3,
        per_device_train_batch_size=_NUM_ROWS,
        per_device_eval_batch_size=_NUM_ROWS,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_only_model=True,
        load_best_model_at_end=True,
        prediction_loss_only=True,
        report_to="none",
        disable_tqdm=True,
        seed=settings.seed,
        dataloader_pin_memory=False,
    )


def _texts(settings: Settings, step: int) -> list[dict[str, torch.Tensor]]:
    rows = training_batch(
        read_corpus(), seed=settings.seed, step=step, rows=4, columns=_NUM_COLUMNS
    )
    return [{"input_ids": row, "labels": row} for row in rows]


def _read_both(trainer: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the adapter in the best checkpoint's file, and that in the model."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    best = Path(trainer.state.best_model_checkpoint)
    file: dict[str, torch.Tensor] = load_file(best / "adapter_model.safetensors")
    state = get_peft_model_state_dict(trainer.model)
    return file, {name: state[name].detach().cpu() for name in file}


def _computed(run: _AdapterRun) -> dict[str, object]:
    return {"losses": run.losses, "adapter": run.adapter}


def _ending(run: _AdapterRun) -> str:
    if run.phase is None:
        return "finishes"
    return f"runs out of memory in {run.phase}, after the last step"
