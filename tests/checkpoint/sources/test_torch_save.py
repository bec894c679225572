"""Files of torch.save: read by their places in the file, and nothing in them runs."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_contents import is_same, whole
from torch import nn

from residency import CorruptSaveError, RefusedError
from residency._checkpoint._sources import TensorName, open_source

Trap = tuple[Any, Path]


def dtypes() -> list[torch.dtype]:
    """All that torch has, without quantized ones and those that no kernel knows."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left_out = re.compile(r"torch\.(q|bits|u?int[1-7]$)")
    return sorted((dtype for dtype in found if not left_out.match(str(dtype))), key=str)


def saved(path: Path, value: Any, **settings: Any) -> Path:
    torch.save(value, path, **settings)
    return path


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(5, 3))  # changes the statistics
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "seen": [1, 2.5, None, True, "text", b"\xff\x00", 2 + 3j],
        "nested": ({"a": [torch.arange(3)]}, torch.Size([2, 3]), torch.float16),
        "counts": Counter("aab"),
        "names": {"a", "b"},
        "raw": bytearray(b"xyz"),
        "rng": torch.get_rng_state(),
    }


def test_a_training_state_comes_back_bit_for_bit_from_places_in_the_file(tmp_path: Path) -> None:
    state = training_state()
    with open_source(saved(tmp_path / "state.pt", state)) as source:
        assert source.kind == "torch.save"
        assert is_same(source.values, state, source)
        assert {"model.0.weight", "optimizer.state.0.exp_avg", "nested.0.a.0"} < set(source.tensors)
        stored = [one for shards in source.tensors.values() for one in shards]
        assert all(one.file == tmp_path / "state.pt" and one.tensor is None for one in stored)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle_is_read(tmp_path: Path, protocol: int) -> None:
    state = training_state()
    state.pop("raw")  # torch.load refuses a bytearray's opcode, as it does most of protocol 5
    path = saved(tmp_path / "state.pt", state, pickle_protocol=protocol)
    with open_source(path) as source:
        assert is_same(source.values, state, source)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_every_dtype_of_torch_is_found_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    data = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        data %= 2
    state = {"a": data.view(dtype).view(2, 3), "empty": torch.empty(0, 2, dtype=dtype)}
    source = open_source(saved(tmp_path / "state.pt", state))
    assert is_same(source.values, state, source)


def test_views_and_ties_are_found_where_they_are_in_their_storage(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    state = {
        "base": base,
        "view": base[4:10].view(2, 3),
        "tie": base,
        "first": nn.Parameter(base[:1]),
    }
    source = open_source(saved(tmp_path / "state.pt", state))
    assert is_same(source.values, {**state, "first": base[:1]}, source)
    starts = {name: shards[0].start for name, shards in source.tensors.items()}
    assert starts["tie"] == starts["first"] == starts["base"]
    assert starts["view"] - starts["base"] == 4 * 4


def test_tensors_that_are_not_in_row_major_order_are_mapped(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {
        "channels_last": image,
        "transposed": torch.randn(3, 4).t(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "strided": torch.arange(10)[1::3],
        "one_row": torch.arange(4).view(1, 4).as_strided((1, 4), (99, 1)),
    }
    source = open_source(saved(tmp_path / "state.pt", state))
    assert is_same(source.values, state, source)
    mapped = {name for name, [stored] in source.tensors.items() if stored.tensor is not None}
    assert mapped == set(state) - {"one_row"}


def test_what_only_torch_can_judge_is_left_to_torch(tmp_path: Path) -> None:
    tagged = torch.arange(4.0)
    tagged.note = "kept by torch.save"  # type: ignore[attr-defined]
    state = {"tagged": tagged, "conjugate": torch.randn(3, dtype=torch.complex64).conj()}
    source = open_source(saved(tmp_path / "state.pt", state))
    assert is_same(source.values, state, source)
    assert all(shards[0].tensor is not None for shards in source.tensors.values())


def test_a_tensor_alone_is_found(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "one.pt", torch.arange(3)))
    assert source.values == TensorName("")
    assert whole(list(source.tensors[""])).tolist() == [0, 1, 2]


def test_an_old_file_is_loaded_onto_the_host(tmp_path: Path) -> None:
    state = {"model": OrderedDict(w=torch.randn(3, 2)), "step": 3}
    path = saved(tmp_path / "old.pt", state, _use_new_zipfile_serialization=False)
    source = open_source(path)
    assert is_same(source.values, state, source)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_pickle_that_would_run_code_is_refused_by_name(
    tmp_path: Path, trap: Trap, is_new: bool
) -> None:
    bait, _ = trap
    path = tmp_path / "hostile.pt"
    state = {"w": torch.ones(2), "x": bait}
    torch.save(state, path, _use_new_zipfile_serialization=is_new)
    with pytest.raises(
        RefusedError, match=r"hostile\.pt .*(posix|nt|os)\.mkdir.*nothing of it was"
    ):
        open_source(path)


def test_a_plain_pickle_is_refused_or_named_as_damaged(tmp_path: Path, trap: Trap) -> None:
    bait, _ = trap
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(bait))
    with pytest.raises((RefusedError, CorruptSaveError), match=r"plain\.pkl"):
        open_source(tmp_path / "plain.pkl")


def test_a_pickle_cannot_change_what_the_reader_hands_out(tmp_path: Path) -> None:
    """A pickle may assign attributes to what it names: none of it may outlive the pickle."""
    path = tmp_path / "state.pt"
    for module, name in [
        ("collections", "Counter"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch", "FloatStorage"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch", "float32"),
    ]:
        # (None, {"update": 1}) as the state of the global itself.
        program = f"c{module}\n{name}\n(NX\6\0\0\0updateK\1stb.".encode("latin1")
        program = program.replace(b"(NX\6\0\0\0updateK\1st", b"N}X\6\0\0\0updateK\1s\x86")
        _replace_pickle(saved(path, 1), b"\x80\2" + program)
        with pytest.raises((CorruptSaveError, RefusedError)):
            open_source(path)
    assert callable(Counter.update)
    assert callable(OrderedDict.update)


def test_an_allocation_that_a_pickle_asks_for_is_not_made(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt", 1)
    _replace_pickle(
        path, b"\x80\2c__builtin__\nbytearray\n\x8a\6" + b"\xff\xff\xff\xff\xff\x7f\x85R."
    )
    with pytest.raises(CorruptSaveError, match="not made of bytes"):
        open_source(path)


def _replace_pickle(path: Path, program: bytes) -> None:
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in records.items():
            new.writestr(name, program if name.endswith("data.pkl") else data)


def _tensor_pickle(storage: tuple[Any, ...], *layout: Any) -> bytes:
    """Pickles a call that rebuilds a tensor, with whatever layout."""
    call = torch._utils._rebuild_tensor_v2

    class Rebuilt:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return call, (storage, *layout, False, OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value if value is storage else None

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump({"w": Rebuilt()})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("num_elements", "layout"),
    [
        (4, (0, (5,), (1,))),
        (4, (1, (4,), (1,))),
        (4, (0, (2, 2), (4, 1))),
        (4, (-1, (2,), (1,))),
        (4, (0, (2,), (-1,))),
        (4, (0, (2,), (1, 1))),
        (4, (0, (2.0,), (1,))),
        (4, ("x", (2,), (1,))),
        (8, (0, (2,), (1,))),
        (-4, (0, (2,), (1,))),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_its_storage_is_found_out(
    tmp_path: Path, num_elements: int, layout: tuple[Any, ...]
) -> None:
    path = saved(tmp_path / "state.pt", {"w": torch.ones(4)})
    storage = ("storage", torch.FloatStorage, "0", "cpu", num_elements)
    _replace_pickle(path, _tensor_pickle(storage, *layout))
    with pytest.raises(CorruptSaveError, match=r"state\.pt"):
        open_source(path)


@pytest.mark.parametrize(
    "storage",
    [
        ("module", torch.FloatStorage, "0", "cpu", 4),
        ("storage", torch.FloatStorage, "0", "cpu", 4.0),
        ("storage", torch.FloatStorage, "0", "cpu", 1 << 999),
        ("storage", torch.FloatStorage, ("0",), "cpu", 4),
    ],
    ids=str,
)
def test_what_is_no_plain_name_and_size_of_a_storage_is_refused(
    tmp_path: Path, storage: tuple[Any, ...]
) -> None:
    path = saved(tmp_path / "state.pt", {"w": torch.ones(4)})
    _replace_pickle(path, _tensor_pickle(storage, 0, (4,), (1,)))
    with pytest.raises(CorruptSaveError, match="no plain name or no size"):
        open_source(path)


def test_a_storage_that_is_missing_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt", {"w": torch.ones(4)})
    storage = ("storage", torch.FloatStorage, "9", "cpu", 4)
    _replace_pickle(path, _tensor_pickle(storage, 0, (4,), (1,)))
    with pytest.raises(CorruptSaveError, match="no bytes for 'w'") as error:
        open_source(path)
    assert error.value.tensor == "w"


def test_a_zip_that_another_program_compressed_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_DEFLATED) as new:
        new.writestr("x/data.pkl", pickle.dumps({}))
        new.writestr("x/data/0", b"0" * 99)
    with pytest.raises(RefusedError, match=r"compressed records \('x/data\.pkl'\)"):
        open_source(path)


@pytest.mark.parametrize("shape", [(3, 0), (2, 0, 3)])
def test_a_tensor_without_elements_may_begin_anywhere(tmp_path: Path, shape: tuple[int]) -> None:
    tensor = torch.empty(shape)[1:]
    assert tensor.storage_offset() > tensor.untyped_storage().nbytes()
    path = saved(tmp_path / "state.pt", {"w": tensor})
    [stored] = open_source(path).tensors["w"]
    assert stored.shape == tuple(tensor.shape)


def test_a_file_cut_off_anywhere_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt", {"w": torch.ones(4), "b": torch.ones(2)})
    data = path.read_bytes()
    for length in range(4, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptSaveError, match=r"state\.pt"):
            open_source(path)


def test_an_archive_that_is_no_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("readme.txt", "hello")
    with pytest.raises(CorruptSaveError, match="has 0 pickles named"):
        open_source(path)
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("x/data.pkl", pickle.dumps({}))
        new.writestr("x/constants.pkl", pickle.dumps({}))
    with pytest.raises(RefusedError, match="TorchScript"):
        open_source(path)
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("x/data.pkl", pickle.dumps({}))
        new.writestr("x/byteorder", "big")
    with pytest.raises(RefusedError, match="byte order 'big'"):
        open_source(path)


def test_tensors_without_a_plain_layout_are_refused_by_name(tmp_path: Path) -> None:
    sparse = torch.ones(2, 2).to_sparse()
    with pytest.raises(RefusedError, match=r"'a\.s' .*without a plain layout"):
        open_source(saved(tmp_path / "state.pt", {"a": {"s": sparse}}))
    with pytest.raises(RefusedError, match=r"'m' .*on 'meta'"):
        open_source(saved(tmp_path / "state.pt", {"m": torch.ones(2, device="meta")}))


def test_names_that_collide_and_structures_that_contain_themselves_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(RefusedError, match=r"two tensors whose path is 'a\.b'"):
        open_source(saved(tmp_path / "state.pt", {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RefusedError, match="contains itself"):
        open_source(saved(tmp_path / "state.pt", loop))


def test_a_structure_is_read_to_the_depth_that_the_refusal_names(tmp_path: Path) -> None:
    nested: Any = torch.arange(3)
    for _ in range(200):
        nested = [nested]
    with open_source(saved(tmp_path / "state.pt", nested)) as source:
        assert list(source.tensors) == [".".join(["0"] * 200)]
    with pytest.raises(RefusedError, match="nests deeper than 200 levels"):
        open_source(saved(tmp_path / "state.pt", [nested]))
