"""What the cases of lightning_worker.py share: a module, trainers, and a plugin that can be held.

It imports the class tree that the process is for, and comes before the library, which goes by what
is imported.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worker_cases import Cases

case = Cases()
TREE = sys.argv[1] if len(sys.argv) > 1 else "lightning.pytorch"
L: Any = importlib.import_module(TREE)
FABRIC = "lightning.fabric" if TREE == "lightning.pytorch" else "lightning_fabric"
PLUGINS: Any = importlib.import_module(f"{FABRIC}.plugins")
STOCK: Any = importlib.import_module(f"{TREE}.plugins.io").AsyncCheckpointIO
ModelCheckpoint: Any = importlib.import_module(f"{TREE}.callbacks").ModelCheckpoint
WIDTH, WORDS = 64, 300
ROWS = torch.randint(0, WORDS, (24, 8), generator=torch.Generator().manual_seed(5))


class Module(L.LightningModule):  # type: ignore[misc]
    """Ties its weights, changes buffers in forward, and keeps notes that are no tensors."""

    def __init__(self, make: Callable[..., Any] = torch.optim.AdamW) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(()))
        self.make = make
        self.notes: list[Any] = []

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.words(rows[:, :-1]).mean(1))
        return nn.functional.cross_entropy(self.out(hidden), rows[:, -1])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        assert batch[0].is_cuda
        self.seen += 1
        self.notes.append({"step": self.global_step})
        return self.loss(batch[0])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", self.loss(batch[0]))

    test_step = validation_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["notes"] = self.notes

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Kind(torch.Tensor):
    """A subclass that means nothing."""


class Held(PLUGINS.TorchCheckpointIO):  # type: ignore[misc]
    """Writes when it is let go."""

    def __init__(self, *, is_held: bool = True) -> None:
        self.let_go = threading.Event()
        self.num_finished = 0
        if not is_held:
            self.let_go.set()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.let_go.wait(60)
        super().save_checkpoint(*args, **kwargs)
        self.num_finished += 1


class Each(L.Callback):  # type: ignore[misc]
    """Calls a function after every step."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self.call = call

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.call(trainer)


class AtTheEnd(L.Callback):  # type: ignore[misc]
    """Calls a function after the last step."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_train_end(self, *args: Any) -> None:
        self.call()


def loader() -> Any:
    return DataLoader(TensorDataset(ROWS), batch_size=4)  # an epoch is six steps


def make_trainer(
    io: Any = None, callbacks: Any = (), *, steps: int = 6, folder: Any = None, **more: Any
) -> Any:
    return L.Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=steps,
        plugins=[] if io is None else [io],
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        default_root_dir=folder,
        **more,
    )


def fit(*args: Any, make: Any = torch.optim.AdamW, resume: Any = None, **kwargs: Any) -> Any:
    trainer = make_trainer(*args, **kwargs)
    trainer.fit(Module(make), loader(), ckpt_path=resume)
    return trainer


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def saving_at(step: int, path: Path) -> Each:
    return Each(lambda trainer: trainer.global_step == step and trainer.save_checkpoint(path))


def state_bytes(trainer: Any) -> int:
    """The device bytes of a checkpoint's tensors, as Lightning's own copies of them take."""
    from torch.utils._pytree import tree_leaves

    found = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return sum(
        -(-value.numel() * value.element_size() // 512) * 512
        for value in tree_leaves(found)
        if isinstance(value, torch.Tensor) and value.is_cuda
    )
