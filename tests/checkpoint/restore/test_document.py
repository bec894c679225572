"""Values of every kind come back into the containers that are there, and what does not fit is
refused with everything as it was."""

import copy
import gc
import random
from collections import OrderedDict, deque

import numpy
import pytest
import torch
from runs import Run, assert_equal

from residency import CorruptSaveError, RefusedError
from residency._checkpoint import _rng
from residency._checkpoint._restore._document import DocumentPlan

VALUES = {
    "none": None,
    "flags": [True, False, 3, -1.5, "text", float("inf"), 1 + 2j, b"\x00\xff", bytearray(b"ab")],
    "nested": {"t": (1, (2, [3])), "s": {1, 2}, "f": frozenset({3}), "d": deque([1, 2])},
    "keys": {1: "one", (2, 3): "two", "$x": 4},
    "ordered": OrderedDict([(2, 1), (1, 2)]),
    "types": [torch.float8_e4m3fn, torch.device("cpu"), torch.Size([2, 3])],
    "array": numpy.arange(6, dtype="<u4").reshape(2, 3),
    "scalar": numpy.float64(0.1),
    "long": b"x" * 5000,
    "tensor": torch.arange(5.0),
}


def test_values_of_every_kind_come_back(save, restore):
    saved = save({"extra": VALUES})
    state = {"extra": dict.fromkeys(VALUES)}
    restore(state, saved)
    found = state["extra"]
    assert repr(found) == repr(VALUES)
    assert found["array"].dtype == numpy.dtype("<u4")
    assert type(found["scalar"]) is numpy.float64
    assert torch.equal(found["tensor"], VALUES["tensor"])
    found["array"][0, 0] = 1  # it owns its bytes


@pytest.mark.parametrize("seed", range(8))
def test_a_list_takes_what_was_saved_in_the_place_of_whatever_is_there(save, restore, seed):
    chance = random.Random(seed)
    values = [0, 1.5, True, None, "x", 1 << 70, float("inf"), "\ud800", [1, [2]], {"a": 1}, (3, 4)]
    drawn, there = (
        [chance.choice(values) for _ in range(chance.randrange(3, 12))] for _ in range(2)
    )
    saved = save({"drawn": drawn})
    state = {"drawn": copy.deepcopy(there)}
    here = state["drawn"]
    restore(state, saved)
    assert state["drawn"] is here
    assert repr(here) == repr(drawn)


def test_numbers_in_a_long_list_are_planned_without_a_call_for_each(save, restore, monkeypatch):
    numbers, calls = list(range(5000)), []
    saved = save({"numbers": numbers, "named": dict.fromkeys("ab", 0)})
    plan = DocumentPlan.visit
    monkeypatch.setattr(DocumentPlan, "visit", lambda *args: calls.append(args[1]) or plan(*args))
    state = {"numbers": [0] * 5000, "named": {"a": 1, "b": 2}}
    restore(state, saved)
    assert state == {"numbers": numbers, "named": {"a": 0, "b": 0}}
    assert len(calls) < 10


def test_containers_are_filled_in_place(save, restore):
    inner, history, kept, line = {"a": 1}, [1, 2, 3], torch.zeros(5), deque(maxlen=2)
    array = numpy.zeros(3)
    saved = save(
        {
            "extra": {
                "inner": {"a": 5, "b": 6},
                "history": [7],
                "pair": (torch.ones(5), 2),
                "line": deque([8, 9]),
                "array": numpy.ones(3),
            }
        }
    )
    extra = {"inner": inner, "history": history, "pair": (kept, 0), "line": line, "array": array}
    state = {"extra": extra}
    restore(state, saved)
    assert state["extra"] is extra
    assert extra["inner"] is inner == {"a": 5, "b": 6}
    assert extra["history"] is history == [7]
    assert extra["pair"][0] is kept
    assert extra["pair"][1] == 2
    assert torch.equal(kept, torch.ones(5))
    assert extra["line"] is line == deque([8, 9])
    assert line.maxlen == 2
    assert extra["array"] is array
    assert array.tolist() == [1, 1, 1]


def test_views_and_ties_come_back_shared(save, restore):
    base = torch.arange(10.0)
    saved = save({"extra": {"base": base, "view": base[2:5], "tie": base, "over": base[:4]}})
    state = {"extra": {}}
    restore(state, saved)
    found = state["extra"]
    found["base"][3] = 99
    assert found["view"][1] == found["tie"][3] == found["over"][3] == 99


def test_what_is_not_asked_for_is_left_alone(save, restore):
    saved = save({"a": torch.ones(3), "b": torch.ones(3)})
    state = {"a": torch.zeros(3)}
    assert not restore(state, saved)
    assert list(state) == ["a"]
    assert torch.equal(state["a"], torch.ones(3))


def test_generators_go_back(device, save, restore):
    torch.rand(3, device=device)
    saved = save({"a": 1}, rng=_rng.random_states())

    def draw():
        on_device = torch.rand(4, device=device).tolist()
        return random.random(), numpy.random.rand(), torch.rand(4).tolist(), on_device

    expected = draw()
    restore({"a": 0}, saved)
    assert draw() == expected
    restore({"a": 0}, saved, rng=False)
    assert draw() != expected


def test_a_scaler_and_an_object_with_a_state_dict_go_back(device, save, restore):
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=3)
    scaler.scale(torch.ones((), device=device))
    scaler._scale.fill_(32.0)
    scaler._growth_tracker.fill_(2)
    saved = save({"scaler": scaler})
    used = torch.amp.GradScaler(device.type)
    used.scale(torch.ones((), device=device))
    fresh = torch.amp.GradScaler(device.type)
    for each in (used, fresh):
        restore({"scaler": each}, saved)
        assert each.state_dict() == scaler.state_dict()


class Model(torch.nn.Module):
    def __init__(self, size=4, dtype=torch.float32):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
        self.b = torch.nn.Parameter(torch.zeros(2))
        self.note = "old"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def test_extra_state_of_a_module_goes_back(save, restore):
    model = Model()
    model.note = "new"
    saved = save({"model": model})
    other = Model()
    restore({"model": other}, saved)
    assert other.note == "new"


def test_identity_hooks_and_requires_grad_stay(device, save, restore):
    first, second = Run(device), Run(device, seed=3)
    first.train(range(1))
    saved = save(first.state)
    before = dict(second.model.named_parameters(remove_duplicate=False))
    seen = []
    second.model.inner.weight.register_hook(seen.append)
    restore(second.state, saved)
    after = dict(second.model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert second.model.head.weight is second.model.embed.weight
    assert not second.model.frozen.requires_grad
    second.train(range(1, 2))
    assert seen


def test_a_save_of_another_model_is_refused_with_all_differences_and_nothing_changed(
    device, save, restore
):
    run = Run(device)
    run.train(range(1))
    other = Run(device, seed=5)
    state = {**other.state, "model": torch.nn.ModuleDict({"x": other.model.inner})}
    saved = save(run.state)
    before = other.read()
    with pytest.raises(RefusedError, match="nothing was changed") as caught:
        restore(state, saved)
    assert "model.x.weight" in str(caught.value)
    assert "model.embed.weight" in str(caught.value)
    assert_equal(other.read(), before)


def test_what_fits_is_left_alone_where_something_else_does_not(save, restore):
    saved = save({"first": torch.zeros(2), "second": torch.zeros(2), "third": 0})
    state = {"first": torch.ones(2), "second": torch.ones(3), "third": 1}
    with pytest.raises(RefusedError, match="nothing was changed"):
        restore(state, saved)
    assert state["first"].tolist() == [1, 1]
    assert state["third"] == 1


def test_shapes_dtypes_kinds_and_missing_names_are_listed_at_once(save, restore):
    saved = save({"model": Model(), "extra": {"x": 1}, "o": 3})
    state = {
        "model": Model(size=5),
        "extra": {"x": 1, "y": 2},
        "o": Model(),
        "gone": 1,
    }
    with pytest.raises(RefusedError) as caught:
        restore(state, saved)
    message = str(caught.value)
    assert "model.a: saved shape (4,), here (5,)" in message
    assert "extra.y" in message
    assert "gone" in message
    assert "o: saved a plain value or a container, here a Model" in message
    with pytest.raises(RefusedError, match=r"saved dtype torch.float32, here torch.float16"):
        restore({"model": Model(dtype=torch.float16)}, saved)


def test_without_strict_what_does_not_fit_is_left_out_with_a_warning(save, restore):
    model = Model()
    with torch.no_grad():
        model.a += 1
        model.b += 1
    saved = save({"model": model})
    other = Model(size=5)
    with pytest.warns(UserWarning, match=r"model\.a: saved shape"):
        found = restore({"model": other}, saved, strict=False)
    assert found.differing
    assert torch.equal(other.b, torch.ones(2))
    assert torch.equal(other.a, torch.zeros(5))


@pytest.mark.parametrize("offload", [False, True])
def test_other_groups_are_refused_before_anything_moves(device, save, restore, offload):
    run = Run(device)
    run.train(range(1))
    saved = save(run.state)
    other = Run(device, seed=5, offload=offload)
    other.train(range(1))
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    other.optimizer.add_param_group({"params": [parameter]})
    before = [p.detach().cpu().clone() for p in other.model.parameters()]
    with pytest.raises(RefusedError, match="groups of"):
        restore({"model": other.model, "optimizer": other.optimizer}, saved)
    after = [p.detach().cpu().clone() for p in other.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(RefusedError, match="saved a AdamW, here a SGD"):
        restore({"optimizer": torch.optim.SGD([parameter], lr=1.0)}, saved)


def test_an_optimizer_without_its_module_is_matched_by_position(device, save, restore):
    run = Run(device)
    run.train(range(2))
    saved = save(run.state)
    other = Run(device, seed=5)
    restore({"optimizer": other.optimizer}, saved)
    mine, theirs = (
        [dict(o.state[p]) for g in o.param_groups for p in g["params"] if p in o.state]
        for o in (other.optimizer, run.optimizer)
    )
    for left, right in zip(mine, theirs, strict=True):
        assert all(torch.equal(left[k].cpu(), right[k].cpu()) for k in right)


def test_a_damaged_file_is_named(device, save, restore):
    run = Run(device)
    run.train(range(1))
    saved = save(run.state)
    path = saved.folder / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptSaveError) as caught:
        restore(Run(device).state, saved)
    assert caught.value.file == "optimizer.safetensors"
    assert caught.value.tensor.startswith("optimizer.state.")


def test_a_restore_before_the_first_step_takes_no_device_memory_for_the_state(
    device, save, restore
):
    run = Run(device)
    run.train(range(1))
    saved = save(run.state)
    for offload in (False, True):
        other = Run(device, offload=offload)
        gc.collect()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        restore(other.state, saved)
        torch.accelerator.synchronize()
        assert torch.accelerator.memory_allocated() == before
        assert torch.accelerator.max_memory_allocated() == before


@pytest.mark.parametrize("offload", [False, True])
def test_nothing_holds_what_was_read(device, save, restore, offload, pinned_bytes):
    run = Run(device)
    run.train(range(1))
    saved = save(run.state)
    other = Run(device, offload=offload)
    other.train(range(1))
    other.optimizer.zero_grad()
    gc.collect()
    pinned = pinned_bytes()
    tensors = {id(o) for o in gc.get_objects() if issubclass(type(o), torch.Tensor)}
    gc.disable()
    try:
        restore(other.state, saved)
        values = [v for s in other.optimizer.state.values() for v in dict(s).values()]
        own = {v.untyped_storage().data_ptr() for v in values}
        made = [
            o
            for o in gc.get_objects()
            if issubclass(type(o), torch.Tensor) and id(o) not in tensors
        ]
        left = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in own]
        assert not left
    finally:
        gc.enable()
    assert pinned_bytes() == pinned


def test_waiting_state_goes_to_the_device_when_it_is_used(device, save, restore):
    run = Run(device)
    run.train(range(2))
    saved = save(run.state)
    other = Run(device, seed=4)
    restore(other.state, saved)
    weight, table = other.model.inner.weight, vars(other.optimizer)
    assert table["state"][weight]["exp_avg"].is_cpu  # looked at without a use
    inner = other.optimizer.state[weight]
    assert inner is table["state"][weight]
    assert inner["exp_avg"].device == weight.device
    assert inner["step"].is_cpu
    assert not other.optimizer._optimizer_step_pre_hooks  # which copies would take along
