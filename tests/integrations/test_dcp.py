"""What torch.distributed.checkpoint keeps of a state through the storage writer and reader."""

from __future__ import annotations

import random
import re
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

sys.path.insert(0, str(Path(__file__).parent))
from dcp_states import blank, blank_of, is_same, load, save, training_state

from residency import CorruptSaveError
from residency._checkpoint._disk._manifest import Record
from residency._checkpoint._disk._parts import FilePlan, Part
from residency._checkpoint._disk._publish import CheckpointDirectory, SaveRequest
from residency._checkpoint._document._dtypes import STORED_DTYPES
from residency._checkpoint._sources import open_source
from residency.integrations.dcp import ResidencyStorageReader

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf support"
)
VALUES: dict[str, Any] = {
    "none": None,
    "numbers": [1, 2.5, -0.0, float("inf"), 2**80, True],
    "complex": 2 + 3j,
    "text": '\u00e4\n"quoted"',
    "bytes": b"\x00\xff" * 3,
    "many_bytes": bytes(range(256)) * 40,
    "bytearray": bytearray(b"xyz"),
    "tuple": (1, (2, "three"), [4]),
    "sets": ({1, 2}, frozenset({3})),
    "ordered": (OrderedDict(a=1, b=2),),
    "deque": deque([1, 2]),
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "rng": random.Random(0).getstate(),
    "keys": {"$odd": {"a": 1}},
    "tensor_in_a_tuple": (torch.arange(3), torch.arange(4.0).view(2, 2).t(), 5),
}


def test_a_training_state_comes_back_bit_for_bit_and_in_place(tmp_path: Path) -> None:
    state = training_state()
    target = blank(state)
    weight = target["model"]["0.weight"]
    load(target, save(state, tmp_path / "s"))
    assert is_same(target, state)
    assert target["model"]["0.weight"] is weight
    names = sorted(file.name for file in (tmp_path / "s").iterdir())
    assert names == ["manifest.json", "model.safetensors", "optimizer.safetensors"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_plain_value_comes_back(tmp_path: Path, name: str) -> None:
    state = {"w": torch.ones(2), name: VALUES[name]}
    assert is_same(load(blank(state), save(state, tmp_path / "s")), state)


def dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left_out = re.compile(r"torch\.(q|bits|u?int[1-7]$)")
    return sorted((dtype for dtype in found if not left_out.match(str(dtype))), key=str)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    data = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        data %= 2
    state = {"a": data.view(dtype).view(2, 3), "empty": torch.empty(0, 2, dtype=dtype)}
    target = {key: torch.empty_like(value) for key, value in state.items()}
    assert is_same(load(target, save(state, tmp_path / "s")), state)


def test_views_ties_and_other_orders_are_saved_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {
        "tie": base,
        "view": base[1:3, 2:5],
        "transposed": base.t(),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(base[0].clone()),
        "again": base,
    }
    target = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
    load(target, save(state, tmp_path / "s"))
    for key, value in state.items():
        assert torch.equal(target[key], value)


def test_a_tensor_is_read_into_another_order_dtype_and_part_of_a_tensor(tmp_path: Path) -> None:
    saved = torch.arange(24.0).view(4, 6)
    save({"a": saved, "b": saved, "c": saved}, tmp_path / "s")
    whole = torch.zeros(6, 8)
    target = {"a": torch.zeros(6, 4).t(), "b": torch.zeros(4, 6).double(), "c": whole[1:5, 1:7]}
    load(target, tmp_path / "s")
    assert torch.equal(target["a"], saved)
    assert torch.equal(target["b"], saved.double())
    assert torch.equal(whole[1:5, 1:7], saved)
    assert whole.sum() == saved.sum()


def test_stock_readers_load_the_tensors(tmp_path: Path) -> None:
    state = training_state()
    save(state, tmp_path / "s")
    weights = load_file(tmp_path / "s" / "model.safetensors")
    assert is_same(
        {k.removeprefix("model."): v for k, v in weights.items()},
        {k: state["model"][k] for k in (name.removeprefix("model.") for name in weights)},
    )
    assert len(weights) == len(state["model"])
    target = {key: blank(state[key]) for key in ("model",)}
    target["optimizer"] = {"state": blank(state["optimizer"]["state"])}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "s")))
    assert is_same(target["model"], state["model"])
    assert is_same(target["optimizer"]["state"], blank_of(state["optimizer"]["state"]))


def test_a_model_and_its_optimizer_resume_through_state_dicts(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().square()
        optimizer.step()
        optimizer.zero_grad()

    first, resumed = made(), made()
    step(*first)
    names = ("model", "optimizer")
    save(dict(zip(names, get_state_dict(*first), strict=True)), tmp_path / "s")
    state = load(dict(zip(names, get_state_dict(*resumed), strict=True)), tmp_path / "s")
    set_state_dict(*resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step(*first)
    step(*resumed)
    assert is_same(dict(resumed[0].state_dict()), dict(first[0].state_dict()))


def test_an_object_with_a_state_dict_is_asked_for_it(tmp_path: Path) -> None:
    class Counter:
        count = 3

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count, "data": torch.full((2,), float(self.count))}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]
            assert state["data"].tolist() == [float(self.count)] * 2

    save({"counter": Counter()}, tmp_path / "s")
    target = Counter()
    target.count = 0
    load({"counter": target}, tmp_path / "s")
    assert target.count == 3


def test_a_save_is_whole_without_a_state_to_load_into(tmp_path: Path) -> None:
    state = {**training_state(), "list": [torch.arange(2), {"a": 1}], "plain": [1, 2]}
    save(state, tmp_path / "s")
    found: dict[str, Any] = {}
    reader = ResidencyStorageReader(tmp_path / "s")
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert is_same(
        {key: found[key] for key in state},
        {
            **state,
            "optimizer": {
                "state": blank_of(state["optimizer"]["state"]),
                "param_groups": state["optimizer"]["param_groups"],
            },
        },
    )


# ------------------------------------------------------------------------------- what goes wrong


def test_what_is_not_in_the_save_is_an_error_or_left_alone_as_asked(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "s")
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"w": torch.zeros(3), "more": torch.zeros(2)}, tmp_path / "s")
    target = {"w": torch.zeros(3), "more": torch.zeros(2)}
    load(target, tmp_path / "s", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert target["w"].tolist() == [1, 1, 1]
    assert target["more"].tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(4,), (2,), (3, 1), ()])
def test_another_shape_is_an_error(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save({"w": torch.ones(3)}, tmp_path / "s")
    with pytest.raises((CheckpointException, ValueError)):
        load({"w": torch.zeros(shape)}, tmp_path / "s")


def test_a_byte_that_changed_is_found_and_named(tmp_path: Path) -> None:
    save({"m": {"a": torch.ones(300), "b": torch.ones(300)}}, tmp_path / "s")
    file = tmp_path / "s" / "m.safetensors"
    [place] = open_source(tmp_path / "s").tensors["m.b"]
    data = bytearray(file.read_bytes())
    data[place.start + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException) as error:
        load({"m": {"a": torch.zeros(300), "b": torch.zeros(300)}}, tmp_path / "s")
    [cause] = [failure[0] for failure in error.value.failures.values()]
    assert isinstance(cause, CorruptSaveError)
    assert cause.file == "m.safetensors"


def test_what_is_no_save_is_refused(tmp_path: Path) -> None:
    dcp.save({"n": 1}, checkpoint_id=tmp_path / "stock")
    for path, problem in ((tmp_path / "stock", "kind 'dcp'"), (tmp_path / "none", "nothing at")):
        with pytest.raises(CheckpointException, match=problem):
            load({"n": None}, path)


def test_a_save_of_objects_is_read_as_their_state_dicts(tmp_path: Path) -> None:
    """What a `Checkpointer` writes of modules and optimizers, by the names of the format."""
    moment = "o.state.layer.weight.exp_avg"
    state = {"layer.weight": {"exp_avg": {"$": "tensor", "name": moment}}}
    document = {
        "tree": {
            "m": {
                "$": "module",
                "keys": ["layer.weight"],
                "names": ["m.layer.weight"],
                "extra": {"layer._extra_state": 5},
            },
            "o": {
                "$": "optimizer",
                "parameters": [["layer.weight"]],
                "groups": [{"lr": 0.5}],
                "state": state,
            },
            "s": {"$": "stateful", "class": "x.Y", "state": {"last": [1, 2]}},
        },
        "tensors": {},
    }
    tensors = {"m.layer.weight": torch.arange(2.0), moment: torch.ones(2)}
    parts = []
    for name, tensor in tensors.items():
        data = memoryview(bytes(tensor.view(torch.uint8).tolist()))
        record = Record(name, STORED_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        parts.append(Part(record, lambda data=data: data, lambda: None))
    request = SaveRequest(3, [FilePlan("m.safetensors", parts)], document, {}, 0, 1, "token")
    CheckpointDirectory(tmp_path).save(request, timeout_seconds=10)
    target = {
        "m": {"layer.weight": torch.zeros(2), "layer._extra_state": None},
        "o": {
            "state": {"layer.weight": {"exp_avg": torch.zeros(2)}},
            "param_groups": [{"lr": None, "params": None}],
        },
        "s": {"last": None},
    }
    load(target, tmp_path)
    assert is_same(
        target,
        {
            "m": {"layer.weight": torch.arange(2.0), "layer._extra_state": 5},
            "o": {
                "state": {"layer.weight": {"exp_avg": torch.ones(2)}},
                "param_groups": [{"lr": 0.5, "params": ["layer.weight"]}],
            },
            "s": {"last": [1, 2]},
        },
    )
