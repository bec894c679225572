"""What torch.distributed.checkpoint and its planners ask of the storage writer and reader."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

sys.path.insert(0, str(Path(__file__).parent))
from dcp_states import is_same, load, save

from residency import InvalidArgumentError, RefusedError
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._sources import open_source
from residency.integrations.dcp import ResidencyStorageReader, ResidencyStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


def test_a_save_replaces_another_of_its_step_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-00000010"
    save({"n": 1}, path)
    writer = ResidencyStorageWriter(path, overwrite=True)

    def fail(*args: object) -> None:
        raise OSError("no space left, let us say")

    with monkeypatch.context() as broken:
        broken.setattr("residency.integrations.dcp._writer.write_files", fail)
        with pytest.raises(CheckpointException):
            dcp.save({"n": 2}, storage_writer=writer)
    assert load({"n": None}, path) == {"n": 1}
    dcp.save({"n": 2}, storage_writer=writer)
    assert load({"n": None}, path) == {"n": 2}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", path.name]
    assert CheckpointDirectory(tmp_path).steps() == [10]
    with pytest.raises(InvalidArgumentError, match=r"step-00000010, and .*'s'"):
        ResidencyStorageWriter(tmp_path / "s", overwrite=True)


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
    with pytest.raises(CheckpointException, match="the bytes of 'w' failed: the disk went away"):
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
