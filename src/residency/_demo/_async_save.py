"""The case "async-save": Lightning saves every step to a disk that is slower than the steps.

The stock plugin clones the whole checkpoint on the device for every save that is pending. The
capacity is what training takes with synchronous saves, plus one and a half such clones. Real
Lightning runs on all sides; each writes with Lightning's own ``TorchCheckpointIO``, to a disk that
ends a write when training comes to a later save. No clock decides: a busy machine shows the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from residency._demo._corpus import read_corpus, training_batch
from residency._demo._frame import CaseRun, FrameMaker, Words
from residency._demo._model import count_parameters, imported, make_model
from residency._demo._report import Promise, Report
from residency._demo._settings import MIDDLING, Settings
from residency._units import format_bytes

WORDS = Words(
    snippet="""\
from residency.integrations.lightning import ResidencyCheckpointIO
trainer = Trainer(plugins=[ResidencyCheckpointIO()])    # instead of AsyncCheckpointIO()""",
    fits="finishes where AsyncCheckpointIO does not",
    same="saves the same",
)
_NUM_SAVES = 6
_STATE_COPIES = 3  # parameters, and AdamW's two moments
_SAVED = ("state_dict", "optimizer_states", "global_step")  # of a file, what is compared


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

    def let_all_end(self, *_: object) -> None:
        """Ends all writes, as training is over, or has failed."""
        self._ended.release(2 * _NUM_SAVES)

    def wait(self) -> None:
        """Waits, in the thread that writes, until a write may end."""
        self._ended.acquire()


def run(make_frame: FrameMaker, settings: Settings) -> Report:
    """Trains with synchronous saves, with the stock plugin and with ours, and compares."""
    plugins = imported("lightning.pytorch.plugins.io")
    writer: Any = plugins.TorchCheckpointIO

    class Disk(writer):  # type: ignore[misc]  # any version's
        """A disk that is slower than the steps, as a shared file system is."""

        def __init__(self, pace: _Pace) -> None:
            super().__init__()
            self._pace = pace

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            self._pace.wait()
            super().save_checkpoint(*args, **kwargs)

    frame = make_frame(WORDS, _NUM_SAVES)
    train = partial(_train, settings=settings)
    at_once = partial(train, make_plugin=Disk, saves_behind=0)
    frame.warm_up(at_once)
    reference = frame.run("synchronous, no limit", at_once)
    num_parameters = count_parameters(MIDDLING)
    clone_bytes = 4 * _STATE_COPIES * num_parameters
    capacity_bytes = reference.peak_bytes + clone_bytes + clone_bytes // 2
    behind = partial(
        train, make_plugin=lambda pace: plugins.AsyncCheckpointIO(Disk(pace)), saves_behind=2
    )
    stock = frame.run("AsyncCheckpointIO", behind, capacity_bytes)
    from residency.integrations.lightning import ResidencyCheckpointIO

    behind = partial(
        train, make_plugin=lambda pace: ResidencyCheckpointIO(Disk(pace)), saves_behind=1
    )
    ours = frame.run("ResidencyCheckpointIO", behind, capacity_bytes)
    return frame.report(
        reference,
        f"the {_NUM_SAVES} files and losses are those of synchronous saves, bit for bit",
        {
            "model": f"Qwen3 architecture, {num_parameters:,} parameters in fp32, AdamW",
            "saves": f"{_NUM_SAVES}, one a step, {format_bytes(clone_bytes)} each; the disk "
            "is one save behind, and two with AsyncCheckpointIO, which does not wait for it",
            "capacity": "peak with synchronous saves + 1.5 checkpoints = "
            f"{format_bytes(capacity_bytes)}",
        },
        Promise(
            "pending saves take no device memory",
            ours.peak_bytes <= reference.peak_bytes,
            f"peak {format_bytes(ours.peak_bytes)} <= {format_bytes(reference.peak_bytes)} of "
            f"synchronous saves; stock {format_bytes(stock.peak_bytes)}",
        ),
    )


def _train(
    run: CaseRun, settings: Settings, make_plugin: Callable[[_Pace], Any], saves_behind: int
) -> None:
    lightning, pace = imported("lightning.pytorch"), _Pace(saves_behind=saves_behind)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run.enter("train")
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.folder,
        plugins=[make_plugin(pace)],
        callbacks=[
            lightning.callbacks.LambdaCallback(
                on_train_end=pace.let_all_end, on_exception=pace.let_all_end
            )
        ],
    )
    corpus, rows, columns = read_corpus(), settings.num_rows, settings.num_columns
    batches: Any = [
        training_batch(corpus, seed=settings.seed, step=step, rows=rows, columns=columns)
        for step in range(1, _NUM_SAVES + 1)
    ]
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(_make_module(run, settings.seed, pace), loader)
    saves = {}
    for step in range(1, _NUM_SAVES + 1):
        file = torch.load(run.folder / f"{step}.ckpt", map_location="cpu")
        saves[str(step)] = {name: file[name] for name in _SAVED}
    run.computed = {"losses": run.losses, "saves": saves}


def _make_module(run: CaseRun, seed: int, pace: _Pace) -> Any:
    """Returns Lightning's module, which notes in ``run`` how far it is."""

    class Model(imported("lightning.pytorch").LightningModule):  # type: ignore[misc]  # any version's
        """A model that trains on text, and saves after every step."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model(MIDDLING, seed=seed)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            run.enter("training step", index + 1)
            loss: torch.Tensor = self.inner(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            run.losses.append(outputs["loss"].item())
            run.enter("save", index + 1)
            pace.save_begins(index + 1)
            self.trainer.save_checkpoint(run.folder / f"{index + 1}.ckpt")

    return Model()
