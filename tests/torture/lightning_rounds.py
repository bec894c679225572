"""Random runs of Lightning's real Trainer, stock and with this library's plugin and callback."""

from __future__ import annotations

import os
import random
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L  # noqa: N812 - as everybody names it
import torch
from framework_lab import (
    StopError,
    assert_same,
    listing,
    offload_settings,
    optimizer_picture,
    random_states,
)
from lightning.pytorch import callbacks as stock_callbacks
from lightning.pytorch.plugins.io import TorchCheckpointIO
from random_states import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from warm_process import Log

import residency
from residency import sim
from residency.integrations.lightning import ResidencyCallback, ResidencyCheckpointIO

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.01, total_steps=99, cycle_momentum=False
    ),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}
WIDTH, WORDS = 16, 60


class Module(L.LightningModule):  # type: ignore[misc]
    """Ties weights, draws random numbers on the device, and changes buffers in forward."""

    def __init__(self, plan: dict[str, Any], offload: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.plan, self.offload = plan, offload
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(plan["dropout"])
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        if plan["tied"]:
            self.out.weight = self.words.weight
        self.inner.bias.requires_grad_(not plan["frozen"])
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.automatic_optimization = not plan["manual"]
        self.losses: list[torch.Tensor] = []
        self.notes: list[int] = []

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.words(rows[:, :-1]).mean(1))
        hidden = self.inner(self.drop(hidden)).relu()
        return nn.functional.cross_entropy(self.out(hidden), rows[:, -1])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.seen += 1
        self.notes.append(self.global_step)
        loss = self.loss(batch[0])
        if self.plan["infinite"] is not None and self.global_step == self.plan["infinite"]:
            loss = loss * float("inf")
        self.losses.append(loss.detach().clone())
        if not self.automatic_optimization:
            self.step_by_hand(loss, index)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def step_by_hand(self, loss: torch.Tensor, index: int) -> None:
        """Steps one optimizer after every batch, and the other after every second."""
        self.manual_backward(loss)
        for place, optimizer in enumerate(self.optimizers()):
            if index % (place + 1) == 0:
                optimizer.step()
                optimizer.zero_grad()
        for schedule in self.lr_schedulers() or []:
            schedule.step()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val", self.loss(batch[0]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["notes"] = self.notes

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.notes = list(checkpoint["notes"])

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": parameters[:2]}]
        groups.append({"params": parameters[2:], "lr": 3e-3})
        if self.plan["manual"]:
            return [self.optimizer_of([group]) for group in groups]
        return self.optimizer_of(groups)

    def optimizer_of(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        optimizer = OPTIMIZERS[self.plan["optimizer"]](groups)
        if self.offload is not None:
            residency.offload_optimizer(optimizer, **self.offload)
        if self.plan["scheduler"] is None:
            return {"optimizer": optimizer}
        schedule: dict[str, Any] = {
            "scheduler": SCHEDULERS[self.plan["scheduler"]](optimizer),
            "interval": self.plan["interval"],
        }
        if self.plan["scheduler"] == "plateau":
            schedule |= {"monitor": "loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Slow(TorchCheckpointIO):  # type: ignore[misc]
    """Writes when the next batch is over, or a moment later where none comes."""

    def __init__(self) -> None:
        self.batch_is_over = threading.Event()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.batch_is_over.clear()
        self.batch_is_over.wait(0.1)
        super().save_checkpoint(*args, **kwargs)


class Watch(L.Callback):  # type: ignore[misc]
    """Stops a run in its midst, and notes the generators at its end."""

    def __init__(self, stop: int | None, base: Any) -> None:
        self.stop, self.base = stop, base
        self.count = 0
        self.generators: dict[str, Any] = {}

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1
        if isinstance(self.base, Slow):
            self.base.batch_is_over.set()
        self.generators = random_states()
        if self.count == self.stop:
            raise StopError


def draw(chance: random.Random) -> dict[str, Any]:
    """Draws what both sides have in common."""
    plan = draw_any(chance)
    if plan["manual"]:  # what Lightning takes with optimization by hand
        plan |= {"accumulate": 1, "clip": None, "average": None}
        plan["scheduler"] = None if plan["scheduler"] == "plateau" else plan["scheduler"]
    return plan


def draw_any(chance: random.Random) -> dict[str, Any]:
    precision = chance.choice(["32-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true"])
    every = chance.choice([1, 2, 3])
    return {
        "seed": chance.randrange(1 << 30),
        "precision": precision,
        "optimizer": chance.choice(list(OPTIMIZERS)),
        "scheduler": chance.choice([None, *SCHEDULERS]),
        "interval": chance.choice(["step", "epoch"]),
        "dropout": chance.choice([0.0, 0.3]),
        "tied": chance.random() < 0.5,
        "frozen": chance.random() < 0.3,
        "infinite": chance.choice([None, 1, 2]) if precision == "16-mixed" else None,
        "accumulate": chance.choice([1, 1, 2, 3]),
        "clip": chance.choice([None, None, ("norm", 0.5), ("value", 0.01)]),
        "shuffle": chance.random() < 0.6,
        "rows": chance.choice([12, 20, 23]),
        "batch": chance.choice([4, 5]),
        "epochs": chance.choice([2, 3]),
        "validate": chance.choice([None, 1, 2]),
        "every": every,
        "top": chance.choice([-1, 1, 2]),
        "monitor": chance.random() < 0.4,
        "last": chance.choice([None, True, "link"]),
        "weights only": chance.random() < 0.1,
        "average": chance.choice([None, None, None, "ema", "swa"]),
        "manual": chance.random() < 0.2,
        "on exception": chance.random() < 0.2,
        "at epoch end": chance.random() < 0.2,
    }


def draw_ours(chance: random.Random) -> dict[str, Any]:
    """Draws how this library is put in."""
    where = chance.choice(["callback", "callback", "configure", "both", "none"])
    return {
        "where": where,
        "offload": offload_settings(chance),
        "io": chance.random() < 0.85,
        "in flight": chance.choice([1, 1, 2, 3]),
        "base": chance.choice([None, TorchCheckpointIO, Slow, Slow]),
        "phases": chance.random() < 0.7,
        "park": chance.random() < 0.5,
    }


def callbacks_of(plan: dict[str, Any], ours: dict[str, Any] | None) -> list[Any]:
    found: list[Any] = []
    if plan["average"] == "ema":
        found.append(stock_callbacks.EMAWeightAveraging(decay=0.5))
    if plan["average"] == "swa":
        found.append(stock_callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1))
    if plan["on exception"]:
        found.append(stock_callbacks.OnExceptionCheckpoint("saves", "failed"))
    monitored = {"monitor": "loss"} if plan["monitor"] else {}
    found.append(
        stock_callbacks.ModelCheckpoint(
            "saves",
            "{epoch}-{step}",
            every_n_train_steps=plan["every"],
            save_top_k=plan["top"] if plan["monitor"] else min(plan["top"], 1),
            save_last=plan["last"],
            save_weights_only=plan["weights only"],
            save_on_train_epoch_end=plan["at epoch end"] or None,
            **monitored,
        )
    )
    if ours is not None and ours["where"] != "none":
        offload = ours["offload"] if ours["where"] in ("callback", "both") else False
        found.append(
            ResidencyCallback(
                offload=offload, phases=ours["phases"], park_in_validation=ours["park"]
            )
        )
    return found


def rows_of(plan: dict[str, Any]) -> Any:
    generator = torch.Generator().manual_seed(plan["seed"])
    return TensorDataset(torch.randint(0, WORDS, (plan["rows"], 6), generator=generator))


def fit(
    plan: dict[str, Any],
    ours: dict[str, Any] | None,
    root: Path,
    name: str,
    *,
    stop: int | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Trains in a folder that is renamed at the end; returns all that a run leaves in memory."""
    work = root / "work"
    work.mkdir()
    os.chdir(work)
    L.seed_everything(plan["seed"], verbose=False)
    within = ours is not None and ours["where"] in ("configure", "both")
    module = Module(plan, ours["offload"] if ours is not None and within else None)
    base = ours["base"]() if ours is not None and ours["base"] is not None else None
    watch = Watch(stop, base)
    plugins: list[Any] = []
    if ours is not None and ours["io"]:
        plugins.append(ResidencyCheckpointIO(base, max_in_flight=ours["in flight"]))
    clip = plan["clip"]
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=plan["epochs"],
        precision=plan["precision"],
        accumulate_grad_batches=plan["accumulate"],
        gradient_clip_algorithm=clip and clip[0],
        gradient_clip_val=clip and clip[1],
        val_check_interval=plan["validate"],
        check_val_every_n_epoch=None if plan["validate"] else 1,
        limit_val_batches=1 if plan["validate"] else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        plugins=plugins,
        callbacks=[watch, *callbacks_of(plan, ours)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=work,
    )
    rows = rows_of(plan)
    loader = DataLoader(rows, batch_size=plan["batch"], shuffle=plan["shuffle"])
    was_stopped = False
    error = None
    try:
        trainer.fit(
            module, loader, DataLoader(rows, batch_size=8), ckpt_path=resume, weights_only=False
        )
    except StopError:
        was_stopped = True
    except Exception as raised:  # both sides raise the same, or one of them is wrong
        error = raised
        traceback.print_exc()
    if ours is not None and ours["io"]:
        trainer.strategy.checkpoint_io.wait()
    if isinstance(error, (residency.ResidencyError, sim.RaceError)):
        raise error
    torch.cuda.synchronize()
    schedules = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
    precision = trainer.precision_plugin.state_dict()
    picture = {
        "stopped": was_stopped,
        "count": watch.count,
        "step": trainer.global_step,
        "error": error and repr(error),
        "module": module,
        "losses": module.losses,
        "notes": module.notes,
        "schedules": schedules,
        "precision": precision,
        "metrics": dict(trainer.callback_metrics),
        "then": watch.generators,
        "now": random_states(),
        "loops": trainer.fit_loop.state_dict(),
        "best": [
            each.best_model_path
            for each in trainer.checkpoint_callbacks
            if isinstance(each, stock_callbacks.ModelCheckpoint)
        ],
    }
    found = digest(picture)
    for index, optimizer in enumerate(trainer.optimizers):
        found |= {f"optimizer {index} {k}": v for k, v in optimizer_picture(optimizer).items()}
    os.chdir(root)
    work.rename(root / name)
    return found


def file_picture(path: Path) -> dict[str, Any]:
    found = torch.load(path, map_location="cpu", weights_only=False)
    return digest(found)


def assert_same_files(mine: Path, theirs: Path) -> list[str]:
    """Compares what stock tools list and read; returns the names of the checkpoints."""
    names = listing(mine)
    assert names == listing(theirs), (names, listing(theirs))
    for name in names:
        assert_same(file_picture(mine / name), file_picture(theirs / name), name)
    return [name for name in names if name.endswith(".ckpt")]


def lightning_round(chance: random.Random, root: Path, log: Log) -> None:
    warnings.simplefilter("ignore")  # the framework's advice to its users
    plan, ours = draw(chance), draw_ours(chance)
    batches = -(-plan["rows"] // plan["batch"]) * plan["epochs"]
    stop = chance.choice([None, chance.randint(1, batches)])
    log("plan", plan=repr(plan), ours=repr(ours), stop=stop)
    theirs = fit(plan, None, root, "stock", stop=stop)
    mine = fit(plan, ours, root, "ours", stop=stop)
    assert_same(mine, theirs, "the run")
    names = assert_same_files(root / "ours", root / "stock")
    if not names or plan["weights only"]:
        return
    if plan["optimizer"] == "NAdam" and plan["precision"] == "bf16-true":
        return  # torch rounds `mu_product` to bf16 as it loads; an offloaded NAdam keeps it
    name = chance.choice(names)
    log("resume", name=name)
    resumed = fit(plan, None, root, "stock again", resume=root / "stock" / name)
    whose = chance.choice(["ours", "stock"])
    other = draw_ours(chance)
    side = chance.choice([ours, other, None if whose == "ours" else other])
    log("resume by", whose=whose, side=repr(side))
    again = fit(plan, side, root, "ours again", resume=root / whose / name)
    assert_same(again, resumed, "the resumed run")
    assert_same_files(root / "ours again", root / "stock again")
