"""Directories of torch.distributed.checkpoint, in both of its flavours."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stored_contents import bits, is_same, whole
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from residency import CorruptSaveError, RefusedError
from residency._checkpoint._sources import TensorName, open_source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Trap = tuple[Any, Path]


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(2, 3, 5, 5))  # changes the statistics
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": {
            "state": {name: dict(optimizer.state[p]) for name, p in model.named_parameters()},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": (0.8, 0.9)}],
        },
        "step": 7,
        "list": [torch.arange(3), [torch.ones(2), 4], None, "text"],
        "pair": (torch.arange(2), 5),
        "bytes": torch.arange(4, dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.parametrize("settings", [{}, {"thread_count": 2}, {"single_file_per_rank": False}])
def test_a_checkpoint_comes_back_nested_and_bit_for_bit(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path, **settings))
    with open_source(tmp_path) as source:
        assert source.kind == "dcp"
        assert is_same(source.values, state(), source)
        assert {"model.0.weight", "list.1.0", "pair.0", "scalar"} < set(source.tensors)
        stored = [one for shards in source.tensors.values() for one in shards]
        assert all(one.file is not None for one in stored)
    assert open_source(tmp_path / ".metadata").kind == "dcp"


def test_tensors_in_another_order_are_mapped(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    saved = {"image": image, "transposed": torch.randn(3, 5).t(), "one": torch.ones(3)}
    dcp.save(saved, checkpoint_id=tmp_path)
    source = open_source(tmp_path)
    assert is_same(source.values, saved, source)
    assert source.tensors["image"][0].tensor is not None


def written(path: Path, change: Callable[[Metadata], object]) -> Path:
    """Writes a checkpoint with a `.metadata` of which something is changed."""
    saved = {"w": torch.arange(6.0).view(2, 3), "n": 5}
    dcp.save(saved, checkpoint_id=path)
    file = path / ".metadata"
    found = pickle.loads(file.read_bytes())
    changed = change(found)
    file.write_bytes(pickle.dumps(changed if isinstance(changed, dict) else found))
    return path


def test_shards_are_put_together_and_those_of_several_ranks_count_once(tmp_path: Path) -> None:
    expected = torch.randn(5, 3)
    saved = {"top": expected[:2].clone(), "bottom": expected[2:].clone()}
    dcp.save(saved, checkpoint_id=tmp_path)
    file = tmp_path / ".metadata"
    found = pickle.loads(file.read_bytes())
    places = {index.fqn: place for index, place in found.storage_data.items()}
    chunks = [((0, 0), (2, 3)), ((2, 0), (3, 3)), ((0, 0), (2, 3))]
    found.state_dict_metadata = {
        "w": TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size([5, 3]),
            [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in chunks],
        )
    }
    found.storage_data = {
        MetadataIndex("w", [0, 0]): places["top"],
        MetadataIndex("w", [2, 0]): places["bottom"],
    }
    found.planner_data = None
    file.write_bytes(pickle.dumps(found))
    source = open_source(tmp_path)
    assert source.values == {"w": TensorName("w")}
    assert [shard.offsets for shard in source.tensors["w"]] == [(0, 0), (2, 0)]
    assert bits(whole(list(source.tensors["w"]))) == bits(expected)
    found.state_dict_metadata["w"].chunks[1:] = []
    file.write_bytes(pickle.dumps(found))
    with pytest.raises(CorruptSaveError, match=r"'w' .* 6 elements .*\(5, 3\) has 15"):
        open_source(tmp_path)


@pytest.mark.parametrize("save_distributed", [True, False])
def test_the_safetensors_flavour_is_found(tmp_path: Path, save_distributed: bool) -> None:
    saved = {"model": {"w": torch.randn(3, 4), "b": torch.arange(5)}}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=save_distributed)
    dcp.save(saved, storage_writer=writer)
    source = open_source(tmp_path)
    assert source.kind == "safetensors"
    assert set(source.tensors) == {"model.w", "model.b"}
    for name, expected in saved["model"].items():
        assert bits(whole(list(source.tensors[f"model.{name}"]))) == bits(expected)


def _drop_place(found: Metadata) -> None:
    found.storage_data = {i: p for i, p in found.storage_data.items() if i.fqn != "w"}


def _place(**changes: Any) -> Callable[[Metadata], None]:
    def change(found: Metadata) -> None:
        for index, place in found.storage_data.items():
            if index.fqn == "w":
                vars(place).update(changes)

    return change


def _entry(**changes: Any) -> Callable[[Metadata], None]:
    return lambda found: vars(found.state_dict_metadata["w"]).update(changes)


def _chunk(**changes: Any) -> Callable[[Metadata], None]:
    return lambda found: vars(found.state_dict_metadata["w"].chunks[0]).update(changes)


def _swap(found: Metadata) -> None:
    places = {index.fqn: place for index, place in found.storage_data.items()}
    found.storage_data[MetadataIndex("w", [0, 0])] = places["n"]


FAULTS: dict[str, tuple[Callable[[Metadata], object], type[Exception], str]] = {
    "no place": (_drop_place, CorruptSaveError, "does not say where 'w'"),
    "no file": (_place(relative_path="gone"), CorruptSaveError, "'gone', which is not there"),
    "a file elsewhere": (_place(relative_path="../x"), RefusedError, "outside of"),
    "an offset beyond": (_place(offset=10**9), CorruptSaveError, "too few"),
    "a negative offset": (_place(offset=-1), CorruptSaveError, "at -1"),
    "a length too short": (_place(length=100), CorruptSaveError, "no whole file of torch.save"),
    "an offset that is none": (_place(offset="x"), CorruptSaveError, "makes no sense"),
    "an extension": (_place(transform_descriptors=["stream.zstd"]), RefusedError, "'stream.zstd'"),
    "a shape too large": (_entry(size=torch.Size([4, 3])), CorruptSaveError, "6 elements"),
    "a shape of other rank": (_entry(size=torch.Size([6])), CorruptSaveError, r"of \(6,\)"),
    "a chunk of another shape": (
        _chunk(sizes=torch.Size([3, 2])),
        CorruptSaveError,
        r"\(3, 2\) at \(0, 0\) of \(2, 3\).*its item has \(2, 3\)",
    ),
    "a chunk outside": (_chunk(offsets=torch.Size([1, 0])), CorruptSaveError, "does not say where"),
    "no chunks": (_entry(chunks=[]), CorruptSaveError, "no bytes for 'w'"),
    "a value for a tensor": (_swap, CorruptSaveError, "'w' is a tensor, and its item is none"),
    "a path of nothing": (
        lambda found: vars(found).update(planner_data={"w": ()}),
        CorruptSaveError,
        "makes no sense",
    ),
    "a path far down a list": (
        lambda found: vars(found).update(planner_data={"w": ("l", 10**9)}),
        CorruptSaveError,
        "makes no sense",
    ),
    "no entries": (
        lambda found: vars(found).update(state_dict_metadata=None),
        CorruptSaveError,
        "makes no sense",
    ),
    "another object": (lambda found: {"a": 1}, CorruptSaveError, "holds a dict"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_metadata_that_does_not_fit_the_files_is_found_out(tmp_path: Path, case: str) -> None:
    change, kind, problem = FAULTS[case]
    path = written(tmp_path, change)
    with pytest.raises(kind, match=problem):
        open_source(path)


def test_metadata_cut_off_anywhere_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, lambda found: None)
    data = (path / ".metadata").read_bytes()
    for length in range(0, len(data), 11):
        (path / ".metadata").write_bytes(data[:length])
        with pytest.raises(CorruptSaveError, match=r"\.metadata is no whole pickle"):
            open_source(path)


def test_a_file_of_items_cut_off_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, lambda found: None)
    [file] = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptSaveError, match=r"\.distcp .*too few"):
        open_source(path)


def test_metadata_that_would_run_code_is_refused_by_name(tmp_path: Path, trap: Trap) -> None:
    bait, _ = trap
    path = written(tmp_path / "c", lambda found: vars(found).update(planner_data=bait))
    with pytest.raises(RefusedError, match=r"\.metadata .*posix\.mkdir.*nothing of it was run"):
        open_source(path)


def test_a_value_that_would_run_code_is_refused_by_name(tmp_path: Path, trap: Trap) -> None:
    bait, _ = trap
    dcp.save({"w": torch.ones(2), "value": bait}, checkpoint_id=tmp_path / "c")
    with pytest.raises(RefusedError, match=r"__0_0\.distcp .*posix\.mkdir"):
        open_source(tmp_path / "c")


def test_metadata_may_name_no_more_than_the_classes_of_a_checkpoint(tmp_path: Path) -> None:
    path = written(tmp_path, lambda found: None)
    for module, name in [
        ("torch.distributed.checkpoint.metadata", "dataclass"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("torch", "load"),
        ("builtins", "getattr"),
        ("torch._utils", "_rebuild_tensor_v2"),
    ]:
        (path / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())
        with pytest.raises(RefusedError, match=rf"asks for {module}\.{name}"):
            open_source(path)


def test_every_class_that_torch_pickles_into_metadata_is_known(tmp_path: Path) -> None:
    """A name that a later torch adds to these classes' pickles is found here."""
    found = Metadata(
        {},
        {"a": ("a", 0)},
        {MetadataIndex("a", [0], 3): filesystem._StorageInfo("f", 0, 1, ["zstd"])},
        metadata.StorageMeta(tmp_path, "save", "load", ["module"]),
        "1.0.0",
    )
    for properties in (
        TensorProperties(torch.float8_e4m3fn, torch.strided, True, torch.channels_last, True),
        TensorProperties(memory_format=torch.preserve_format),
    ):
        chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
        found.state_dict_metadata = {
            "a": TensorStorageMetadata(properties, torch.Size([0]), [chunk]),
            "b": metadata.BytesStorageMetadata(),
        }
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            stream = io.BytesIO()
            pickle.Pickler(stream, protocol).dump(found)
            (tmp_path / ".metadata").write_bytes(stream.getvalue())
            with pytest.raises(RefusedError, match=r"'a' .*\['zstd'\]"):
                open_source(tmp_path)
