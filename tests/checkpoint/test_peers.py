"""What the suites of comparable snapshot code check and nothing else here does; see
docs/explanation/tested-against.md.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict, UserDict, deque, namedtuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner

import residency
from residency import RefusedError


class Named(Tensor):
    """A subclass with a plain storage of its own."""


@dataclasses.dataclass
class Batch:
    tokens: Tensor
    epoch: int = 0


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    tokens: Tensor


Pair = namedtuple("Pair", "left right")


def test_a_subclass_with_plain_bytes_is_saved_as_a_tensor_and_filled_in_place(lab, tmp_path):
    value = torch.arange(6.0, device=lab.device).as_subclass(Named)
    value.note = "an attribute is no part of a save"
    plain = torch.arange(6.0)
    lab.same(residency.snapshot({"x": value}).tree["x"], plain)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"x": value})
        state = {"x": value}
        value.zero_()
        checkpointer.restore(state)
    assert state["x"] is value
    assert value.note == "an attribute is no part of a save"
    lab.same(value.as_subclass(Tensor), plain)


@pytest.mark.parametrize("kind", [Batch, FrozenBatch])
def test_dataclasses_are_refused_with_what_to_give_instead(lab, kind):
    value = kind(torch.ones(2, device=lab.device))
    with pytest.raises(RefusedError, match=rf"extra\.batch is a .*{kind.__name__}.*asdict"):
        residency.snapshot({"extra": {"batch": value}})
    found = residency.snapshot({"extra": {"batch": dataclasses.asdict(value)}}).tree
    lab.same(found["extra"]["batch"]["tokens"], torch.ones(2))


def test_a_named_tuple_is_refused_by_its_name(lab):
    with pytest.raises(RefusedError, match=r"pair is a .*Pair"):
        residency.snapshot({"pair": Pair(1, torch.ones(2, device=lab.device))})


def in_list():
    inner = [1]
    inner.append(inner)
    return {"a": {"b": inner}}, r"a\.b\.1 is a\.b again"


def in_dict():
    state = {"a": {}}
    state["a"]["up"] = state
    return state, r"a\.up(\.a)? is (the state|a) again"  # a save adds to a copy of the outermost


def in_ordered():
    inner = OrderedDict(x=1)
    inner["self"] = (2, inner)
    return {"o": inner}, r"o\.self\.1 is o again"


def in_deque():
    inner = deque([0])
    inner.append(inner)
    return {"q": inner}, r"q\.1 is q again"


def in_state_dict():
    class Loader:
        def __init__(self):
            self.state = {"n": 1}
            self.state["me"] = self.state

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            raise AssertionError

    return {"loader": Loader()}, r"loader\.me is loader again"


def too_deep():
    state = {}
    for _ in range(100_000):
        state = {"a": state}
    return state, "nested deeper than Python can follow"


@pytest.mark.parametrize("make", [in_list, in_dict, in_ordered, in_deque, in_state_dict, too_deep])
@pytest.mark.parametrize("spare", [None, "all"])
def test_what_contains_itself_is_refused_by_its_path(lab, tmp_path, make, spare, no_loans):
    state, words = make()
    run = lab.run(offload=True)
    run.step()
    with (
        residency.Checkpointer(tmp_path, spare=spare) as checkpointer,
        pytest.raises(RefusedError, match=words),
    ):
        checkpointer.save(0, {**run.state, **state} if make is not in_dict else state)
    with pytest.raises(RefusedError, match=words):
        residency.snapshot(state)
    assert no_loans()
    while state := state.pop("a", None) if make is too_deep else None:
        pass  # a deep nest is taken apart from outside, or it would end in one deep call


def test_one_container_in_two_places_is_no_cycle(lab, tmp_path):
    shared = {"x": torch.ones(2, device=lab.device), "n": [1]}
    found = residency.snapshot({"a": shared, "b": [shared, shared]}).tree
    lab.same(found["b"][1], {"x": torch.ones(2), "n": [1]})
    assert found["a"]["x"].data_ptr() == found["b"][0]["x"].data_ptr()


def test_mappings_of_other_kinds_are_saved_as_dicts(lab):
    found = residency.snapshot({"m": UserDict(x=torch.ones(2, device=lab.device))}).tree
    lab.same(found, {"m": {"x": torch.ones(2)}})


def test_a_tensor_that_is_replaced_between_saves_is_not_kept(lab, tmp_path, pinned_bytes):
    """State dict hooks make new storages at every call: nothing may pile up by storage."""
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare({"x": torch.ones(1000, device=lab.device)})
        pinned = pinned_bytes()
        seen = []
        for step in range(4):
            value = torch.full((1000,), float(step), device=lab.device)
            seen.append(weakref.ref(value.untyped_storage()))
            checkpointer.save(step, {"x": value}).wait()
            del value
            assert pinned_bytes() == pinned
        assert not any(each() for each in seen)
        for step in range(4):
            state = {"x": torch.empty(1000, device=lab.device)}
            checkpointer.restore(state, step=step)
            lab.same(state["x"], torch.full((1000,), float(step)))


def test_a_state_that_changes_its_shape_and_dtype_between_saves_is_saved_each_time(lab, tmp_path):
    values = [
        torch.ones(10, device=lab.device),
        torch.ones(2000, 3, dtype=torch.bfloat16, device=lab.device),
        torch.tensor(3, device=lab.device),
    ]
    with residency.Checkpointer(tmp_path) as checkpointer:
        for step, value in enumerate(values):
            checkpointer.save(step, {"x": value})
        for step, value in enumerate(values):
            state = {"x": torch.zeros_like(value)}
            checkpointer.restore(state, step=step)
            lab.same(state["x"], value)


def test_a_hook_that_makes_new_tensors_is_saved_as_of_the_call(lab, tmp_path):
    model = nn.Linear(300, 2).to(lab.device)

    def double(module, state, prefix, local):
        state["doubled"] = state["weight"].detach() * 2

    model.register_state_dict_post_hook(double)
    expected = model.weight.detach().cpu() * 2
    snapshot = residency.snapshot({"model": model})
    torch.full((600,), 9.0, device=lab.device)  # takes memory that is free
    lab.same(snapshot.tree["model"]["doubled"], expected)


def test_what_is_dropped_after_a_save_or_a_snapshot_is_free(lab, tmp_path, held_writer):
    """Whether the bytes are written yet, or the save failed, or somebody keeps the snapshot."""
    before = torch.accelerator.memory_allocated()
    value = torch.ones(4096, device=lab.device)
    with residency.Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(0, {"x": value})
        snapshot = residency.snapshot({"x": value}).wait()
        lab.same(snapshot.tree["x"], torch.ones(4096))
        for held in checkpointer._memories[0].job.captured.held:
            held.final()  # the copies are over, the writing has not begun
        del value, held
        assert torch.accelerator.memory_allocated() == before
        held_writer.set()
        save.wait()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_reads_a_save_with_ties_when_it_may_leave_names_out(lab, tmp_path):
    run = lab.run(offload=True)  # 3.weight is tied to 0.weight
    run.step()
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, run.state)
    expected = run.copy()["model"]
    found = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "step-00000000"))
    with pytest.raises(dcp.api.CheckpointException, match=r"model\.3\.weight"):
        dcp.load(found, storage_reader=reader)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, storage_reader=reader, planner=planner)
    assert not found["model"].pop("3.weight").any()
    lab.same(found["model"], {n: v for n, v in expected.items() if n != "3.weight"})
