"""Lightning's Trainer with this library's plugin and callback, and with the stock plugin beside it.

One process, in which the simulator is CUDA, for one of the two class trees; test_lightning.py reads
what became of each case.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from same_values import assert_same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worker_cases import Cases, pinned_bytes, take_device

case = Cases()
TREE = sys.argv[1] if len(sys.argv) > 1 else "lightning.pytorch"
L: Any = importlib.import_module(TREE)
FABRIC = "lightning.fabric" if TREE == "lightning.pytorch" else "lightning_fabric"
PLUGINS: Any = importlib.import_module(f"{FABRIC}.plugins")
STOCK: Any = importlib.import_module(f"{TREE}.plugins.io").AsyncCheckpointIO
ModelCheckpoint: Any = importlib.import_module(f"{TREE}.callbacks").ModelCheckpoint

import residency  # noqa: E402 - after the tree that it is to belong to
from residency.integrations.lightning import (  # noqa: E402
    ResidencyCallback,
    ResidencyCheckpointIO,
)

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


@case
def a_save_is_that_of_its_step_while_training_goes_on() -> None:
    for make in (torch.optim.AdamW, torch.optim.NAdam):
        with folder() as at:
            fit(callbacks=[saving_at(3, at / "sync")], make=make)
            for name, offload in (("ours", False), ("offloaded", {"bucket": "16KiB"})):
                base = Held()
                # The write begins three steps later.
                callbacks = [saving_at(3, at / name), AtTheEnd(base.let_go.set)]
                callbacks.append(ResidencyCallback(offload=offload))
                trainer = fit(ResidencyCheckpointIO(base), callbacks, make=make)
                assert trainer.global_step == 6
                assert_same(read(at / name), read(at / "sync"), name)
            assert len(read(at / "ours")["notes"]) == 3


@case
def what_callbacks_write_without_a_step_comes_after_the_copies() -> None:
    averages = importlib.import_module(f"{TREE}.callbacks").EMAWeightAveraging
    with folder() as at:
        for name, io in (("sync", None), ("ours", ResidencyCheckpointIO())):
            # Each save is followed by a validation, for which the averages are swapped in.
            keep = ModelCheckpoint(at / name, "{step}", save_top_k=-1, every_n_train_steps=2)
            trainer = make_trainer(io, [averages(decay=0.5), keep], val_check_interval=2)
            trainer.fit(Module(), loader(), loader())
        for step in (2, 4, 6):
            pair = [read(at / name / f"step={step}.ckpt") for name in ("ours", "sync")]
            for each in pair:
                [state] = [v for k, v in each["callbacks"].items() if "ModelCheckpoint" in k]
                state.clear()  # has the folder's name
            assert_same(*pair)


@case
def state_that_a_callback_writes_right_after_a_save_is_saved_as_it_was() -> None:
    def reset(trainer: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(path)
            for values in trainer.optimizers[0].state.values():
                values["exp_avg"].zero_()

    with folder() as at:
        for name, io in (("sync", None), ("ours", ResidencyCheckpointIO())):
            path = at / name
            fit(io, [Each(reset)])
        assert_same(read(at / "ours"), read(at / "sync"))


@case
def state_that_is_lent_to_a_save_may_be_assigned_and_a_write_in_place_is_told() -> None:
    class Begun(Held):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            begun.set()
            super().save_checkpoint(*args, **kwargs)

    def assign(trainer: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(path)
            for values in trainer.optimizers[0].state.values():
                values["exp_avg"] = torch.zeros_like(values["exp_avg"])

    def zero(trainer: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(at / "in place")
            assert begun.wait(60)
            trainer.optimizers[0].state[trainer.model.norm.weight]["exp_avg"].zero_()
            base.let_go.set()

    with folder() as at:
        for name, io in (("sync", None), ("ours", ResidencyCheckpointIO())):
            path = at / name
            fit(io, [ResidencyCallback(), Each(assign)])
        assert_same(read(at / "ours"), read(at / "sync"))
        base, begun = Begun(), threading.Event()
        with pytest.raises(residency.CheckpointError, match="offloaded optimizer was written"):
            fit(ResidencyCheckpointIO(base), [ResidencyCallback(), Each(zero)])
        assert not (at / "in place").exists()


@case
def pending_saves_take_no_device_memory() -> None:
    def grown(io: Any, base: Held) -> tuple[int, int, int]:
        seen: list[int] = []

        def save_three(trainer: Any) -> None:
            if trainer.global_step != 3:
                return
            torch.cuda.synchronize()
            seen.extend([torch.cuda.memory_allocated(), state_bytes(trainer)])
            torch.cuda.reset_peak_memory_stats()
            for index in range(3):
                trainer.save_checkpoint(at / f"{index}.ckpt")
            seen.extend([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()])
            base.let_go.set()

        fit(io, [Each(save_three)], steps=3)
        assert base.num_finished == 3
        before, num_bytes, after, peak = seen
        return after - before, peak - before, num_bytes

    with folder() as at:
        base = Held()
        held, _, num_bytes = grown(STOCK(base), base)
        assert held == 3 * num_bytes > 0
        base = Held()
        assert grown(ResidencyCheckpointIO(base, max_in_flight=3), base)[:2] == (0, 0)


@case
def saves_are_bounded_and_wait_for_room() -> None:
    checkpoint = {"state_dict": {"a": torch.arange(9.0, device="cuda")}}
    with folder() as at:
        base = Held()
        stock = STOCK(base)
        for index in range(5):
            stock.save_checkpoint(checkpoint, at / str(index))
        assert base.num_finished == 0  # five are pending
        base.let_go.set()
        stock.teardown()

        base = Held()
        io = ResidencyCheckpointIO(base, max_in_flight=2)
        for index in range(2):
            io.save_checkpoint(checkpoint, at / str(index))
        third = threading.Thread(target=io.save_checkpoint, args=(checkpoint, at / "2"))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        base.let_go.set()
        third.join()
        io.teardown()
        assert base.num_finished == 3


@case
def the_best_alone_is_left_where_one_is_asked_for() -> None:
    def names(wrap: Callable[..., Any]) -> list[str]:
        with folder() as at:
            base = Held()
            keep = ModelCheckpoint(at, "{step}", save_top_k=1, every_n_train_steps=1)
            fit(wrap(base), [keep, AtTheEnd(base.let_go.set)])
            return sorted(path.name for path in at.iterdir())

    assert len(names(STOCK)) == 6
    assert names(lambda base: ResidencyCheckpointIO(base, max_in_flight=9)) == ["step=6.ckpt"]


@case
def the_last_checkpoint_may_be_a_link_to_one_that_is_still_to_be_written() -> None:
    with folder() as at:
        base = Held()
        keep = ModelCheckpoint(at / "new", "{step}", save_last="link", every_n_train_steps=2)
        fit(ResidencyCheckpointIO(base, max_in_flight=9), [keep, AtTheEnd(base.let_go.set)])
        assert (at / "new" / "last.ckpt").is_symlink()
        assert read(at / "new" / "last.ckpt")["global_step"] == 6


@case
def tied_weights_stay_tied_in_a_file_as_small_as_a_synchronous_one() -> None:
    sizes, is_tied = {}, {}
    with folder() as at:
        ios = {"sync": None, "stock": STOCK(), "ours": ResidencyCheckpointIO()}
        for name, io in ios.items():
            fit(io, [saving_at(2, at / name)], steps=2)
            sizes[name] = (at / name).stat().st_size
            weights = read(at / name)["state_dict"]
            pair = [weights[f"{each}.weight"].data_ptr() for each in ("words", "out")]
            is_tied[name] = pair[0] == pair[1]
    weight_bytes = WORDS * WIDTH * 4
    assert is_tied == {"sync": True, "stock": False, "ours": True}
    assert sizes["stock"] >= sizes["sync"] + weight_bytes
    # "cpu" is a shorter word than "cuda:0", and entries begin at multiples of 64.
    assert abs(sizes["ours"] - sizes["sync"]) < weight_bytes // 100


@case
def a_write_that_failed_is_told_once_and_the_next_ones_work() -> None:
    class Failing(PLUGINS.TorchCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            if Path(path).name == "1":
                raise OSError("no room")
            super().save_checkpoint(checkpoint, path, storage_options)

    def run(io: Any, done: Callable[[], Any]) -> list[str]:
        told = []
        for name in ("0", "1", "2", "3", "4"):
            try:
                io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, at / name)
            except Exception as error:
                told.append(f"{name}: {type(error).__name__} {error}")
            done()
        return told

    with folder() as at:
        stock = STOCK(Failing())
        told = run(stock, lambda: stock._executor.submit(int).result())
        assert told == [f"{name}: OSError no room" for name in "234"]
        with pytest.raises(OSError, match="no room"):
            stock.teardown()
    with folder() as at:
        io = ResidencyCheckpointIO(Failing())
        told = run(io, io._writes.wait)
        expected = f"the checkpoint {at / '1'} could not be written: OSError: no room"
        assert told == [f"2: CheckpointError {expected}"], told
        io.teardown()
        assert sorted(path.name for path in at.iterdir()) == ["0", "2", "3", "4"]


@case
def a_failure_of_the_last_write_ends_fit_and_what_it_was_to_replace_is_kept() -> None:
    class Failing(PLUGINS.TorchCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            if checkpoint["global_step"] == 6:
                raise OSError("no room")
            super().save_checkpoint(checkpoint, path, storage_options)

    with folder() as at:
        io = ResidencyCheckpointIO(Failing())
        keep = ModelCheckpoint(at, "{step}", save_top_k=1, every_n_train_steps=1)
        with pytest.raises(residency.CheckpointError, match="no room") as caught:
            fit(io, [keep])
        assert isinstance(caught.value.__cause__, OSError)
        assert [path.name for path in at.iterdir()] == ["step=5.ckpt"]
        io.wait()  # it was told


@case
def an_error_of_training_is_not_hidden_by_a_failed_write() -> None:
    class Failing(PLUGINS.TorchCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no room")

    def stop(trainer: Any) -> None:
        trainer.save_checkpoint("a")
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        fit(ResidencyCheckpointIO(Failing()), [Each(stop)])
    assert any("no room" in note for note in caught.value.__notes__)
    # One that the caller is handling has nothing to do with it.
    try:
        raise KeyError
    except KeyError:
        with pytest.raises(residency.CheckpointError, match="no room"):
            fit(ResidencyCheckpointIO(Failing()), [saving_at(1, Path("a"))], steps=1)


@case
def fit_twice_validate_and_test_the_best_after_asynchronous_saves() -> None:
    def results(io: Any) -> list[Any]:
        with folder() as at:
            keep = ModelCheckpoint(at, "{step}", monitor="loss", save_top_k=2)
            trainer = make_trainer(io, [keep], steps=12)
            module = Module()
            found: list[Any] = []
            trainer.fit(module, loader(), loader())
            found.append(trainer.validate(module, loader(), verbose=False))
            found.append(trainer.test(module, loader(), ckpt_path="best", verbose=False))
            trainer.fit_loop.epoch_loop.max_steps = 18
            trainer.fit(module, loader(), loader())
            found.append(trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False))
            kept = sorted(at.iterdir())
            return [*found, [path.name for path in kept], [read(path) for path in kept]]

    expected, found = results(None), results(ResidencyCheckpointIO())
    for each in (expected, found):
        for checkpoint in each[-1]:
            [state] = [v for k, v in checkpoint["callbacks"].items() if "ModelCheckpoint" in k]
            state.clear()  # has the folder's name
    assert_same(found, expected)


@case
def a_user_s_own_plugin_does_the_writing_and_the_loading() -> None:
    calls: list[str] = []

    class Pickles(PLUGINS.CheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            assert threading.current_thread() is not threading.main_thread()
            calls.append(f"save {storage_options}")
            Path(path).write_bytes(pickle.dumps(checkpoint))

        def load_checkpoint(self, path: Any, map_location: Any = None, **kwargs: Any) -> Any:
            calls.append("load")
            return pickle.loads(Path(path).read_bytes())

        def remove_checkpoint(self, path: Any) -> None:
            calls.append("remove")
            Path(path).unlink()

        def teardown(self) -> None:
            calls.append("teardown")

    with folder() as at:
        io = ResidencyCheckpointIO(Pickles())
        trainer = make_trainer(io, steps=3)
        module = Module()
        trainer.fit(module, loader())
        trainer.save_checkpoint(at / "a", storage_options={"codec": 1})
        trainer.validate(module, loader(), ckpt_path=at / "a", verbose=False)
        trainer.strategy.remove_checkpoint(at / "a")
        io.wait()
        assert not (at / "a").exists()
    saves = ["teardown", "save {'codec': 1}", "load", "teardown", "remove"]
    assert calls == saves


@case
def a_run_resumes_to_the_bits_of_an_uninterrupted_one() -> None:
    def ends(trainer: Any) -> Any:
        return [trainer.model.state_dict(), trainer.optimizers[0].state_dict()]

    with folder() as at:
        whole = fit(steps=-1, max_epochs=2)
        for offload in (False, {"bucket": "16KiB"}):
            tools = [ResidencyCallback(offload=offload)]
            path = at / f"{bool(offload)}.ckpt"
            keep = ModelCheckpoint(at, path.stem, save_on_train_epoch_end=True)
            fit(ResidencyCheckpointIO(), [*tools, keep], steps=-1, max_epochs=1)
            tools = [ResidencyCallback(offload=offload)]
            more = {"resume": path, "steps": -1, "max_epochs": 2}
            resumed = fit(ResidencyCheckpointIO(), tools, **more)
            found = resumed.optimizers[0]
            assert isinstance(found, residency.OffloadedOptimizer) == bool(offload)
            assert_same(ends(resumed), ends(whole))
            # Without this library the file loads as any other.
            assert_same(ends(fit(**more)), ends(whole))


@case
def restored_state_of_an_offloaded_optimizer_is_never_on_the_device() -> None:
    levels: dict[bool, list[int]] = {}

    def look(trainer: Any) -> None:
        torch.cuda.synchronize()
        levels.setdefault(is_offloaded, []).append(torch.cuda.max_memory_allocated())

    class AtTheBeginning(L.Callback):  # type: ignore[misc]
        def on_fit_start(self, *args: Any) -> None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

        def on_train_start(self, trainer: Any, *args: Any) -> None:
            look(trainer)

    with folder() as at:
        fit(callbacks=[saving_at(3, at / "a")], steps=3)
        for is_offloaded in (False, True):
            callbacks = [ResidencyCallback(offload=is_offloaded), AtTheBeginning()]
            fit(None, callbacks, resume=at / "a", steps=4)
    [plain], [offloaded] = levels[False], levels[True]
    weight_bytes = (
        WORDS * WIDTH * 4
    )  # of a moment, too; Lightning moves each there and it goes home
    assert plain - offloaded >= weight_bytes


@case
def host_state_of_an_offloaded_optimizer_is_lent_and_not_copied() -> None:
    from residency._transfer import lending

    seen: dict[str, Any] = {}
    base = Held()
    io = ResidencyCheckpointIO(base)

    def look(trainer: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(at / "a")
            state = trainer.optimizers[0].state
            seen["lent"] = all(
                lending.is_lent(value)
                for values in state.values()
                for key, value in values.items()
                if key != "step"
            )
            seen["copied"] = io._arena.used_bytes
            base.let_go.set()

    with folder() as at:
        fit(io, [ResidencyCallback(), Each(look)], steps=4)
    assert seen["lent"]
    weights = [(WORDS * WIDTH, 1), (WIDTH, 4)]  # tied; of the norm, with its statistics
    scalars = 2 + 3  # steps of the norm and `seen`; `step` of each parameter
    most = sum(num * (-(-n * 4 // 512) * 512) for n, num in weights) + scalars * 512
    assert seen["copied"] <= most + 4096


@case
def memory_is_reused_from_save_to_save_and_given_back_at_the_end() -> None:
    from residency import _device

    io = ResidencyCheckpointIO()
    slabs: list[int] = []

    def look(trainer: Any) -> None:
        trainer.save_checkpoint(at / "a")
        slabs.append(io._arena.slab_bytes)

    with folder() as at:
        _device.release_pinned_cache()
        before = pinned_bytes(with_cached=True)
        fit(io, [Each(look)])
        _device.release_pinned_cache()  # what torch keeps for reuse
        after = pinned_bytes(with_cached=True)
        assert after == before, (before, after)
    # The first has no state of the optimizer to save but that of one step.
    assert len(slabs) == 6
    assert set(slabs) == {slabs[0]}


@case
def unusual_values_are_frozen_as_torch_save_keeps_them() -> None:
    shared = torch.arange(12.0, device="cuda")
    strange: dict[str, Any] = {
        "view": shared[2:6],
        "whole": shared,
        "columns": shared.view(3, 4).t(),
        "parameter": nn.Parameter(shared.clone(), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "module": nn.Linear(2, 2).cuda(),
        "kind": torch.ones(3, device="cuda").as_subclass(Kind),
        "sparse": torch.eye(3).to_sparse(),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 1, torch.qint8),
        "meta": torch.empty(2, device="meta"),
        "bf16": torch.ones(3, dtype=torch.bfloat16, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "function": make_trainer,
        "optimizer_states": [{"state": {0: {"sparse": torch.eye(2).to_sparse()}, 1: None}}],
        "path": Path("a"),
        "state_dict": nn.Linear(2, 2).cuda().state_dict(),
    }
    strange["again"] = [strange["view"], strange["parameter"]]
    seen: list[Any] = []

    class Keeping(PLUGINS.TorchCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            seen.append(checkpoint)
            super().save_checkpoint(checkpoint, path)

    with folder() as at:
        PLUGINS.TorchCheckpointIO().save_checkpoint(strange, at / "sync")
        io = ResidencyCheckpointIO(Keeping())
        io.save_checkpoint(strange, at / "ours")
        shared.fill_(-1)
        strange["module"].weight.data.fill_(-1)
        io.teardown()
        found, expected = read(at / "ours"), read(at / "sync")
    for both in (found, expected):
        both["module"] = both["module"].state_dict()
        both["sparse"] = both["sparse"].to_dense()
        state = both["optimizer_states"][0]["state"]
        state[0] = state[0]["sparse"].to_dense()
        both["conj"] = both["conj"].resolve_conj()
        both["quantized"] = both["quantized"].int_repr()
        assert type(both.pop("kind")) is Kind
        assert both.pop("meta").is_meta
    assert_same(found, expected)
    assert found["view"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()
    assert found["again"][0] is found["view"]
    assert seen[0]["parameter"].device.type == "cpu"
    assert list(found["state_dict"]._metadata) == [""]


@case
def attributes_of_tensors_are_in_the_file() -> None:
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    tensor = torch.zeros(2, device="cuda")
    parameter.notes, tensor.other = ["a"], parameter  # type: ignore[attr-defined]
    with folder() as at:
        io = ResidencyCheckpointIO()
        io.save_checkpoint({"p": parameter, "t": tensor, "again": parameter}, at / "a")
        parameter.notes.append("b")  # type: ignore[attr-defined]
        io.teardown()
        found = read(at / "a")
    assert found["p"].notes == ["a"]
    assert found["p"] is found["again"]
    assert found["t"].other is found["p"]


@case
def what_no_file_can_hold_is_refused_by_its_name() -> None:
    with folder() as at:
        io = ResidencyCheckpointIO()
        with pytest.raises(residency.RefusedError, match=r"'lock' .*cannot pickle"):
            io.save_checkpoint({"a": 1, "lock": threading.Lock()}, at / "a")
        io.save_checkpoint({"a": 1}, at / "b")
        io.teardown()
        assert [path.name for path in at.iterdir()] == ["b"]


@case
def what_pickle_can_not_find_again_is_refused_at_the_call_too() -> None:
    class Local:
        pass

    with folder() as at:
        io = ResidencyCheckpointIO()
        for value in (lambda: 0, Local, Local(), os):
            with pytest.raises(residency.RefusedError, match="'mine' "):
                io.save_checkpoint({"a": 1, "mine": [value]}, at / "a")
        io.teardown()
        assert list(at.iterdir()) == []


@case
def bad_plugins_are_refused_with_the_version() -> None:
    version = L.__version__.replace(".", r"\.")
    with pytest.raises(residency.InvalidArgumentError, match=f"builtins.str.*{version}"):
        ResidencyCheckpointIO("a")
    for one in (STOCK(), ResidencyCheckpointIO()):
        with pytest.raises(residency.RefusedError, match=f"saves in the background.*{version}"):
            ResidencyCheckpointIO(one)
    for number in (0, True, "2"):
        with pytest.raises(residency.InvalidArgumentError, match=f"max_in_flight is {number!r}"):
            ResidencyCheckpointIO(max_in_flight=number)


@case
def bad_settings_of_the_callback_are_refused() -> None:
    for wrong, message in (
        ({"offload": {"buckets": 1}}, "buckets; expected"),
        ({"offload": 3}, "offload is 3"),
        ({"phases": 1}, "phases is 1"),
    ):
        with pytest.raises(residency.InvalidArgumentError, match=message):
            ResidencyCallback(**wrong)
    trainer = make_trainer(callbacks=[ResidencyCallback(), ResidencyCallback()])
    module = Module()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(residency.RefusedError, match=rf"2 .*{L.__version__}.*pass one"):
        trainer.fit(module, loader())
    assert trainer.optimizers == []
    assert_same(module.state_dict(), before)


@case
def a_hook_that_a_version_lacks_is_named_with_it() -> None:
    from residency.integrations.lightning import _trees

    for what, base in ((ResidencyCallback, "callback"), (ResidencyCheckpointIO, "checkpoint_io")):
        with pytest.raises(residency.RefusedError, match=rf"{L.__version__} has no .*on_the_moon"):
            _trees.in_trees(what, base, "on_the_moon")


@case
def an_optimizer_that_is_offloaded_already_is_taken_as_it_is() -> None:
    def make(*args: Any, **kwargs: Any) -> Any:
        return residency.offload_optimizer(torch.optim.AdamW(*args, **kwargs), bucket="16KiB")

    trainer = fit(None, [ResidencyCallback(offload={"bucket": "1MiB"})], make=make)
    assert "16.00 KiB" in repr(trainer.optimizers[0]) or "16 KiB" in repr(trainer.optimizers[0])


@case
def optimizers_are_offloaded_all_or_none() -> None:
    class Two(Module):
        def configure_optimizers(self) -> Any:
            first = torch.optim.AdamW(self.norm.parameters())
            return [first, torch.optim.LBFGS(self.words.parameters())]

        def training_step(self, *args: Any) -> None:
            raise AssertionError

        automatic_optimization = False

    trainer = make_trainer(callbacks=[ResidencyCallback()])
    with pytest.raises(residency.RefusedError) as caught:
        trainer.fit(Two(), loader())
    assert L.__version__ in caught.value.__notes__[0]
    assert [type(each) for each in trainer.optimizers] == [torch.optim.AdamW, torch.optim.LBFGS]


@case
def the_parts_of_the_loop_are_phases() -> None:
    with folder() as at:
        keep = ModelCheckpoint(at, "{step}", save_top_k=1, every_n_train_steps=2)
        with residency.record(at / "run.jsonl", calls=False):
            trainer = make_trainer(ResidencyCheckpointIO(), [ResidencyCallback(), keep])
            trainer.fit(Module(), loader(), loader())
            trainer.test(ckpt_path=keep.best_model_path, dataloaders=loader(), verbose=False)
        lines = [json.loads(line) for line in (at / "run.jsonl").read_text().splitlines()]
    ended = [line["phase"] for line in lines if line["kind"] == "end"]
    counts = {name: ended.count(name) for name in ended}
    assert counts == {
        "fit/validation": 2,  # once to check
        "fit/train_step": 6,
        "fit/save": 3,
        "fit": 1,
        "test/load": 1,
        "test": 1,
    }


@case
def an_out_of_memory_error_is_explained() -> None:
    from residency._memory._phase import open_phases

    class Large(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step(batch, index) + torch.empty(1 << 40, device="cuda").sum()

    for phases in (True, False):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            make_trainer(callbacks=[ResidencyCallback(phases=phases)]).fit(Large(), loader())
        [note] = caught.value.__notes__
        assert ("in the phase 'fit/train_step'" in note) == phases
        assert "the largest:" in note
        assert open_phases() == ()


@case
def what_the_launchers_copy_is_as_it_was_made() -> None:
    base = PLUGINS.TorchCheckpointIO()
    io = copy.deepcopy(ResidencyCheckpointIO(base, max_in_flight=3))
    assert isinstance(io, ResidencyCheckpointIO)
    assert isinstance(io, PLUGINS.CheckpointIO)
    assert (io._writes.max_in_flight, type(io.checkpoint_io)) == (3, type(base))
    callback = pickle.loads(pickle.dumps(ResidencyCallback(offload={"slots": 2}, phases=False)))
    assert isinstance(callback, L.Callback)
    assert (callback.offload, callback.phases) == ({"slots": 2}, False)


class Named(ResidencyCheckpointIO):
    """What a user derives."""

    def __init__(self, name: str) -> None:
        super().__init__(max_in_flight=2)
        self.name = name


class Tagged(ResidencyCallback):
    """What a user derives."""

    def __init__(self, tag: str) -> None:
        super().__init__(phases=False)
        self.tag = tag


@case
def what_users_derive_is_copied_with_what_it_has() -> None:
    for copied in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        io = copied(Named("a"))
        assert isinstance(io, Named)
        assert isinstance(io, PLUGINS.CheckpointIO)
        assert (io.name, io._writes.max_in_flight) == ("a", 2)
        callback = copied(Tagged("b"))
        assert isinstance(callback, Tagged)
        assert isinstance(callback, L.Callback)
        assert (callback.tag, callback.offload, callback.phases) == ("b", True, False)
    with folder() as at:
        fit(io, [callback, saving_at(1, at / "a")], steps=1)
        assert (at / "a").exists()


@case
def without_the_integration_everything_is_stock() -> None:
    with folder() as at:
        fit(callbacks=[saving_at(3, at / "before")], steps=3)
        fit(ResidencyCheckpointIO(), [ResidencyCallback()], steps=3)
        trainer = fit(callbacks=[saving_at(3, at / "after")], steps=3)
        assert_same(read(at / "after"), read(at / "before"))
        fit(STOCK(), [saving_at(3, at / "stock")], steps=3)
        assert_same(read(at / "stock"), read(at / "before"))
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    assert type(trainer.strategy.checkpoint_io) is PLUGINS.TorchCheckpointIO
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            kinds = [each for each in vars(module).values() if isinstance(each, type)]
            for kind in [each for each in kinds if each.__module__ == name]:
                ours = [v for v in vars(kind).values() if callable(v)]
                names = {getattr(value, "__module__", None) or "" for value in ours}
                assert not any(each.startswith("residency") for each in names), kind


@case
def the_other_tree_is_left_alone() -> None:
    other = "pytorch_lightning" if TREE == "lightning.pytorch" else "lightning"
    assert other not in sys.modules
    bases = {each.__module__.partition(".")[0] for each in type(ResidencyCallback()).__mro__}
    assert bases == {TREE.partition(".")[0], "residency", "builtins"}


def main(at: Path) -> None:
    take_device("1GiB", face="cuda", check_races=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the framework's advice to its users
    os.chdir(at)
    case.run(at / "outcomes.json")
    # Python ends with this save under way.
    trainer = fit(steps=1)
    trainer.strategy.checkpoint_io = ResidencyCheckpointIO()
    trainer.save_checkpoint(at / "last.ckpt")


if __name__ == "__main__":
    main(Path(sys.argv[2]))
