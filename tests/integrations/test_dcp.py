"""The storage writer and reader for torch.distributed.checkpoint, on one rank and on two.

``dcp_worker.py`` is one rank of the cases on two.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
from collections import OrderedDict, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from limits import WORKER_SECONDS
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import residency
from residency import CorruptSaveError, RefusedError
from residency._checkpoint._disk._manifest import Record
from residency._checkpoint._disk._parts import FilePlan, Part
from residency._checkpoint._disk._publish import CheckpointDirectory, SaveRequest
from residency._checkpoint._document._dtypes import STORED_DTYPES
from residency._checkpoint._sources import open_source
from residency.integrations.dcp import ResidencyStorageReader, ResidencyStorageWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf support"
)
WORKER = Path(__file__).with_name("dcp_worker.py")


def save(state: dict[str, Any], path: Path, **settings: Any) -> Path:
    dcp.save(state, storage_writer=ResidencyStorageWriter(path), **settings)
    return path


def load(state: dict[str, Any], path: Path, **settings: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=ResidencyStorageReader(path), **settings)
    return state


def blank(value: Any) -> Any:
    """Returns a state of the same structure, with nothing of the values."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    return None


def is_same(found: Any, expected: Any) -> bool:
    """Compares types, values and, of tensors, bits."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, Tensor):
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            return False
        return not found.numel() or torch.equal(raw(found), raw(expected))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(is_same(found[k], expected[k]) for k in found)
    if isinstance(expected, list | tuple | deque):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(is_same(a, b) for a, b in pairs)
    return bool(found == expected)


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(2, 3, 5, 5))  # changes the statistics
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": {
            "state": {name: optimizer.state[p] for name, p in model.named_parameters()},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "foreach": None}],
        },
        "step": 7,
    }


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


def blank_of(value: Any) -> Any:
    return {key: dict(each) for key, each in value.items()}


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


# ------------------------------------------------------------------------------- the calls of dcp


def test_a_name_that_looks_like_a_rank_keeps_its_file(tmp_path: Path) -> None:
    state = {"rank-0": {"w": torch.arange(5.0)}, "rank-00000": {"w": torch.ones(3)}}
    dcp.save(state, storage_writer=ResidencyStorageWriter(tmp_path / "s"), no_dist=True)
    found = {name: {"w": torch.zeros_like(each["w"])} for name, each in state.items()}
    dcp.load(found, storage_reader=ResidencyStorageReader(tmp_path / "s"), no_dist=True)
    assert is_same(found, state)


def test_a_save_may_begin_anew_at_another_path(tmp_path: Path) -> None:
    writer = ResidencyStorageWriter(tmp_path / "one")
    reader = ResidencyStorageReader(tmp_path / "one")
    for number, name in enumerate(["one", "two", "three"]):
        dcp.save({"n": number}, checkpoint_id=tmp_path / name, storage_writer=writer)
        assert writer.checkpoint_id == tmp_path / name
    for number, name in enumerate(["one", "two", "three"]):
        state = {"n": None}
        dcp.load(state, checkpoint_id=tmp_path / name, storage_reader=reader)
        assert state == {"n": number}
        assert reader.checkpoint_id == tmp_path / name


def test_a_save_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir()
    save({"n": 1}, path)  # an empty directory is in nobody's way
    with pytest.raises(CheckpointException) as error:
        save({"n": 2}, path)
    [cause] = [failure[0] for failure in error.value.failures.values()]
    assert isinstance(cause, RefusedError)
    assert "never replaces another" in str(cause)
    assert load({"n": None}, path) == {"n": 1}


def test_what_may_be_a_path_is_told_from_an_address(tmp_path: Path) -> None:
    for accepted in (tmp_path / "a" / "b", str(tmp_path / "a")):
        assert ResidencyStorageWriter.validate_checkpoint_id(accepted)
    assert not ResidencyStorageWriter.validate_checkpoint_id("s3://bucket/a")
    assert ResidencyStorageReader.validate_checkpoint_id(tmp_path)
    assert not ResidencyStorageReader.validate_checkpoint_id(tmp_path / "a")


def test_a_save_says_of_itself_what_planners_may_ask(tmp_path: Path) -> None:
    seen = []

    class Planner(DefaultSavePlanner):
        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, *a: Any, **k: Any
        ) -> None:
            seen.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, *a, **k)

    save({"n": 1}, tmp_path / "s", planner=Planner())
    assert [meta.checkpoint_id for meta in seen] == [tmp_path / "s"]
    assert seen[0].save_id


def test_ranks_that_do_not_speak_to_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="none of them whole"):
        save({"n": 1}, tmp_path / "s", use_collectives=False)
    assert not list(tmp_path.iterdir())


def test_a_directory_named_as_a_step_is_a_save_of_a_checkpointer(tmp_path: Path) -> None:
    for step in (9, 10):
        save({"n": step}, tmp_path / f"step-{step:08d}")
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == [9, 10]
    assert directory.open(10).documents[0]["tree"] == {"n": 10}
    assert load({"n": None}, tmp_path) == {"n": 10}  # the newest


def test_an_asynchronous_save_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0), "n": [1, 2]}
    expected = {"w": state["w"].clone(), "n": [1, 2]}
    response = dcp.async_save(state, storage_writer=ResidencyStorageWriter(tmp_path / "s"))
    assert isinstance(response, Future)
    state["w"].zero_()
    response.result(timeout=60)
    assert is_same(load({"w": torch.zeros(1000), "n": None}, tmp_path / "s"), expected)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_an_error_in_a_writer_thread_is_raised_and_the_next_save_works(
    tmp_path: Path, is_asynchronous: bool
) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            raise OSError("the disk went away")

    def attempt(planner: DefaultSavePlanner | None) -> None:
        state = {"w": torch.ones(3), "n": 4}
        if is_asynchronous:
            future: Any = dcp.async_save(state, storage_writer=writer, planner=planner)
            future.result(timeout=60)
        else:
            dcp.save(state, storage_writer=writer, planner=planner)

    writer = ResidencyStorageWriter(tmp_path / "s")
    with pytest.raises(CheckpointException, match="'w' could not be had: the disk went away"):
        attempt(Failing())
    assert not list(tmp_path.iterdir())
    attempt(None)
    assert load({"w": torch.zeros(3), "n": 0}, tmp_path / "s")["n"] == 4


class Unknown:
    pass


def test_a_value_that_would_need_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"a\.b\.1.* is a .*Unknown"):
        save({"w": torch.ones(2), "a": {"b": (1, Unknown())}}, tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_a_planner_that_gives_bytes_of_its_own_is_read_without_running_them(
    tmp_path: Path,
) -> None:
    class Planner(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, found: Any) -> Any:
            if isinstance(found, int):
                found += 1
            return super().transform_object(write_item, found)

    save({"n": 1}, tmp_path / "s", planner=Planner())
    assert load({"n": None}, tmp_path / "s") == {"n": 2}
    with pytest.raises(CheckpointException, match=r"(?s)'n' comes from Planner .*Unknown"):
        save({"n": Unknown()}, tmp_path / "t", planner=Planner())


def test_a_planner_may_save_in_another_dtype_and_under_other_names(tmp_path: Path) -> None:
    class Half(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            found = super().resolve_data(write_item)
            return found.half() if isinstance(found, Tensor) else found

    class Renaming(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, **others: Any) -> None:
            renamed = {f"new_{key}": value for key, value in state_dict.items()}
            super().set_up_planner(renamed, storage_meta, **others)

    save({"w": torch.ones(3)}, tmp_path / "half", planner=Half())
    assert open_source(tmp_path / "half").tensors["w"][0].dtype == torch.float16
    save({"w": torch.ones(3)}, tmp_path / "renamed", planner=Renaming())
    assert list(open_source(tmp_path / "renamed").tensors) == ["new_w"]


def test_a_planner_may_keep_its_plan_for_the_next_save(tmp_path: Path) -> None:
    class Caching(DefaultSavePlanner):  # torch keeps the plans by the class's name
        pass

    for number in range(3):
        state = {"w": torch.full((3,), float(number)), "n": number}
        save(state, tmp_path / str(number), planner=Caching(enable_plan_caching=True))
    for number in range(3):
        target = load({"w": torch.zeros(3), "n": None}, tmp_path / str(number))
        assert target["w"].tolist() == [number] * 3
        assert target["n"] == number


def test_a_second_writer_of_one_save_is_refused(tmp_path: Path) -> None:
    first, second = (ResidencyStorageWriter(tmp_path / "s") for _ in range(2))
    first.prepare_global_plan([SavePlan([])])
    with pytest.raises(CheckpointException, match="is being written"):
        dcp.save({"n": 2}, storage_writer=second)
    first.reset()
    dcp.save({"n": 2}, storage_writer=second)
    assert load({"n": None}, tmp_path / "s") == {"n": 2}


def test_a_planner_that_does_not_keep_its_plan_is_found_out(tmp_path: Path) -> None:
    class Liar(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return torch.ones(4, dtype=torch.int32)

    with pytest.raises(CheckpointException, match=r"it is torch\.int32 of shape .*planned was"):
        save({"w": torch.ones(4)}, tmp_path / "s", planner=Liar())


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


# ------------------------------------------------------------------------------------ two ranks


def _cases() -> list[str]:
    functions = [n for n in ast.parse(WORKER.read_text()).body if isinstance(n, ast.FunctionDef)]
    return [f.name for f in functions if any(ast.unparse(d) == "case" for d in f.decorator_list)]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    source = str(Path(residency.__file__).parents[1])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            output = process.communicate(timeout=WORKER_SECONDS)[0]
            assert process.returncode == 0, output
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((folder / f"outcomes{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.sim
@pytest.mark.parametrize("case", _cases())
def test_two_ranks(of_two: list[dict[str, str]], case: str) -> None:
    for rank, outcomes in enumerate(of_two):
        assert outcomes.get(case) == "passed", f"rank {rank}: {outcomes.get(case)}"
