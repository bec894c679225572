"""Saves behind training: their moment, their memory, their order and what becomes of failures."""

from __future__ import annotations

import importlib
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_lab import (
    PLUGINS,
    STOCK,
    TREE,
    WIDTH,
    WORDS,
    AtTheEnd,
    Each,
    Held,
    ModelCheckpoint,
    Module,
    case,
    fit,
    folder,
    loader,
    make_trainer,
    read,
    saving_at,
    state_bytes,
)
from same_values import assert_same

import residency
from residency.integrations.lightning import (
    ResidencyCallback,
    ResidencyCheckpointIO,
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
def a_disk_that_fills_up_leaves_the_file_of_before_and_none_that_is_half_written() -> None:
    clouds = importlib.import_module(PLUGINS.TorchCheckpointIO.save_checkpoint.__module__)
    save = clouds._atomic_save

    def save_half(checkpoint: Any, path: Any) -> None:
        save(checkpoint, path)
        half = Path(path).read_bytes()[:100]
        Path(path).write_bytes(half)
        raise OSError(28, "No space left on device")

    with folder() as at:
        io = ResidencyCheckpointIO()
        io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, at / "a.ckpt")
        io.wait()
        clouds._atomic_save = save_half
        try:
            for name in ("a.ckpt", "b.ckpt"):
                io.save_checkpoint({"state_dict": {"a": torch.zeros(3)}}, at / name)
                with pytest.raises(residency.CheckpointError, match="No space left"):
                    io.wait()
        finally:
            clouds._atomic_save = save
        assert [path.name for path in at.iterdir()] == ["a.ckpt"]
        assert bool((read(at / "a.ckpt")["state_dict"]["a"] == 1).all())
        io.teardown()


@case
def a_save_inside_of_a_save_is_there_when_it_returns() -> None:
    """As in Lightning's handler of the signal by which Slurm says that the job is to end."""
    with folder() as at:
        io = ResidencyCheckpointIO()

        class Rings:
            def __getstate__(self) -> dict[str, Any]:
                io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, at / "inner.ckpt")
                found.append(read(at / "inner.ckpt")["state_dict"]["a"].tolist())
                return {}

        found: list[Any] = []
        rings = Rings()
        with pytest.raises(residency.RefusedError, match="Rings"):  # a class of a function
            io.save_checkpoint({"rings": rings}, at / "outer.ckpt")
        assert found
        assert all(each == [1.0] * 3 for each in found)
        io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, at / "next.ckpt")
        io.teardown()
        assert sorted(path.name for path in at.iterdir()) == ["inner.ckpt", "next.ckpt"]


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
