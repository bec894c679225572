"""A restore is checked whole before a byte moves, says what all its attempts changed, and goes on
to a newer save where a writer took the one away that it was reading.
"""

from __future__ import annotations

import copy
import random
import weakref

import pytest
import torch
from torch import nn

import residency
from residency import CheckpointError, CorruptSaveError, RefusedError
from residency._checkpoint import _rng
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._job import Ranks


@pytest.fixture
def checkpointer(tmp_path):
    with residency.Checkpointer(tmp_path) as made:
        yield made


def damage(checkpointer, step, name):
    with open(checkpointer._directory.path / f"step-{step:08d}" / name, "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x01")


@pytest.mark.filterwarnings("ignore:.*An older save is tried")
def test_a_refusal_after_a_damaged_save_says_what_was_changed(checkpointer):
    checkpointer.save(1, {"x": torch.ones(3000)})
    checkpointer.save(2, {"x": torch.full((3000,), 2.0), "z": torch.ones(1)}).wait()
    damage(checkpointer, 2, "x.safetensors")
    state = {"x": torch.zeros(3000), "z": torch.zeros(1)}
    with pytest.raises(RefusedError, match="Tensors may hold bytes of the damaged save of step 2"):
        checkpointer.restore(state)
    with pytest.raises(RefusedError, match="nothing was changed") as caught:
        checkpointer.restore(state, step=1)
    assert "Tensors may hold" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*An older save is tried")
def test_where_all_saves_are_damaged_the_error_names_them(checkpointer):
    for step in (1, 2):
        checkpointer.save(step, {"x": torch.ones(3000)}).wait()
        damage(checkpointer, step, "x.safetensors")
    with pytest.raises(CorruptSaveError, match="of the damaged save of step 2"):
        checkpointer.restore({"x": torch.zeros(3000)})


@pytest.mark.parametrize("how", ["removed", "replaced", "removed while it is read"])
def test_a_save_that_vanishes_under_a_restore_gives_way_to_a_newer_one(
    checkpointer, tmp_path, monkeypatch, how
):
    checkpointer.save(1, {"x": torch.ones(3)}).wait()
    reader = residency.Checkpointer(tmp_path)
    open_save, calls = CheckpointDirectory.open, []

    def open_late(self, step):
        calls.append(step)
        if len(calls) > 1:
            return open_save(self, step)
        found = open_save(self, step) if how == "removed while it is read" else None
        checkpointer.save(1 if how == "replaced" else 2, {"x": torch.full((3,), 2.0)}).wait()
        if how != "replaced":
            folder = tmp_path / "step-00000001"
            for each in folder.iterdir():
                each.unlink()
            folder.rmdir()
        if found is not None:
            return found
        raise CheckpointError("the file of an old save is gone")

    monkeypatch.setattr(CheckpointDirectory, "open", open_late)
    state = {"x": torch.zeros(3)}
    assert reader.restore(state) == (1 if how == "replaced" else 2)
    assert state["x"].tolist() == [2, 2, 2]


def test_an_error_of_a_save_that_is_still_there_is_raised(checkpointer, monkeypatch):
    checkpointer.save(1, {"x": torch.ones(3)}).wait()

    def fail(self, step):
        raise CheckpointError("the disk does not answer")

    monkeypatch.setattr(CheckpointDirectory, "open", fail)
    with pytest.raises(CheckpointError, match="does not answer"):
        checkpointer.restore({"x": torch.zeros(3)})


def test_the_error_of_another_rank_keeps_none_of_the_tensors(device, checkpointer, monkeypatch):
    checkpointer.save(1, {"x": torch.ones(3000, device=device)}).wait()

    def fail_elsewhere(self, action, what):
        action()
        raise CheckpointError(f"rank 1 could not {what}")

    monkeypatch.setattr(Ranks, "together", fail_elsewhere)
    state = {"x": torch.zeros(3000, device=device)}
    tensor = weakref.ref(state["x"])
    with pytest.raises(CheckpointError, match="rank 1") as caught:
        checkpointer.restore(state)
    state.clear()
    assert tensor() is None, caught.value


def build():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("beside", [False, True])
def test_parameters_find_their_states_whatever_else_is_in_the_call(checkpointer, beside):
    model, optimizer = build()
    average = copy.deepcopy(model)
    more = {"average": average} if beside else {}
    checkpointer.save(1, {"model": model, "optimizer": optimizer, **more}).wait()
    for names in (("model", "optimizer"), ("optimizer",), ("model",), ("average", "optimizer")):
        other, others_optimizer = build()
        here = {"model": other, "optimizer": others_optimizer, "average": copy.deepcopy(other)}
        is_there = "average" not in names or beside
        state = {name: here[name] for name in names if is_there}
        checkpointer.restore(state)
        if "optimizer" in state:
            found = others_optimizer.state[other.weight]["exp_avg"]
            assert torch.equal(found, optimizer.state[model.weight]["exp_avg"])
    if not beside:
        here = {"model": other, "optimizer": others_optimizer, "average": nn.Linear(3, 3)}
        with pytest.warns(UserWarning, match="average") as warned:
            checkpointer.restore(here, strict=False)
        assert warned[0].filename == __file__


def test_values_of_ones_own_under_the_name_of_the_generators_are_no_generators(checkpointer):
    checkpointer.save(1, {"x": torch.ones(3), "rng": {"mine": 4}}, rng=False).wait()
    state = {"x": torch.zeros(3)}
    expected = random.getstate()
    assert checkpointer.restore(state) == 1
    assert random.getstate() == expected
    mine = {"rng": {"mine": 0}}
    checkpointer.restore(mine)
    assert mine == {"rng": {"mine": 4}}


def test_generators_of_another_size_are_refused_before_any_byte_moves(checkpointer, monkeypatch):
    checkpointer.save(1, {"x": torch.ones(3)}).wait()
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.zeros(7, dtype=torch.uint8))
    state = {"x": torch.zeros(3)}
    with pytest.raises(RefusedError, match=r"rng\.torch: saved a state of"):
        checkpointer.restore(state)
    assert not state["x"].any()


@pytest.mark.filterwarnings("ignore:.*An older save is tried")
@pytest.mark.parametrize("data", [b"", bytes(2513), b"\xff" * 2513, bytes(2514)])
def test_random_states_that_are_none_are_damage_and_an_older_save_is_tried(
    checkpointer, monkeypatch, data
):
    checkpointer.save(1, {"x": torch.ones(3)}).wait()
    monkeypatch.setattr(_rng, "_python_bytes", lambda: data)
    checkpointer.save(2, {"x": torch.zeros(3)}).wait()
    monkeypatch.undo()
    state = {"x": torch.full((3,), 9.0)}
    with pytest.raises(CorruptSaveError, match="a value at 'rng' that makes no sense"):
        checkpointer.restore(state, step=2)
    assert state["x"].eq(9).all()
    assert checkpointer.restore(state) == 1
    assert state["x"].all()


@pytest.mark.parametrize("state", [{"type": "sim"}, {"state": torch.ones(16)}, [1], 7, {"a": 1}])
def test_a_random_state_of_the_accelerator_that_is_none_is_damage(checkpointer, state):
    rng = {"python": b"1", "numpy": None, "torch": torch.get_rng_state(), "accelerator": state}
    checkpointer.save(1, {"x": torch.ones(3), "rng": rng}, rng=False).wait()
    target = {"x": torch.zeros(3)}
    with pytest.raises(CorruptSaveError, match="random state of the accelerator is none"):
        checkpointer.restore(target, step=1)
    assert not target["x"].any()
    assert checkpointer.restore(target, rng=False) == 1
    assert target["x"].all()


def test_an_object_that_raises_leaves_a_note_of_what_was_changed(checkpointer):
    class Loader:
        def state_dict(self):
            return {"n": 1}

        def load_state_dict(self, state):
            raise ValueError("not today")

    checkpointer.save(1, {"x": torch.ones(3), "loader": Loader()}).wait()
    with pytest.raises(ValueError, match="not today") as caught:
        checkpointer.restore({"x": torch.zeros(3), "loader": Loader()})
    assert "All tensors have the bytes of the save" in caught.value.__notes__[0]


def test_a_state_that_contains_itself_is_refused(checkpointer):
    checkpointer.save(1, {"x": [1]}).wait()
    here = [1]
    here.append(here)
    with pytest.raises(RefusedError, match=r"x\.1 is x again.*Nothing was changed"):
        checkpointer.restore({"x": here})


def run_of(device, kind, **settings):
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(device)
    return model, kind(model.parameters(), lr=1e-2, **settings)


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(4, 16, generator=generator).to(model.weight.device)

    def closure():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.AdamW])
def test_a_restored_run_goes_on_however_often_it_was_restored(
    device, checkpointer, kind, times, eager
):
    settings = {"max_iter": 3} if kind is torch.optim.LBFGS else {}
    model, optimizer = run_of(device, kind, **settings)
    for seed in range(3):
        step(model, optimizer, seed)
    checkpointer.save(1, {"model": model, "optimizer": optimizer}).wait()
    other, others_optimizer = run_of(device, kind, **settings)
    for _ in range(times):
        checkpointer.restore({"model": other, "optimizer": others_optimizer}, eager=eager)
    called = []
    others_optimizer.register_step_pre_hook(lambda *_: called.append(1))
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, others_optimizer, seed)
    assert torch.equal(other.weight, model.weight)
    assert len(called) == 3
    checkpointer.restore({"model": other, "optimizer": others_optimizer})
    assert len(others_optimizer._optimizer_step_pre_hooks) <= 2  # ours of before is gone
