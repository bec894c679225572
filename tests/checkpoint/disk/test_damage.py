"""Whatever byte of a save changes, and whatever is missing: it is found, and said where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from residency._checkpoint._disk._header import (
    ALIGNMENT,
    header_length,
    layout_order,
    make_header,
    parse_header,
)
from residency._checkpoint._disk._manifest import Record, parse_manifest
from residency._checkpoint._disk._open_save import open_save
from residency._checkpoint._disk._verify import verify_save
from residency._errors import CheckpointError, CorruptSaveError

STRIDE = 17  # every so many bytes one is flipped: a prime, so that every place of a page is met


@pytest.fixture
def folder(saves: ModuleType, tmp_path: Path) -> Path:
    saves.save(tmp_path, 1, 11)
    return tmp_path / "step-00000001"


def flipped(file: Path, at: int) -> Callable[[], None]:
    """Flips one bit, and returns what flips it back."""
    bit = 1 << (at % 8)

    def flip() -> None:
        with file.open("r+b") as stream:
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ bit]))

    flip()
    return flip


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_every_flipped_byte_is_found_and_named(
    saves: ModuleType, tmp_path: Path, folder: Path, name: str
) -> None:
    where = saves.directory(tmp_path)
    entries = [e for es in where.open(1).entries.values() for e in es if e.file == name]
    for at in range(0, (folder / name).stat().st_size, STRIDE if name != "manifest.json" else 1):
        flip_back = flipped(folder / name, at)
        damages = verify_save(where, 1).damages
        assert damages, f"byte {at} of {name}"
        assert {damage.file for damage in damages} == {name}
        if name != "manifest.json" and at >= ALIGNMENT:
            (damage,) = damages
            (owner,) = [e for e in entries if 0 <= at - e.start < e.num_bytes]
            assert owner.name in damage.tensors
            assert damage.offset == at - at % saves.CHUNK_BYTES
            assert damage.file in damage.reason
            assert owner.name in damage.reason
        else:  # what says what is in the save: it is not even opened
            with pytest.raises(CorruptSaveError) as caught:
                where.open(1)
            assert caught.value.file == name
        flip_back()
    whole = verify_save(where, 1)
    assert whole.damages == ()
    files = [file for file in folder.iterdir() if file.suffix == ".safetensors"]
    assert whole.num_bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_every_truncated_missing_or_longer_file_is_found_and_named(
    saves: ModuleType, tmp_path: Path, folder: Path, name: str
) -> None:
    where = saves.directory(tmp_path)
    whole = (folder / name).read_bytes()
    lengths = [*range(0, len(whole), max(1, len(whole) // 40)), len(whole) - 1]
    for data in [*(whole[:length] for length in lengths), whole + b"\0", whole + whole, None]:
        (folder / name).unlink(missing_ok=True)
        if data is not None:
            (folder / name).write_bytes(data)
        if name == "manifest.json" and data is None:
            assert where.steps() == []  # without it there is no save
            continue
        assert name in {damage.file for damage in verify_save(where, 1).damages}
        with pytest.raises(CorruptSaveError, match=name) as caught:
            where.open(1)
        assert caught.value.file == name


def test_a_disk_that_does_not_read_is_told_with_the_tensors_that_it_kept(
    saves: ModuleType, tmp_path: Path, folder: Path
) -> None:
    class BadSector(saves.System):  # type: ignore[misc,name-defined]
        def perform(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
            if name == "preadv" and arguments[2] == saves.CHUNK_BYTES:
                raise OSError(5, "Input/output error")
            return function(*arguments)

    found = verify_save(saves.directory(tmp_path), 1, system=BadSector())
    assert [(d.file, d.offset) for d in found.damages] == [
        ("model.safetensors", saves.CHUNK_BYTES),
        ("optimizer.safetensors", saves.CHUNK_BYTES),
    ]
    assert found.damages[0].tensors == ("model.pages",)
    assert "Input/output error" in found.damages[0].reason


def test_a_save_under_the_name_of_another_step_is_damaged(
    saves: ModuleType, tmp_path: Path, folder: Path
) -> None:
    shutil.copytree(folder, tmp_path / "step-00000007")
    with pytest.raises(CorruptSaveError, match="holds step 1, expected step 7"):
        saves.directory(tmp_path).open(7)


def test_two_files_that_are_exchanged_are_found(
    saves: ModuleType, tmp_path: Path, folder: Path
) -> None:
    one, other = folder / "model.safetensors", folder / "optimizer.safetensors"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    with pytest.raises(CorruptSaveError):
        open_save(folder, 1)


@pytest.mark.parametrize("number", [b"1e400", b"-1e999"])
def test_a_number_that_json_reads_and_does_not_write_is_damage(folder: Path, number: bytes) -> None:
    manifest = (folder / "manifest.json").read_bytes()
    assert b'"loss":11.0' in manifest
    (folder / "manifest.json").write_bytes(manifest.replace(b'"loss":11.0', b'"loss":' + number))
    with pytest.raises(CorruptSaveError, match="a value that no manifest has"):
        open_save(folder, 1)


def test_a_manifest_of_a_later_version_is_not_called_damaged(folder: Path) -> None:
    import zlib

    fields = json.loads((folder / "manifest.json").read_bytes())
    del fields["crc32"]
    fields["version"] = 2

    def dump(value: Any, sort_keys: bool) -> bytes:
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":")).encode()

    data = dump({**fields, "crc32": zlib.crc32(dump(fields, True))}, False)
    with pytest.raises(CheckpointError, match="is of version 2") as caught:
        parse_manifest(data)
    assert not isinstance(caught.value, CorruptSaveError)


# Headers ----------------------------------------------------------------------------------------


def header(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return len(data).to_bytes(8, "little") + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a": entry(dtype="F31")}, "which the format does not know"),
        ({"a": entry(dtype=None)}, "which the format does not know"),
        ({"a": entry(shape=[-2])}, "the shape of 'a'"),
        ({"a": entry(shape=[True, 2])}, "the shape of 'a'"),
        ({"a": entry(shape=[2.0])}, "the shape of 'a'"),
        ({"a": entry(shape=2)}, "the shape of 'a'"),
        ({"a": entry(shape=[3])}, "has 8 bytes for F32"),
        ({"a": entry(shape=[2**70, 2**70])}, "has 8 bytes for F32"),
        ({"a": entry(dtype="F4", shape=[3], offsets=[0, 1])}, "has 1 bytes for F4"),
        ({"a": entry(offsets=[8, 0])}, "the offsets of 'a'"),
        ({"a": entry(offsets=[0])}, "the offsets of 'a'"),
        ({"a": entry(offsets=[0, "8"])}, "the offsets of 'a'"),
        ({"a": {"dtype": "F32"}}, "not a dtype, a shape and two offsets"),
        ({"a": [1]}, "not a dtype, a shape and two offsets"),
        ({"a": entry(), "b": entry()}, "overlap"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, "overlap"),
        ({"a": entry(offsets=[4, 12])}, "hole"),
        ({"a": entry(), "b": entry(offsets=[8, 16])}, "truncated"),
        ({}, "too long"),
        ({"__metadata__": [], "a": entry()}, "metadata"),
        ({"__metadata__": {"x": 1}, "a": entry()}, "metadata"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "[]"}, "a": entry()}, "DCP_SHARDING_INFO"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "{"}, "a": entry()}, "DCP_SHARDING_INFO"),
        (
            {
                "__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [0, 0]}}'},
                "a": entry(),
            },
            "the shard 'a'",
        ),
        (
            {"__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [-1]}}'}, "a": entry()},
            "the shard 'a'",
        ),
    ],
)
def test_a_header_that_contradicts_itself_is_damaged(fields: dict[str, Any], words: str) -> None:
    data = header(json.dumps(fields))
    with pytest.raises(CorruptSaveError, match=words) as caught:
        parse_header(data, len(data) + 8, file="x.safetensors")
    assert caught.value.file == "x.safetensors"
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1, "a": 1}', b"[" * 100_000],
    ids=["empty", "list", "open", "no text", "nan", "twice", "deep"],
)
def test_a_header_that_is_no_json_is_damaged(text: bytes) -> None:
    with pytest.raises(CorruptSaveError, match=r"x\.safetensors"):
        parse_header(header(text), 8 + len(text), file="x.safetensors")


@pytest.mark.parametrize(
    ("prefix", "file_bytes", "words"),
    [
        (b"", 0, "too few"),
        (b"\0" * 7, 7, "too few"),
        ((100_000_001).to_bytes(8, "little"), 2**40, "above 100000000"),
        ((93).to_bytes(8, "little"), 100, "claims 93 bytes of 100"),
        (b"\xff" * 8, 100, "above"),
    ],
)
def test_a_header_of_an_impossible_length_is_damaged(
    prefix: bytes, file_bytes: int, words: str
) -> None:
    with pytest.raises(CorruptSaveError, match=words):
        header_length(prefix, file_bytes, file="x.safetensors")


RECORDS = [
    Record("odd", "I8", (3,), 3),
    Record("page", "F32", (32, 32), 4096, offsets=(64, 0)),
    Record("half", "BF16", (5,), 10, offsets=(7,)),
    Record("scalar", "F64", (), 8),
    Record("none", "F32", (0, 4), 0),
]


def test_a_header_that_was_made_is_parsed_to_the_same_records() -> None:
    ordered = [RECORDS[index] for index in layout_order(RECORDS)]
    assert [record.name for record in ordered] == ["page", "none", "scalar", "half", "odd"]
    data = make_header(ordered, file="x")
    assert len(data) % ALIGNMENT == 0
    assert header_length(data, 10**6, file="x") == len(data)
    found = parse_header(data, len(data) + 4096 + 21, file="x")
    # A stock reader of shards wants offsets for every tensor of the file.
    assert {e.name: e.offsets for e in found} == {
        "page": (64, 0),
        "half": (7,),
        "scalar": (),
        "none": (0, 0),
        "odd": (0,),
    }
    assert {e.name: e.start - len(data) for e in found} == {
        "page": 0,
        "none": 4096,
        "scalar": 4096,
        "half": 4104,
        "odd": 4114,
    }


def test_records_that_contradict_themselves_are_not_written() -> None:
    for records, words in [
        ([Record("a", "F32", (2,), 9)], "has 9 bytes"),
        ([Record("a", "X32", (2,), 8)], "'X32'"),
        ([Record("a", "I8", (1,), 1), Record("a", "I8", (1,), 1)], "two tensors named 'a'"),
        ([Record("a", "I8", (1,), 1, offsets=(0, 0))], "2 offsets for 1 dimensions"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            make_header(records, file="x")


def test_the_stock_library_reads_what_was_written(saves: ModuleType, folder: Path) -> None:
    import safetensors

    expected = saves.tensors(11)
    for file in folder.glob("*.safetensors"):
        for name, fields in safetensors.deserialize(file.read_bytes()):
            assert bytes(fields["data"]) == expected.pop(name)
    assert expected == {}
