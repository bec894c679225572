"""One rank of two under Lightning's ModelParallelStrategy (FSDP2), on the simulator as CUDA.

Each rank is a node with one device; test_lightning.py reads what became of each case.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L  # noqa: N812 - as its users call it
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from same_values import assert_same
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from worker_cases import Cases, take_device

import residency
from residency.integrations.lightning import (
    ResidencyCallback,
    ResidencyCheckpointIO,
    ResidencyShardedStrategy,
    _sharded,
)

case = Cases()
RANK = int(sys.argv[1])
WIDTH = 64
MESH = {"data_parallel_size": 2, "tensor_parallel_size": 1}
ROWS = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(5))


class Strategy(ResidencyShardedStrategy, ModelParallelStrategy):
    """What a user writes."""


class StrategyOfFSDP1(ResidencyShardedStrategy, FSDPStrategy):
    """And for the older FSDP."""


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, 80), nn.Tanh(), nn.Linear(80, WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.notes: list[int] = []

    def configure_model(self) -> None:
        if not isinstance(self.body, FSDPModule):  # called again by each fit and test
            for layer in (self.body[0], self.body[2], self.body):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return (self.body(batch[0]) - batch[0]).square().mean()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.seen += 1
        self.notes.append(self.global_step)
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["notes"] = self.notes

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)


class Plain(Module):
    """Is for FSDP1, which wraps the layers itself."""

    def configure_model(self) -> None:
        pass


class Each(L.Callback):
    """Calls functions after every step, and after the last."""

    def __init__(self, step: Callable[[Any], Any], end: Callable[[], Any] = lambda: None) -> None:
        self.step, self.end = step, end

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.step(trainer)

    def on_train_end(self, *args: Any) -> None:
        self.end()


def loader() -> Any:
    return DataLoader(TensorDataset(ROWS), batch_size=4)  # an epoch is three steps on each rank


def make_trainer(kind: Any, callbacks: Any = (), *, epochs: int = 2, **settings: Any) -> Any:
    return L.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=2,
        strategy=kind(**({} if issubclass(kind, FSDPStrategy) else MESH), **settings),
        max_epochs=epochs,
        inference_mode=False,  # FSDP2 keeps buffers of an evaluation for the next training
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
    )


def fit(kind: Any, callbacks: Any = (), *, resume: Any = None, **more: Any) -> Any:
    trainer = make_trainer(kind, callbacks, **more)
    module = Plain() if issubclass(kind, FSDPStrategy) else Module()
    trainer.fit(module, loader(), ckpt_path=resume)
    return trainer


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of both ranks."""
    names: list[Any] = [None]
    with tempfile.TemporaryDirectory() as own:
        names[0] = own
        dist.broadcast_object_list(names, src=0)
        yield Path(names[0])
        dist.barrier()


@contextmanager
def held_writes() -> Iterator[threading.Event]:
    """Writes of this rank begin when the event is set."""
    let_go, stock = threading.Event(), _sharded._write

    def write(*args: Any) -> None:
        assert let_go.wait(60)
        stock(*args)

    _sharded._write = write
    try:
        yield let_go
    finally:
        let_go.set()
        _sharded._write = stock


def read(path: Path) -> Any:
    """The whole checkpoint, on the host."""
    return _load_distributed_checkpoint(path)


def ends(trainer: Any) -> list[Any]:
    """The shards of this rank at the end."""
    from residency._dtensor import local_of

    optimizer = trainer.optimizers[0]
    states = [
        {key: local_of(value).cpu() for key, value in sorted(optimizer.state[p].items())}
        for p in trainer.model.parameters()
    ]
    return [*(local_of(p.detach()).cpu() for p in trainer.model.parameters()), *states]


def saving_at(step: int, path: Path) -> Callable[[Any], Any]:
    return lambda trainer: trainer.global_step == step and trainer.save_checkpoint(path)


@case
def a_save_is_that_of_its_step_while_training_goes_on() -> None:
    with folder() as at:
        fit(ModelParallelStrategy, [Each(saving_at(2, at / "sync"))])
        expected = read(at / "sync")
        for offload in (False, {"bucket": "8KiB"}):
            with held_writes() as let_go:
                path = at / str(bool(offload))
                callbacks = [Each(saving_at(2, path), let_go.set)]
                trainer = fit(Strategy, [ResidencyCallback(offload=offload), *callbacks])
                assert trainer.global_step == 6
            assert_same(read(path), expected)


@case
def pending_saves_take_no_device_memory() -> None:
    seen: list[int] = []
    with folder() as at, held_writes() as let_go:

        def save_twice(trainer: Any) -> None:
            if trainer.global_step != 2:
                return
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            trainer.strategy.broadcast(at / "a")  # the path, which all ranks agree on
            seen.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            for name in ("a", "b"):
                trainer.save_checkpoint(at / name)
            seen.append(torch.cuda.max_memory_allocated())
            assert not list(at.glob("*/meta.pt"))
            let_go.set()

        fit(Strategy, [Each(save_twice)], max_in_flight=2)
        assert_same(read(at / "a"), read(at / "b"))
    assert seen[0] == seen[1] > 0, seen


@case
def a_run_resumes_to_the_bits_of_an_uninterrupted_one() -> None:
    whole = fit(ModelParallelStrategy)
    with folder() as at:
        for offload in (False, {"bucket": "8KiB"}):
            tools = [ResidencyCallback(offload=offload)]
            keep = ModelCheckpoint(at, str(bool(offload)), save_on_train_epoch_end=True)
            fit(Strategy, [*tools, keep], epochs=1)
            path = at / f"{bool(offload)}.ckpt"
            tools = [ResidencyCallback(offload=offload)]
            resumed = fit(Strategy, tools, resume=path)
            assert isinstance(resumed.optimizers[0], residency.OffloadedOptimizer) == bool(offload)
            assert_same(ends(resumed), ends(whole))
            # The strategy itself takes it, too.
            assert_same(ends(fit(ModelParallelStrategy, resume=path)), ends(whole))


@case
def a_load_never_has_the_state_of_the_optimizer_on_the_device() -> None:
    peaks: dict[bool, int] = {}
    with folder() as at:
        fit(Strategy, [Each(saving_at(2, at / "a"))], epochs=1)
        for offload in (False, True):

            class Look(L.Callback):
                def on_fit_start(self, *args: Any) -> None:
                    torch.cuda.synchronize()
                    self.before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()

                def on_train_start(self, *args: Any) -> None:
                    peaks[offload] = torch.cuda.max_memory_allocated() - self.before  # noqa: B023

            settings = {"bucket": "4KiB"} if offload else False
            fit(Strategy, [ResidencyCallback(offload=settings), Look()], resume=at / "a")
    shard_bytes = sum(p.numel() * 4 for p in Module().parameters()) // 2
    assert peaks[False] >= 2 * shard_bytes
    assert peaks[True] < shard_bytes


@case
def the_best_alone_is_left_where_one_is_asked_for() -> None:
    with folder() as at, held_writes() as let_go:
        keep = ModelCheckpoint(at, "{step}", save_top_k=1, every_n_train_steps=1)
        fit(Strategy, [keep, Each(lambda trainer: None, let_go.set)], max_in_flight=9)
        dist.barrier()
        assert [path.name for path in at.iterdir()] == ["step=6.ckpt"]


@case
def a_write_that_failed_on_one_rank_is_told_once_on_both() -> None:
    stock, calls = torch.save, []

    def fail_once(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("no room")
        stock(*args, **kwargs)

    told: list[Any] = []

    def save(trainer: Any) -> None:
        try:
            trainer.save_checkpoint(at / str(trainer.global_step))
        except residency.CheckpointError as error:
            told.append((trainer.global_step, "no room" in str(error)))

    with folder() as at:
        torch.save = fail_once  # by which rank 0 writes what is no shard
        try:
            fit(Strategy, [Each(save)])
        finally:
            torch.save = stock
        assert told == [(2, True)]
        whole = [path.name for path in sorted(at.iterdir()) if (path / "meta.pt").exists()]
        assert whole == ["2", "3", "4", "5", "6"]


@case
def what_one_rank_refuses_is_raised_on_both_at_that_call() -> None:
    told: list[Any] = []

    def save(trainer: Any) -> None:
        step = trainer.global_step
        if step == 1 and RANK == 1:
            trainer.lightning_module.notes.append(lambda: 0)  # what no file can hold
        try:
            trainer.save_checkpoint(at / str(step))
        except (residency.CheckpointError, residency.RefusedError) as error:
            told.append((step, type(error).__name__, "'notes'" in str(error)))
        if step == 1 and RANK == 1:
            trainer.lightning_module.notes.pop()

    with folder() as at:
        fit(Strategy, [Each(save)])
        dist.barrier()
        assert told == [(1, "RefusedError" if RANK == 1 else "CheckpointError", True)]
        whole = [path.name for path in sorted(at.iterdir()) if (path / "meta.pt").exists()]
        assert whole == ["2", "3", "4", "5", "6"]


@case
def a_load_waits_on_every_rank_for_the_file_that_one_rank_writes() -> None:
    let_go = threading.Event()

    class Held(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            assert let_go.wait(60)
            super().save_checkpoint(*args, **kwargs)

    with folder() as at:
        io = ResidencyCheckpointIO(Held())
        if RANK == 0:
            io.save_checkpoint({"a": torch.ones(2)}, at / "a")
            threading.Timer(0.3, let_go.set).start()
        assert torch.equal(io.load_checkpoint(at / "a")["a"], torch.ones(2))
        dist.barrier()
        io.teardown()


@case
def fit_twice_validate_and_test_the_best() -> None:
    with folder() as at:
        keep = ModelCheckpoint(at, "{step}", monitor="loss", save_top_k=2)
        trainer = make_trainer(Strategy, [keep, ResidencyCallback()])
        module = Module()
        trainer.fit(module, loader(), loader())
        trainer.validate(module, loader(), verbose=False)
        trainer.test(module, loader(), ckpt_path="best", verbose=False)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(), loader())
        assert trainer.global_step == 9
        assert len(list(at.iterdir())) == 2


@case
def a_whole_checkpoint_goes_the_strategy_s_own_way() -> None:
    with folder() as at:
        for kind in (ModelParallelStrategy, Strategy):
            path = at / kind.__name__
            fit(kind, [Each(saving_at(2, path))], save_distributed_checkpoint=False)
        dist.barrier()
        pair = [
            torch.load(at / kind, weights_only=False)
            for kind in ("ModelParallelStrategy", "Strategy")
        ]
        assert_same(*pair)


@case
def shards_of_fsdp1_are_written_in_the_background_and_resume_to_the_same_bits() -> None:
    form = {"state_dict_type": "sharded", "auto_wrap_policy": {nn.Linear}}
    whole = fit(FSDPStrategy, **form)
    with folder() as at:
        fit(FSDPStrategy, [Each(saving_at(2, at / "sync"))], **form)
        for offload in (False, {"bucket": "8KiB"}):
            with held_writes() as let_go:
                path = at / str(bool(offload))
                keep = ModelCheckpoint(at, path.name, save_on_train_epoch_end=True)
                tools = [ResidencyCallback(offload=offload), Each(lambda trainer: None, let_go.set)]
                each = Each(saving_at(2, path))
                fit(StrategyOfFSDP1, [*tools, each, keep], epochs=1, max_in_flight=2, **form)
            found, expected = read(path), read(at / "sync")
            assert found.pop("callbacks").keys() != expected.pop("callbacks").keys()
            assert_same(found, expected)
            path = at / f"{path.name}.ckpt"
            tools = [ResidencyCallback(offload=offload)]
            assert_same(ends(fit(StrategyOfFSDP1, tools, resume=path, **form)), ends(whole))
            assert_same(ends(fit(FSDPStrategy, resume=path, **form)), ends(whole))


@case
def a_strategy_that_writes_no_shards_is_refused() -> None:
    class Single(ResidencyShardedStrategy, SingleDeviceStrategy):
        pass

    with pytest.raises(residency.RefusedError, match=rf"lightning {L.__version__} has no shard"):
        Single("cuda:0")


def main(at: Path) -> None:
    take_device("1GiB", face="cuda", check_races=True)
    # Before the strategy, which would tie the group to a device; torch's meshes would then be made
    # by splitting NCCL's communicator, which the simulator's cannot.
    dist.init_process_group(
        "nccl", store=dist.FileStore(str(at / "store"), 2), rank=RANK, world_size=2
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.chdir(at)
    case.run(at / f"sharded{RANK}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[2]))
