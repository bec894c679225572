"""The case "best-adapter": the Trainer reloads the best LoRA adapter when training is over.

PEFT reads the whole adapter file onto the device first, beside the parameters that it goes into.
The adapter here trains the embedding too, so that its file has the embedding's weights, as PEFT
saves it. The capacity is a formula: the frozen weights, four times the trained ones (weights,
gradients, AdamW's two moments), and seven eighths of the embedding for activations. Training fits
in it; the stock reload does not. Real Transformers and PEFT run on all sides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from residency._demo._corpus import read_corpus, training_batch
from residency._demo._frame import CaseRun, FrameMaker, Words
from residency._demo._identity import different_values
from residency._demo._model import as_samples, imported, make_model, make_trainer
from residency._demo._report import Promise, Report
from residency._demo._settings import ModelShape, Settings
from residency._units import format_bytes

_RELOAD = "_load_best_model"
WORDS = Words(
    snippet="""\
from residency.integrations.transformers import ResidencyCallback
trainer = Trainer(..., callbacks=[ResidencyCallback()])""",
    fits="finishes where the stock reload does not",
    fails_in=_RELOAD,
    fails="runs out of memory in {phase}, after the last step",
)
_NUM_STEPS = 2
_NUM_ROWS, _NUM_COLUMNS = 2, 16
_SHAPE = ModelShape(
    num_layers=2,
    hidden_size=960,
    intermediate_size=240,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocabulary_size=16_000,
)
_EMBEDDING_BYTES = 4 * _SHAPE.vocabulary_size * _SHAPE.hidden_size


def run(make_frame: FrameMaker, settings: Settings) -> Report:
    """Trains without a limit, stock under the capacity, and with the callback under it."""
    frame = make_frame(WORDS, _NUM_STEPS)
    sizes = {True: 0, False: 0}
    for parameter in _make_model(settings.seed).parameters():
        sizes[parameter.requires_grad] += parameter.nbytes
    capacity_bytes = sizes[False] + 4 * sizes[True] + _EMBEDDING_BYTES * 7 // 8
    train = partial(_train, seed=settings.seed)
    reference = frame.run("Trainer, no limit", train)
    frame.run("Trainer", train, capacity_bytes)
    from residency.integrations.transformers import ResidencyCallback

    guarded = partial(train, callbacks=(ResidencyCallback(bucket="1MiB"),))
    ours = frame.run("Trainer, ResidencyCallback", guarded, capacity_bytes)
    file_bytes = [value.nbytes for value in reference.found["file"].values()]
    file, reload_bytes = ours.found.get("file", {}), ours.found.get("reload")
    return frame.report(
        reference,
        f"{len(reference.computed['adapter'])} tensors of the adapter and all losses are equal bit "
        "for bit",
        {
            "model": "Qwen3 architecture, LoRA of rank 8 on attention and the embedding: frozen "
            f"{format_bytes(sizes[False])}, trained {format_bytes(sizes[True])}, adapter file "
            f"{format_bytes(sum(file_bytes))}",
            "steps": f"{_NUM_STEPS} of {_NUM_ROWS} x {_NUM_COLUMNS} bytes of text, evaluated and "
            "saved after each, best one loaded at the end",
            "capacity": f"frozen + 4 x trained + 7/8 embedding = {format_bytes(capacity_bytes)}",
        },
        Promise(
            "the adapter in the model is the file's",
            bool(file) and not different_values(file, ours.computed["adapter"]),
            f"{len(file)} tensors of the best checkpoint compared",
        ),
        Promise(
            "the reload takes no more device memory than the largest tensor",
            reload_bytes is not None and reload_bytes <= max(file_bytes),
            f"{format_bytes(reload_bytes or 0)} <= {format_bytes(max(file_bytes))}; stock, without "
            f"a limit, {format_bytes(reference.found['reload'])}",
        ),
    )


def _make_model(seed: int) -> Any:
    peft = imported("peft")
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "embed_tokens"])
    return peft.get_peft_model(make_model(_SHAPE, seed=seed), lora)


def _train(run: CaseRun, seed: int, callbacks: tuple[object, ...] = ()) -> None:
    corpus = read_corpus()

    def texts(step: int) -> list[dict[str, Any]]:
        rows = training_batch(corpus, seed=seed, step=step, rows=4, columns=_NUM_COLUMNS)
        return as_samples(rows)

    trainer = make_trainer(
        run,
        _make_model(seed),
        settings={
            "max_steps": _NUM_STEPS,
            "learning_rate": 1e-3,
            "per_device_train_batch_size": _NUM_ROWS,
            "per_device_eval_batch_size": _NUM_ROWS,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_steps": 1,
            "save_only_model": True,
            "load_best_model_at_end": True,
            "prediction_loss_only": True,
            "seed": seed,
        },
        train_dataset=texts(1),
        eval_dataset=texts(2),
        callbacks=list(callbacks),
    )
    stock: Callable[[], None] = getattr(trainer, _RELOAD)

    def reload() -> None:
        run.enter(_RELOAD, _NUM_STEPS)
        run.losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        run.found["reload"] = run.growth_of(stock)

    setattr(trainer, _RELOAD, reload)
    run.enter("train", 1)
    trainer.train()
    file = imported("safetensors.torch").load_file(
        Path(trainer.state.best_model_checkpoint, "adapter_model.safetensors")
    )
    state = imported("peft").get_peft_model_state_dict(trainer.model)
    adapter = {name: state[name].detach().cpu() for name in file}
    run.found["file"], run.computed = file, {"losses": run.losses, "adapter": adapter}
