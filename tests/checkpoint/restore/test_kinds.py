"""Whatever a training state may hold comes back as ``torch.load`` gives it, classes included, or is
refused by name in the call of ``save``: there is nothing between.
"""

from __future__ import annotations

import copy
import enum
import math
import pathlib
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from judging import judged, refusal, same
from torch import Tensor, nn
from torch.optim import lr_scheduler

import residency
from residency import InvalidArgumentError, RefusedError
from residency._checkpoint._document import _encode

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64),
    *(torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
ARRAYS = [
    "<f8",
    ">f4",
    "<i2",
    ">u8",
    "?",
    "<c16",
    "<f2",
    "M8[ns]",
    "m8[D]",
    "<U3",
    "S4",
    "S0",
    "V3",
]
LAYOUTS = ("plain", "turned", "sliced", "none", "scalar", "strided")
Pair = namedtuple("Pair", "left right")


class Colour(enum.IntEnum):
    RED = 1


class OwnDict(dict):
    """Has a class that no save knows."""


class OwnList(list):
    """Has one, too."""


class OwnStr(str):
    """And this."""


def tensor_of(dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (24 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    flat = (bits % 2).bool()[:24] if dtype is torch.bool else bits.view(dtype)
    views = {
        "plain": lambda: flat.view(4, 6).clone(),
        "turned": lambda: flat.view(4, 6).t(),
        "sliced": lambda: flat.view(4, 6)[:, 1:3],
        "none": lambda: flat[:0].view(0, 3),
        "scalar": lambda: flat[3].clone(),
        "strided": lambda: flat.view(12, 2)[:1, 0],
    }
    return views[layout]()


def array_of(code: str, shape: tuple[int, ...], order: str) -> Any:
    dtype = numpy.dtype(code)
    count = math.prod(shape)
    if not dtype.itemsize or not count or "U" in code:
        return numpy.zeros(shape, dtype, order=order)
    data = bytes((i * 7 + 1) % 2 for i in range(count * dtype.itemsize))
    return numpy.array(numpy.frombuffer(data, dtype).reshape(shape), order=order)


texts = st.text(st.characters(exclude_categories=()), max_size=4) | st.sampled_from(
    ["", "$", "$x", "a.b", "\ud83d", "\ud83d\ude00", "\0", "é"]
)
numbers = (
    st.integers()
    | st.sampled_from([1 << 64, -(1 << 64) - 1, 3**999])
    | st.floats(allow_nan=True)
    | st.builds(
        lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0], st.integers(0, 2**64 - 1)
    )
    | st.complex_numbers(allow_nan=True)
)
plain = (
    st.none()
    | st.booleans()
    | numbers
    | texts
    | st.binary(max_size=3)
    | st.sampled_from(
        [b"x" * 5000, torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, 0])]
    )
)
scalars = st.sampled_from(
    [numpy.float64(-0.0), numpy.int8(3), numpy.bool_(1), numpy.complex64(1j), numpy.str_("ab")]
)
keys = st.recursive(
    plain | scalars,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
tensors = st.builds(
    tensor_of, st.sampled_from(DTYPES), st.sampled_from(LAYOUTS), st.integers(0, 99)
)
arrays = st.builds(
    array_of,
    st.sampled_from(ARRAYS),
    st.sampled_from([(), (0,), (3,), (2, 3), (2, 1, 3)]),
    st.sampled_from("CF"),
)
unknown = st.sampled_from(
    [
        *(Colour.RED, OwnDict(a=1), OwnList([1]), OwnStr("x"), Pair(1, 2), pathlib.Path("x")),
        *(object(), len, range(3), torch.strided, {torch.ones(1): 2}),
        numpy.ma.masked_array([1.0, 2.0], [0, 1]),
        numpy.array([object()]),
        numpy.zeros(2, [("a", "<f4"), ("b", "<i4")]),
        defaultdict(lambda: 3),
        torch.eye(2).to_sparse(),
    ]
)


def containers(inner: Any) -> Any:
    pairs = st.lists(st.tuples(keys, inner), max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | pairs.map(dict)
        | st.dictionaries(texts, inner, max_size=3)
        | pairs.map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.builds(defaultdict, st.sampled_from([None, list, dict, int, float]), pairs.map(dict))
        | st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 3, 7]))
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.binary(max_size=3).map(bytearray)
    )


trees = st.recursive(plain | scalars | tensors | arrays, containers, max_leaves=8)
doubtful = st.recursive(plain | tensors | unknown, containers, max_leaves=6)
LENIENT = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@pytest.fixture
def checkpointer(tmp_path):
    with residency.Checkpointer(tmp_path, keep=1) as made:
        yield made


@settings(max_examples=150, **LENIENT)
@given(tree=trees)
def test_what_is_saved_comes_back_as_torch_load_gives_it(checkpointer, tree):
    expected = judged(tree)
    if not same(expected, tree):  # pickle turns the bytes of a 0-d array to this machine's order
        expected = tree
    said = refusal(checkpointer, {"x": tree})
    if said is not None:  # two keys of one spelling, keys that equal nothing, and nothing else
        assert "two tensors of the state have the name" in said or "as NaN is not" in said
        return
    fresh: dict[str, Any] = {"x": None}
    checkpointer.restore(fresh, rng=False)
    assert same(fresh["x"], expected)
    there = {"x": copy.deepcopy(tree)}
    checkpointer.restore(there, rng=False)
    assert same(there["x"], expected)


@settings(max_examples=100, **LENIENT)
@given(tree=doubtful)
def test_what_is_refused_is_refused_by_name_in_the_call(checkpointer, tree):
    said = refusal(checkpointer, {"name": tree})
    if said is not None:
        assert "name" in said
        assert "Nothing was saved" in said
        return
    there = {"name": copy.deepcopy(tree)}  # a mapping of a class of its own has to be there
    checkpointer.restore(there, rng=False)
    assert same(there["name"], judged(tree))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Counter({torch.ones(1): 1}), r"state\.x has a tensor as a key"),
        (defaultdict(lambda: 3), r"state\.x is a defaultdict of .*give dict"),
        (OwnDict(a=1), None),
        (Pair(1, 2), r"state\.x is a .*Pair.*_asdict"),
        (OwnList([1]), r"state\.x is a .*OwnList.*give list\(it\)"),
        (numpy.ma.masked_array([1.0]), r"state\.x is a numpy.*MaskedArray"),
        (numpy.zeros(1, "O"), r"state\.x is a numpy array of object"),
        (nn.LazyLinear(3), r"state\.x\.weight is a UninitializedParameter"),
        (nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]), r"state\.x\.0 is a torch.sp"),
        ({"a": torch.ones(1), "a.__storage__": torch.ones(1)}, "two tensors of the state have"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_entry_in_the_table_is_refused_with_what_to_give(checkpointer, value, words):
    if words is None:  # in place only, as its class must be there: within a value there is none
        value, words = {1: {OwnStr("k"): 1}}, r"state\.x\.1\.key is a .*OwnStr.*give str"
    with pytest.raises(RefusedError, match=words):
        checkpointer.save(1, {"state": {"x": value}})
    assert checkpointer.steps() == []


def test_a_mapping_of_a_class_of_its_own_is_filled_where_it_is_and_nowhere_else(checkpointer):
    checkpointer.save(1, {"batch": UserDict(a=torch.ones(2), n=3), "own": OwnDict(k=1)}).wait()
    kept = torch.zeros(2)
    batch, own = UserDict(a=kept, n=0), OwnDict()
    assert checkpointer.restore({"batch": batch, "own": own}) == 1
    assert type(batch) is UserDict
    assert batch["a"] is kept
    assert batch["n"] == 3
    assert kept.tolist() == [1, 1]
    assert own == {"k": 1}
    with pytest.raises(RefusedError, match="saved a mapping, here a NoneType"):
        checkpointer.restore({"batch": None})
    with pytest.raises(RefusedError, match="saved a mapping, here a dict"):
        checkpointer.restore({"batch": {}})


@pytest.mark.parametrize("name", ["", "$x", "\ud83d"])
def test_names_that_no_file_can_have_are_refused(checkpointer, name):
    with pytest.raises(InvalidArgumentError, match="expected names"):
        checkpointer.save(1, {name: torch.ones(3)}, rng=False)


def test_a_state_dict_is_saved_as_a_state_and_keeps_its_versions(checkpointer):
    expected = nn.BatchNorm1d(3).state_dict()
    checkpointer.save(1, expected, rng=False).wait()
    found = dict.fromkeys(expected)
    checkpointer.restore(found, rng=False)
    assert same(list(found.values()), list(expected.values()))
    checkpointer.save(2, {"m": expected}).wait()
    state: dict[str, Any] = {"m": None}
    checkpointer.restore(state)
    assert state["m"]._metadata == expected._metadata


def build_schedule():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    parts = [
        lr_scheduler.LinearLR(optimizer, total_iters=4),
        lr_scheduler.MultiStepLR(optimizer, [3, 3, 6], 0.1),
    ]
    return optimizer, lr_scheduler.SequentialLR(optimizer, parts, [5])


def rates(optimizer, scheduler, steps):
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_a_scheduler_of_schedulers_goes_on_past_its_milestone(checkpointer):
    optimizer, scheduler = build_schedule()
    rates(optimizer, scheduler, 2)
    checkpointer.save(1, {"optimizer": optimizer, "scheduler": scheduler}).wait()
    others = build_schedule()
    checkpointer.restore(dict(zip(("optimizer", "scheduler"), others, strict=True)))
    assert rates(*others, 12) == rates(optimizer, scheduler, 12)


@pytest.mark.parametrize("saved", [False, True])
def test_a_disabled_scaler_is_saved_and_meets_no_enabled_one(checkpointer, saved):
    make = torch.amp.GradScaler
    checkpointer.save(1, {"scaler": make("cpu", enabled=saved)}).wait()
    assert checkpointer.restore({"scaler": make("cpu", enabled=False)}) == 1
    assert residency.snapshot({"scaler": make("cpu", enabled=False)}).tree == {"scaler": {}}
    if not saved:
        with pytest.raises(RefusedError, match="saved a disabled GradScaler"):
            checkpointer.restore({"scaler": make("cpu")})


class WithPart(nn.Module):
    """Calls a part of its own as torch.compile calls what it wraps."""

    def __init__(self):
        super().__init__()
        self._orig_mod = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)


def test_a_part_with_the_name_of_a_wrappers_is_a_part(checkpointer):
    model, other = WithPart(), WithPart()
    checkpointer.save(1, {"model": model}).wait()
    checkpointer.restore({"model": other})
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_lists_that_share_lists_are_refused_and_a_shared_one_is_not(checkpointer, monkeypatch):
    monkeypatch.setattr(_encode, "_MOST_VALUES", 1000)
    shared = [1]
    for _ in range(30):
        shared = [shared, shared]
    with pytest.raises(RefusedError, match="stand in many places"):
        checkpointer.save(1, {"x": shared})
    once = [torch.ones(2)]
    checkpointer.save(2, {"a": once, "b": once, "empty": [()] * 2000}).wait()
    state: dict[str, Any] = {"a": None, "b": None}
    checkpointer.restore(state)
    assert state["a"][0].data_ptr() == state["b"][0].data_ptr()


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [{"k": value}, (value,)][level % 2]
    return value


def test_numbers_of_more_digits_than_python_writes_come_back(checkpointer):
    state = {"x": {10**5000: -(10**5000), (1, -(10**6000)): 0}}
    checkpointer.save(1, state).wait()
    found = {"x": None}
    checkpointer.restore(found)
    assert found == state


def test_a_deep_tree_is_restored_or_refused(checkpointer):
    deep = nested(99)
    checkpointer.save(1, {"x": deep}).wait()
    for there in (None, nested(99)):
        state = {"x": there}
        checkpointer.restore(state)
        assert state["x"] == deep
    with pytest.raises(RefusedError, match="nested deeper"):
        checkpointer.save(2, {"x": nested(120)})


def test_what_is_encoded_shares_nothing_with_the_caller():
    large = bytearray(range(256)) * 64
    value = {"list": [1, 2], "dict": {"a": [3]}, "bytes": large, "array": numpy.arange(4)}
    encoder = _encode.Encoder()
    node = encoder.node("", value)
    before = copy.deepcopy(node), {n: leaf.value.clone() for n, leaf in encoder.leaves.items()}
    value["list"].append(4)
    value["dict"]["a"].clear()
    value["bytes"][0] = 9
    value["array"][:] = 9
    assert node == before[0]
    assert {n: leaf.value.tolist() for n, leaf in encoder.leaves.items()} == {
        n: tensor.tolist() for n, tensor in before[1].items()
    }
