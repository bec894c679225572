"""One rank of test_dcp_ranks.py: saves and loads DTensors through the pair, over gloo."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from worker_cases import Cases

from residency import sim
from residency._checkpoint._disk._open_save import open_save
from residency._checkpoint._sources import open_source
from residency.integrations.dcp import ResidencyStorageReader, ResidencyStorageWriter

RANK, PHASE, FOLDER = int(sys.argv[1]), sys.argv[3], Path(sys.argv[4])
case = Cases()


def path(name: str) -> Path:
    return FOLDER / name


def save(state: dict[str, Any], name: str, **settings: Any) -> Path:
    dcp.save(state, storage_writer=ResidencyStorageWriter(path(name)), **settings)
    return path(name)


def load(state: dict[str, Any], name: str, **settings: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=ResidencyStorageReader(path(name)), **settings)
    return state


def placed(value: Tensor, placements: Sequence[Placement]) -> DTensor:
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(value, mesh, placements)


def whole(value: DTensor) -> Tensor:
    return value.full_tensor()


SHAPES = {"even": (4, 6), "uneven": (5, 3), "one_row": (1, 7), "empty": (0, 3), "vector": (3,)}


def values() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@case
def shards_come_back_in_any_placement() -> None:
    expected = values()
    rows = {name: placed(value, [Shard(0)]) for name, value in expected.items()}
    save({"m": rows}, "rows")
    for placements in ([Shard(0)], [Replicate()], [Shard(1)]):
        target = {
            name: placed(torch.zeros_like(value), placements)
            for name, value in expected.items()
            if placements != [Shard(1)] or value.dim() > 1
        }
        load({"m": target}, "rows")
        for name, found in target.items():
            assert torch.equal(whole(found), expected[name]), (name, placements)
    plain = {name: torch.zeros_like(value) for name, value in expected.items()}
    load({"m": plain}, "rows")
    assert all(torch.equal(plain[name], expected[name]) for name in expected)


@case
def columns_come_back_as_rows() -> None:
    expected = {name: value for name, value in values().items() if value.dim() > 1}
    save({name: placed(value, [Shard(1)]) for name, value in expected.items()}, "columns")
    target = {n: placed(torch.zeros_like(v), [Shard(0)]) for n, v in expected.items()}
    load(target, "columns")
    for name, found in target.items():
        assert torch.equal(whole(found), expected[name]), name


@case
def stock_readers_load_the_shards() -> None:
    expected = {n: v for n, v in values().items() if v.numel()}
    save({"m": {n: placed(v, [Shard(0)]) for n, v in expected.items()}, "n": 3}, "for_stock")
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    reader = HuggingFaceStorageReader(str(path("for_stock")))
    dcp.load({"m": target}, storage_reader=reader)
    assert all(torch.equal(target[name], expected[name]) for name in expected)
    source = open_source(path("for_stock"))
    assert source.tensors["m.even"][0].whole_shape == (4, 6)
    assert len(source.tensors["m.even"]) == 2


@case
def what_all_ranks_have_is_written_once() -> None:
    state = {
        "replicated": placed(torch.arange(8.0), [Replicate()]),
        "plain": torch.arange(5),
        "same_too": torch.arange(6),
        "n": 4,
        "text": "on both",
    }
    folder = save(state, "once")
    names = [name for file in folder.glob("*.safetensors") for name in names_in(file)]
    assert sorted(names) == ["plain", "replicated", "same_too"]
    target = {
        "replicated": placed(torch.zeros(8), [Replicate()]),
        "plain": torch.zeros(5, dtype=torch.int64),
        "same_too": torch.zeros(6, dtype=torch.int64),
        "n": 0,
        "text": "",
    }
    load(target, "once")
    assert target["n"] == 4
    assert target["text"] == "on both"
    assert torch.equal(target["replicated"].to_local(), torch.arange(8.0))
    for document in open_save(folder).documents:  # every rank's says all
        assert document["tree"]["n"] == 4
        assert document["tree"]["plain"] == {"$": "tensor", "name": "plain"}


@case
def the_lowest_rank_writes_where_the_planner_says_so() -> None:
    state = {f"t{index}": torch.full((3,), float(index)) for index in range(4)}
    folder = save(state, "lowest", planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    assert [file.name for file in folder.glob("*.safetensors")] == [
        "tensors-rank-00000-of-00002.safetensors"
    ]
    documents = open_save(folder).documents
    assert documents[0]["tensors"] == {}
    assert documents[1]["tensors"] == {name: {"of_rank": 0} for name in state}


def names_in(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


class _Caching(DefaultSavePlanner):  # torch keeps the plans by the class's name
    pass


@case
def plans_that_are_kept_serve_the_next_save() -> None:
    for number in range(3):
        # The second rank's plan changes at last.
        size = 4 if RANK == 0 or number < 2 else 5
        state = {"w": placed(torch.full((4,), float(number)), [Shard(0)]), "n": number}
        state[f"of_{RANK}"] = torch.full((size,), number)
        save(state, f"kept{number}", planner=_Caching(enable_plan_caching=True))
    for number in range(3):
        target: dict[str, Any] = {"w": torch.zeros(4), "n": 0}
        target["of_1"] = torch.zeros(4 if number < 2 else 5, dtype=torch.int64)
        load(target, f"kept{number}")
        assert target["n"] == number
        assert target["w"].tolist() == [number] * 4
        assert target["of_1"].unique().tolist() == [number]


@case
def a_value_of_one_rank_reaches_both() -> None:
    save({"w": torch.ones(2), "both": 1, f"of_{RANK}": {"rank": RANK}}, "of_one")
    state: dict[str, Any] = {"of_0": {"rank": None}, "of_1": {"rank": None}, "both": None}
    load(state, "of_one")
    assert state == {"of_0": {"rank": 0}, "of_1": {"rank": 1}, "both": 1}


@case
def several_shards_of_a_tensor_on_one_rank_come_back() -> None:
    def sharded(fill: bool) -> ShardedTensor:
        shards = []
        for row in (RANK, RANK + 2):  # rows 0 and 2 on the first rank, 1 and 3 on the other
            local = torch.full((1, 3), float(row)) if fill else torch.zeros(1, 3)
            where = ShardMetadata([row, 0], [1, 3], placement=f"rank:{RANK}/cpu")
            shards.append(LocalShard(local, where))
        return init_from_local_shards(shards, 4, 3)

    save({"s": sharded(fill=True)}, "several")
    target = {"s": sharded(fill=False)}
    load(target, "several")
    for shard in target["s"].local_shards():
        assert shard.tensor.tolist() == [[float(shard.metadata.shard_offsets[0])] * 3]
    plain = {"s": torch.zeros(4, 3)}
    load(plain, "several")
    assert plain["s"].tolist() == [[float(row)] * 3 for row in range(4)]


@case
def shards_in_a_dtype_that_the_format_lacks_come_back() -> None:
    expected = torch.randn(5, 2, dtype=torch.complex128)
    save({"c": placed(expected, [Shard(0)])}, "complex")
    target = {"c": placed(torch.zeros_like(expected), [Shard(1)])}
    load(target, "complex")
    assert torch.equal(whole(target["c"]), expected)


@case
def a_sharded_model_resumes() -> None:
    def made() -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    model = made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    save({"model": model.state_dict()}, "fsdp")
    other = made()
    load({"model": (state := other.state_dict())}, "fsdp")
    other.load_state_dict(state)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two))


class _FailsOnOneRank(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if RANK == 1:
            raise OSError("no space left, let us say")
        return super().resolve_data(write_item)


@case
def an_error_of_one_rank_is_raised_on_both_and_nothing_is_published() -> None:
    state = {"w": placed(torch.ones(4), [Shard(0)]), "n": 3}
    writer = ResidencyStorageWriter(path("failing"))
    with pytest.raises(CheckpointException, match="no space left, let us say"):
        dcp.save(state, storage_writer=writer, planner=_FailsOnOneRank())
    assert not path("failing").exists()
    dcp.save(state, storage_writer=writer)
    dist.barrier()
    assert [file.name for file in FOLDER.glob(".saving-*")] == []
    target = {"w": placed(torch.zeros(4), [Shard(0)]), "n": 0}
    load(target, "failing")
    assert torch.equal(whole(target["w"]), torch.ones(4))


@case
def a_rank_that_has_nothing_to_write_is_no_hindrance() -> None:
    state = {"w": torch.ones(3)}
    save(state, "idle", planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    assert load({"w": torch.zeros(3)}, "idle")["w"].tolist() == [1, 1, 1]


@case
def shards_on_the_device_are_saved_after_what_is_queued_there() -> None:
    mesh = init_device_mesh("sim", (2,))
    expected = torch.randn(5, 300, generator=torch.Generator().manual_seed(4))
    value = distribute_tensor(expected.to("sim"), mesh, [Shard(0)])
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        value.to_local().mul_(2)  # late: it runs when something waits for it
        save({"w": value}, "device")
    torch.accelerator.current_stream().wait_stream(side)
    target = distribute_tensor(torch.zeros(5, 300).to("sim"), mesh, [Shard(1)])
    load({"w": target}, "device")
    assert torch.equal(whole(target).cpu(), 2 * expected)


@case
def an_asynchronous_save_of_two_ranks_is_that_of_the_call() -> None:
    local = torch.arange(6.0)
    state = {"w": placed(local.clone(), [Shard(0)])}
    future: Any = dcp.async_save(state, storage_writer=ResidencyStorageWriter(path("async")))
    state["w"].to_local().zero_()
    future.result(timeout=60)
    target = {"w": torch.zeros(6)}
    load(target, "async")
    assert torch.equal(target["w"], local)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(FOLDER / "store"), 2)
    sim.enable("1GiB", schedule="late", check_races=True)
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=RANK, world_size=2)
    case.run(FOLDER / f"{PHASE}{RANK}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
