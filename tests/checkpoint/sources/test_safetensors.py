"""Safetensors files and directories: what is in them is found, and what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stored_contents import bits, contents_of, whole

from residency import CorruptSaveError, RefusedError
from residency._checkpoint._sources import TensorName, open_source

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def raw_file(path: Path, header: dict[str, Any] | bytes, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: tuple[int, ...], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_the_format_is_found_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    data = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        data %= 2
    saved = {"a": data.view(dtype).view(2, 3), "scalar": data.view(dtype)[0].clone()}
    saved["empty"] = torch.empty(0, 4, dtype=dtype)
    if dtype == torch.float4_e2m1fn_x2:
        del saved["scalar"]  # a row of half a byte has no scalar
    save_file(saved, tmp_path / "all.safetensors")
    with open_source(tmp_path / "all.safetensors") as source:
        assert source.kind == "safetensors"
        assert set(source.tensors) == set(saved)
        assert source.values == {name: TensorName(name) for name in saved}
        for name, expected in saved.items():
            [stored] = source.tensors[name]
            assert bits(contents_of(stored)) == bits(expected)
            assert stored.shape == stored.whole_shape
    assert source.tensors == {}


def test_a_directory_with_an_index_gives_the_tensors_that_the_index_names(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "old": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model-2.safetensors")
    save_file({"a": torch.full((3,), 7.0)}, tmp_path / "adapter.safetensors")  # of something else
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        source = open_source(path)
        assert set(source.tensors) == {"a", "b"}
        assert whole(list(source.tensors["a"])).tolist() == [1, 1, 1]


def test_an_index_of_another_name_counts_unless_there_are_two(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    index = json.dumps({"weight_map": {"a": "x.safetensors"}})
    (tmp_path / "unet.safetensors.index.json").write_text(index)
    assert set(open_source(tmp_path).tensors) == {"a"}
    (tmp_path / "unet.fp16.safetensors.index.json").write_text(index)
    with pytest.raises(RefusedError, match=r"several indexes .*unet\.fp16"):
        open_source(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert set(open_source(tmp_path).tensors) == {"a"}


def test_a_directory_without_an_index_gives_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(4)}, tmp_path / "two.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert set(open_source(tmp_path).tensors) == {"a", "b"}
    save_file({"b": torch.ones(4)}, tmp_path / "three.safetensors")
    with pytest.raises(RefusedError, match=r"'b' in several files \(three.safetensors, two"):
        open_source(tmp_path)


def test_shards_are_put_together_by_the_offsets_in_their_headers(tmp_path: Path) -> None:
    expected = torch.randn(5, 4)
    parts = {0: expected[:3], 3: expected[3:]}
    for begin, part in parts.items():
        said = json.dumps({"w": {"saved_offsets": [begin, 0]}})
        save_file(
            {"w": part.contiguous()},
            tmp_path / f"shard-{begin}.safetensors",
            metadata={"DCP_SHARDING_INFO": said},
        )
    source = open_source(tmp_path)
    shards = list(source.tensors["w"])
    assert [shard.whole_shape for shard in shards] == [(5, 4), (5, 4)]
    assert all(shard.shape != shard.whole_shape for shard in shards)
    assert bits(whole(shards)) == bits(expected)
    (tmp_path / "shard-0.safetensors").unlink()
    with pytest.raises(CorruptSaveError, match=r"'w'.*8 elements.*has 20"):
        open_source(tmp_path)


def test_a_shard_that_several_ranks_wrote_counts_once(tmp_path: Path) -> None:
    for rank in range(2):
        said = json.dumps({"w": {"saved_offsets": [0]}})
        save_file(
            {"w": torch.arange(4)},
            tmp_path / f"shard-{rank}.safetensors",
            metadata={"DCP_SHARDING_INFO": said},
        )
    [stored] = open_source(tmp_path).tensors["w"]
    assert stored.file == tmp_path / "shard-0.safetensors"


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [
        ([[0, 0], [1, 0]], "overlap"),
        ([[0, 0], [3, 0]], "missing"),
        ([[0, 0], [2, 1]], "missing"),
        ([[0, 0], [2]], r"\[2\]"),
        ([[0, 0], [2, -1]], r"\(2, -1\)"),
    ],
)
def test_shards_that_do_not_fit_each_other_are_named(
    tmp_path: Path, offsets: list[list[int]], problem: str
) -> None:
    for rank, begin in enumerate(offsets):
        said = json.dumps({"w": {"saved_offsets": begin}})
        save_file(
            {"w": torch.ones(2, 4)},
            tmp_path / f"shard-{rank}.safetensors",
            metadata={"DCP_SHARDING_INFO": said},
        )
    with pytest.raises(CorruptSaveError, match=rf"'w'.*{problem}|{problem}.*'w'"):
        open_source(tmp_path)


LIES: dict[str, tuple[dict[str, Any] | bytes, int, str]] = {
    "data cut off": (
        {"a": entry(0, 8, (2,)), "b": entry(8, 16, (2,))},
        12,
        "truncated: .* bytes, expected",
    ),
    "bytes behind": ({"a": entry(0, 8, (2,))}, 9, "too long"),
    "a hole": ({"a": entry(0, 8, (2,)), "b": entry(12, 20, (2,))}, 20, "'b' leave a hole"),
    "an overlap": ({"a": entry(0, 8, (2,)), "b": entry(4, 12, (2,))}, 12, "'b' overlap"),
    "not from 0": ({"a": entry(4, 12, (2,))}, 12, "'a' leave a hole"),
    "too few bytes": ({"a": entry(0, 8, (3,))}, 8, r"'a' has 8 bytes for F32 .*\[3\]"),
    "ends before it begins": ({"a": entry(8, 0, (2,))}, 8, "'a'"),
    "negative offset": ({"a": entry(-8, 0, (2,))}, 8, "'a'"),
    "negative size": ({"a": entry(0, 8, (-2,))}, 8, "'a'"),
    "offset beyond 64 bits": ({"a": entry(0, 2**80, (2**78,))}, 8, "truncated"),
    "fractional size": ({"a": {**entry(0, 8, ()), "shape": [2.0]}}, 8, "'a'"),
    "unknown dtype": ({"a": entry(0, 8, (2,), "F33")}, 8, "'a' is 'F33'"),
    "half a byte": ({"a": entry(0, 1, (2, 1), "F4")}, 1, "half a byte"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "'a'"),
    "not an entry": ({"a": 3}, 8, "'a'"),
    "not json": (b"{not json}", 8, "header is"),
    "not an object": (b"[1, 2]", 8, "header is"),
    "nested without end": (b'{"a":' + b"[" * 200_000, 8, "header is"),
    "a name twice": (b'{"a":1,"a":1}', 8, "'a' stands twice"),
    "metadata is a list": (b'{"__metadata__":[1]}', 0, "metadata is no"),
    "offsets are no json": (b'{"__metadata__":{"DCP_SHARDING_INFO":"{"}}', 0, "not readable"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_header_that_lies_is_found_out(tmp_path: Path, case: str) -> None:
    header, num_bytes, problem = LIES[case]
    path = raw_file(tmp_path / "bad.safetensors", header, b"\1" * num_bytes)
    with pytest.raises(CorruptSaveError, match=problem) as error:
        open_source(path)
    assert error.value.file == "bad.safetensors"


def test_a_file_cut_off_anywhere_is_named_with_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(5), "b": torch.ones(3)}, path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptSaveError) as error:
            open_source(path)
        assert error.value.file == path.name


def test_a_dtype_that_torch_lacks_is_refused_by_name(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", {"a": entry(0, 3, (4,), "F6_E2M3")}, b"123")
    with pytest.raises(RefusedError, match=r"'a' .* is F6_E2M3"):
        open_source(path)


INDEXES: dict[str, tuple[str, type[Exception], str]] = {
    "missing file": ('{"weight_map": {"a": "gone.safetensors"}}', CorruptSaveError, "'gone"),
    "missing tensor": ('{"weight_map": {"b": "x.safetensors"}}', CorruptSaveError, "'b' is in 'x"),
    "a name twice": ('{"weight_map": {"a": "x", "a": "y"}}', CorruptSaveError, "'a' stands twice"),
    "elsewhere": ('{"weight_map": {"a": "../x.safetensors"}}', RefusedError, "outside of"),
    "absolute": ('{"weight_map": {"a": "/etc/passwd"}}', RefusedError, "outside of"),
    "no name": ('{"weight_map": {"a": 3}}', CorruptSaveError, "3 for a file's name"),
    "no map": ('{"weight_map": []}', CorruptSaveError, "weight map"),
    "nothing": ("{}", CorruptSaveError, "no index"),
    "not json": ("}", CorruptSaveError, "no index"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_lies_is_found_out(tmp_path: Path, case: str) -> None:
    text, kind, problem = INDEXES[case]
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(kind, match=problem):
        open_source(tmp_path)


def test_a_path_that_holds_nothing_known_is_refused_with_what_was_found(tmp_path: Path) -> None:
    cases: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
        "absent": (lambda path: None, RefusedError, "There is nothing at"),
        "an empty directory": (Path.mkdir, RefusedError, "holds nothing"),
        "an empty file": (Path.touch, CorruptSaveError, "is empty"),
        "text": (lambda path: path.write_text("lorem ipsum"), RefusedError, "begins with b'lorem"),
    }
    for name, (make, kind, problem) in cases.items():
        make(tmp_path / name)
        with pytest.raises(kind, match=problem):
            open_source(tmp_path / name)
    with pytest.raises(RefusedError, match="holds 'an empty directory', 'an empty file', 'text'"):
        open_source(tmp_path)


def test_a_safetensors_file_is_known_by_its_content(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "weights.bin")
    assert set(open_source(tmp_path / "weights.bin").tensors) == {"a"}
