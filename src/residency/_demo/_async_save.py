"""The case "async-save": Lightning saves every step to a disk that is slower than the steps.

The stock plugin clones the whole checkpoint on the device for every save that is pending. The
capacity is what training takes with synchronous saves, plus one and a half such clones. Real
Lightning runs on all sides; each writes with Lightning's own ``TorchCheckpointIO``, to a disk that
ends a write when training comes to a later save. No clock decides: a busy machine shows the same.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
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
from residency._demo._names import ASYNC_SAVE as NAME
from residency._demo._progress import Show
from residency._demo._report import LimitedRun, Promise, Report
from residency._demo._settings import ModelShape, Settings
from residency._demo._training import asked_bytes, make_model
from residency._errors import RefusedError
from residency._units import format_bytes

SNIPPET = """\
from residency.integrations.lightning import ResidencyCheckpointIO
trainer = Trainer(plugins=[ResidencyCheckpointIO()])    # instead of AsyncCheckpointIO()"""

_NUM_SAVES = 6
_SHAPE = ModelShape(
    num_layers=6,
    hidden_size=256,
    intermediate_size=768,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_STATE_COPIES = 3  # parameters, and AdamW's two moments
_LABELS = ("synchronous, no limit", "AsyncCheckpointIO", "ResidencyCheckpointIO")


@dataclass(kw_only=True)
class _SavingRun(LimitedRun):
    """The figures of one run."""

    saves: dict[int, Any] = field(default_factory=dict)
    num_parameters: int = 0


class _Pace:
    """The pace of the disk: it ends a write as the save begins that is so many after it.

    ``ResidencyCheckpointIO`` lets a save wait for the write before it, so its disk is one save
    behind. ``AsyncCheckpointIO`` waits for none, so that its disk can be two behind.
    """

    def __init__(self, *, saves_behind: int) -> None:
        self._behind = saves_behind
        self._ended = threading.Semaphore(0)

    def save_begins(self, step: int) -> None:
        """Ends a write where the training asks for the save of ``step``."""
        if step > self._behind:
            self._ended.release()

    def let_all_end(self) -> None:
        """Ends all writes, as training is over, or has failed."""
        self._ended.release(2 * _NUM_SAVES)

    def wait(self) -> None:
        """Waits, in the thread that writes, until a write may end."""
        self._ended.acquire()


def run_async_save(bench: Bench, settings: Settings, show: Show) -> Report:
    """Trains with synchronous saves, with the stock plugin and with ours, and compares.

    Raises:
        RefusedError: Lightning is not installed, or it cannot use this device.
    """
    disk, stock_io = _plugins()

    def run(
        label: str, plugin: Callable[[_Pace], Any], capacity_bytes: int | None, pace: _Pace
    ) -> _SavingRun:
        bench.limit(capacity_bytes)
        show(label, "train", 0, _NUM_SAVES)
        try:
            done = _train(
                settings, plugin(pace), pace, lambda step: show(label, "save", step, _NUM_SAVES)
            )
        finally:
            bench.settle()
        if done.phase is None:
            show(label, "eval", _NUM_SAVES, _NUM_SAVES)
        return done

    def ours_io(pace: _Pace) -> Any:
        from residency.integrations.lightning import ResidencyCheckpointIO

        return ResidencyCheckpointIO(disk(pace))

    fast = _Pace(saves_behind=0)
    fast.let_all_end()
    _train(settings, disk(fast), fast, lambda step: None)  # libraries take what they keep
    bench.mark_empty()
    reference = run(_LABELS[0], disk, None, fast)
    clone_bytes = 4 * _STATE_COPIES * reference.num_parameters
    capacity_bytes = reference.peak_bytes + clone_bytes + clone_bytes // 2
    stock = run(
        _LABELS[1], lambda pace: stock_io(disk(pace)), capacity_bytes, _Pace(saves_behind=2)
    )
    ours = run(_LABELS[2], ours_io, capacity_bytes, _Pace(saves_behind=1))
    different = different_values(_computed(reference), _computed(ours))
    return Report(
        case=NAME,
        device=bench.describe(),
        facts=_facts(reference, clone_bytes, capacity_bytes),
        rows=(
            reference.row(NAME, _LABELS[0], None, None),
            stock.row(NAME, _LABELS[1], capacity_bytes, None),
            ours.row(NAME, _LABELS[2], capacity_bytes, not different),
        ),
        promises=_promises(reference, stock, ours, different),
        snippet=SNIPPET,
    )


def _promises(
    reference: _SavingRun, stock: _SavingRun, ours: _SavingRun, different: list[str]
) -> tuple[Promise, ...]:
    same = f"the {len(ours.saves)} files and losses are those of synchronous saves, bit for bit"
    if different:
        same = f"{len(different)} values differ, the first is {different[0]}"
    return (
        Promise(
            "finishes where AsyncCheckpointIO does not",
            stock.phase is not None and ours.phase is None,
            f"stock {_ending(stock)}; ours {_ending(ours)}",
        ),
        Promise("saves the same", not different, same),
        Promise(
            "pending saves take no device memory",
            ours.peak_bytes <= reference.peak_bytes,
            f"peak {format_bytes(ours.peak_bytes)} <= {format_bytes(reference.peak_bytes)} of "
            f"synchronous saves; stock {format_bytes(stock.peak_bytes)}",
        ),
    )


def _plugins() -> tuple[Callable[[_Pace], Any], Callable[[Any], Any]]:
    """Returns Lightning's plain writer to a slow disk, and its asynchronous plugin."""
    try:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
    except ImportError as error:
        raise RefusedError(
            f"The case runs Lightning, which cannot be imported ({error}). Install it with: "
            "pip install 'residency[demo]'"
        ) from error

    class Disk(TorchCheckpointIO):  # type: ignore[misc]  # follow_imports = skip
        """A disk that is slower than the steps, as a shared file system is."""

        def __init__(self, pace: _Pace) -> None:
            super().__init__()
            self._pace = pace

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            self._pace.wait()
            super().save_checkpoint(*args, **kwargs)

    return Disk, AsyncCheckpointIO


def _train(
    settings: Settings, plugin: Any, pace: _Pace, advance: Callable[[int], None]
) -> _SavingRun:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import LambdaCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run, started = _SavingRun(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _make_module(run, settings, Path(folder), pace, advance)
        ends = LambdaCallback(
            on_train_end=lambda *ignored: pace.let_all_end(),
            on_exception=lambda *ignored: pace.let_all_end(),
        )
        trainer = lightning.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            plugins=[plugin],
            callbacks=[ends],
        )
        loader: Any = torch.utils.data.DataLoader(_batches(settings), batch_size=None)  # type: ignore[arg-type]
        _device.reset_peak()
        try:
            trainer.fit(model, loader)
            run.phase = run.step = None
        except torch.OutOfMemoryError as error:
            run.asked_bytes = asked_bytes(str(error))
            error.__traceback__ = None  # its frames hold the model
        run.peak_bytes = _device.max_memory_allocated()
        if run.phase is None:
            run.saves = {
                step: torch.load(Path(folder, f"{step}.ckpt"), map_location="cpu")
                for step in range(1, _NUM_SAVES + 1)
            }
    run.seconds = time.perf_counter() - started
    return run


def _batches(settings: Settings) -> list[torch.Tensor]:
    corpus, shape = read_corpus(), (settings.num_rows, settings.num_columns)
    return [
        training_batch(corpus, seed=settings.seed, step=step, rows=shape[0], columns=shape[1])
        for step in range(1, _NUM_SAVES + 1)
    ]


def _make_module(
    run: _SavingRun,
    settings: Settings,
    folder: Path,
    pace: _Pace,
    advance: Callable[[int], None],
) -> Any:
    """Returns Lightning's module, which notes in ``run`` how far it is."""
    import lightning.pytorch as lightning

    class Model(lightning.LightningModule):  # type: ignore[misc]  # follow_imports = skip
        """A model that trains on text, and saves after every step."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model(_SHAPE, seed=settings.seed, num_columns=settings.num_columns)
            run.num_parameters = sum(parameter.numel() for parameter in self.parameters())

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            run.phase, run.step = "training step", index + 1
            loss: torch.Tensor = self.inner(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            run.losses.append(outputs["loss"].item())
            advance(index + 1)
            run.phase = "save"
            pace.save_begins(index + 1)
            self.trainer.save_checkpoint(folder / f"{index + 1}.ckpt")

    return Model()


def _computed(run: _SavingRun) -> dict[str, Any]:
    saves = {
        str(step): {name: save[name] for name in ("state_dict", "optimizer_states", "global_step")}
        for step, save in run.saves.items()
    }
    return {"losses": run.losses, "saves": saves}


def _facts(reference: _SavingRun, clone_bytes: int, capacity_bytes: int) -> dict[str, str]:
    return {
        "model": f"Qwen3 architecture, {reference.num_parameters:,} parameters in fp32, AdamW",
        "saves": f"{_NUM_SAVES}, one a step, {format_bytes(clone_bytes)} each; the disk "
        "is one save behind, and two with AsyncCheckpointIO, which does not wait for it",
        "capacity": "peak with synchronous saves + 1.5 checkpoints = "
        f"{format_bytes(capacity_bytes)}",
    }


def _ending(run: _SavingRun) -> str:
    if run.phase is None:
        return "finishes"
    return f"runs out of memory in the {run.phase} of step {run.step}"
