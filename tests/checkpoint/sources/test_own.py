"""Saves of this library as a source: what the document says of tensors, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_contents import bits, whole

from residency import CheckpointError, CorruptSaveError, RefusedError
from residency._checkpoint._disk._manifest import Record
from residency._checkpoint._disk._parts import FilePlan, Part
from residency._checkpoint._disk._publish import CheckpointDirectory, SaveRequest
from residency._checkpoint._document._dtypes import STORED_DTYPES
from residency._checkpoint._sources import open_source

Tensors = dict[str, tuple[torch.Tensor, tuple[int, ...] | None]]


def part(name: str, tensor: torch.Tensor, offsets: tuple[int, ...] | None = None) -> Part:
    data = bytearray(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    dtype = STORED_DTYPES.get(tensor.dtype)
    shape = tuple(tensor.shape) if dtype else (tensor.nbytes,)
    record = Record(name, dtype or "U8", shape, tensor.nbytes, offsets)
    return Part(record, lambda: memoryview(data), lambda: None)


def published(folder: Path, notes: dict[str, Any], *parts: Part, step: int = 1) -> Path:
    document = {"tree": {"note": step}, "tensors": notes}
    plan = FilePlan("model.safetensors", parts)
    request = SaveRequest(step, [plan], document, {}, 0, 1, f"token{step}")
    CheckpointDirectory(folder).save(request, timeout_seconds=10)
    return folder / f"step-{step:08d}"


def test_a_save_is_found_with_its_values_and_checksums(tmp_path: Path) -> None:
    weights = torch.randn(3, 4)
    path = published(tmp_path, {}, part("w", weights))
    for given in (path, path / "manifest.json", tmp_path):
        with open_source(given) as source:
            assert source.kind == "residency"
            assert source.path == path
            assert source.values == {"note": 1}
            assert list(source.checksums) == [path / "model.safetensors"]
            assert bits(whole(list(source.tensors["w"]))) == bits(weights)
    assert source.checksums == {}


def test_of_several_saves_the_newest_is_opened(tmp_path: Path) -> None:
    for step in (9, 10, 8):
        published(tmp_path, {}, part("w", torch.ones(1)), step=step)
    (tmp_path / "step-00000011").mkdir()  # not published: it has no manifest
    assert open_source(tmp_path).values == {"note": 10}


def test_what_is_stored_as_bytes_and_what_shares_bytes_comes_back(tmp_path: Path) -> None:
    strange = torch.randn(2, 3, dtype=torch.complex128)
    base = torch.arange(24.0)
    notes = {
        "strange": {"dtype": "complex128", "shape": [2, 3]},
        "view": {"dtype": "float32", "shape": [2, 3], "stride": [3, 1], "of": "base", "start": 16},
        "across": {"dtype": "float32", "shape": [3, 2], "stride": [1, 3], "of": "base", "start": 0},
        "as_bytes": {"dtype": "uint8", "shape": [4], "stride": [1], "of": "base", "start": 4},
    }
    path = published(tmp_path, notes, part("strange", strange), part("base", base))
    source = open_source(path)
    assert bits(whole(list(source.tensors["strange"]))) == bits(strange)
    assert bits(whole(list(source.tensors["view"]))) == bits(base[4:10].view(2, 3))
    assert bits(whole(list(source.tensors["as_bytes"]))) == bits(base.view(torch.uint8)[4:8])
    [across] = source.tensors["across"]
    assert across.stride == (1, 3)
    assert (across.start, across.num_bytes) == (source.tensors["base"][0].start, 6 * 4)


def test_a_tensor_with_no_element_on_a_rank_is_no_fault(tmp_path: Path) -> None:
    notes = {"w": {"whole_shape": [2], "offsets": [0]}, "x": {"whole_shape": [0], "offsets": None}}
    source = open_source(published(tmp_path, notes, part("w", torch.ones(2), (0,))))
    assert list(source.tensors) == ["w"]


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "shards missing": ({"w": {"whole_shape": [9], "offsets": [0]}}, "4 elements .* has 9"),
    "a view of nothing": (
        {"v": {"dtype": "float32", "shape": [1], "stride": [1], "of": "gone", "start": 0}},
        "no bytes for 'v'",
    ),
    "a view beyond": (
        {"v": {"dtype": "float32", "shape": [4], "stride": [1], "of": "w", "start": 4}},
        "'v' is inconsistent",
    ),
    "a view before": (
        {"v": {"dtype": "float32", "shape": [1], "stride": [1], "of": "w", "start": -4}},
        "'v' is inconsistent",
    ),
    "no such dtype": ({"w": {"dtype": "float31", "shape": [4]}}, "'w' is inconsistent"),
    "no bytes at all": ({"x": {"dtype": "float32", "shape": [4]}}, "no bytes for 'x'"),
    "a shape of text": ({"w": {"dtype": "float32", "shape": "four"}}, "'w' is inconsistent"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_document_that_does_not_fit_the_files_is_found_out(tmp_path: Path, case: str) -> None:
    notes, problem = FAULTS[case]
    with pytest.raises(CorruptSaveError, match=problem):
        open_source(published(tmp_path, notes, part("w", torch.ones(4))))


def test_files_that_do_not_fit_the_manifest_are_named(tmp_path: Path) -> None:
    path = published(tmp_path, {}, part("w", torch.ones(4)))
    file = path / "model.safetensors"
    data = file.read_bytes()
    for changed in (data[:-1], data + b"x", b"\7" + data[1:], data.replace(b'"w"', b'"v"')):
        file.write_bytes(changed)
        with pytest.raises(CorruptSaveError) as error:
            open_source(path)
        assert error.value.file == "model.safetensors"
    file.unlink()
    with pytest.raises(CorruptSaveError, match="missing"):
        open_source(path)


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = published(tmp_path, {}, part("w", torch.ones(4)))
    manifest = path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"note":1', '"note":2'))
    with pytest.raises(CorruptSaveError, match="checksum"):
        open_source(path)
    manifest.write_text(json.dumps({"format": "of something else"}))
    with pytest.raises(CheckpointError):
        open_source(path)
    manifest.unlink()
    assert open_source(path).kind == "safetensors"  # what is left is safetensors files
    (path / "model.safetensors").unlink()
    with pytest.raises(RefusedError, match="holds nothing"):
        open_source(path)
