"""Runs that resume, an offloaded optimizer, settings, phases, and what is left alone."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from typing import Any

import pytest
import torch
from lightning_lab import (
    PLUGINS,
    STOCK,
    TREE,
    WIDTH,
    WORDS,
    Each,
    Held,
    L,
    ModelCheckpoint,
    Module,
    case,
    fit,
    folder,
    loader,
    make_trainer,
    read,
    saving_at,
)
from same_values import assert_same
from worker_cases import pinned_bytes

import residency
from residency.integrations.lightning import (
    ResidencyCallback,
    ResidencyCheckpointIO,
)


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
    from residency import _pinned

    io = ResidencyCheckpointIO()
    slabs: list[int] = []

    def look(trainer: Any) -> None:
        trainer.save_checkpoint(at / "a")
        slabs.append(io._arena.slab_bytes)

    with folder() as at:
        _pinned.release_pinned_cache()
        before = pinned_bytes(with_cached=True)
        fit(io, [Each(look)])
        _pinned.release_pinned_cache()  # what torch keeps for reuse
        after = pinned_bytes(with_cached=True)
        assert after == before, (before, after)
    # The first has no state of the optimizer to save but that of one step.
    assert len(slabs) == 6
    assert set(slabs) == {slabs[0]}


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


@case
def a_validation_has_the_room_of_the_state_and_the_run_the_bits_of_a_stock_one() -> None:
    states: list[tuple[bool, bool]] = []

    def note(trainer: Any) -> None:
        (optimizer,) = trainer.optimizers
        values = [state["exp_avg"] for state in optimizer.state.values()]
        states.append((trainer.validating or trainer.sanity_checking, values[0].is_cuda))

    class Looks(L.Callback):  # type: ignore[misc]
        def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
            note(trainer)

        def on_save_checkpoint(self, trainer: Any, *args: Any) -> None:
            note(trainer)

    def run(at: Any, *tools: Any) -> Any:
        trainer = make_trainer(
            callbacks=[*tools, ModelCheckpoint(at)],
            val_check_interval=2,
            num_sanity_val_steps=0,
            folder=at,
        )
        trainer.fit(Module(), loader(), loader())
        return [trainer.model.state_dict(), trainer.optimizers[0].state_dict()]

    with folder() as at:
        expected = run(at / "stock")
        found = run(at / "ours", ResidencyCallback(offload=False, park_in_validation=True), Looks())
    assert_same(found, expected)
    validated = [is_there for _, is_there in states[:6]]
    assert validated == [False] * 6
    assert states[6][1], "a save has the state on the device"


@case
def a_validation_that_fails_leaves_the_state_on_the_device_and_the_error_as_it_was() -> None:
    seen: list[bool] = []

    class Fails(L.Callback):  # type: ignore[misc]
        def on_validation_batch_end(self, *args: Any) -> None:
            raise ValueError("of the test")

        def on_exception(self, trainer: Any, *args: Any) -> None:  # before Lightning moves it
            seen.extend(s["exp_avg"].is_cuda for s in trainer.optimizers[0].state.values())

    trainer = make_trainer(
        callbacks=[ResidencyCallback(offload=False, park_in_validation=True), Fails()],
        val_check_interval=2,
        num_sanity_val_steps=0,
    )
    with pytest.raises(ValueError, match="of the test") as caught:
        trainer.fit(Module(), loader(), loader())
    assert caught.traceback[-1].name == "on_validation_batch_end"
    assert seen
    assert all(seen)
