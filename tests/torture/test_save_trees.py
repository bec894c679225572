"""Random trees of everything that a training state may hold, against torch.save and torch.load.

A tree comes back the same, from a snapshot and from a save, or the call refuses it and names the
place of what it refuses.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import io
import pathlib
import random
import shutil
import struct
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_states import DTYPES, ODD_NAMES, bits, laid_out, random_bytes, size_of

import residency

Judge = Callable[[random.Random], None]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
MARK = "the refused one"
NAME_TWICE = "two tensors of the state have the name"


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Number(float):
    pass


class Names(dict):  # type: ignore[type-arg]
    pass


Pair = collections.namedtuple("Pair", "one two")


@dataclasses.dataclass
class Record:
    one: int = 1


def keep_nothing() -> None:
    pass


REFUSED: list[Callable[[], Any]] = [
    lambda: Color.RED,
    lambda: Text("text"),
    lambda: Number(1.5),
    lambda: Pair(1, 2),
    Record,
    lambda: keep_nothing,
    object,
    lambda: range(3),
    lambda: slice(1, 2),
    lambda: Ellipsis,
    lambda: NotImplemented,
    lambda: decimal.Decimal("1.5"),
    lambda: datetime.datetime(2026, 1, 1),
    lambda: pathlib.PurePosixPath("a"),
    lambda: int,
    lambda: types.SimpleNamespace(a=1),
    lambda: types.MappingProxyType({"a": 1}),
    lambda: collections.ChainMap({"a": 1}, {"b": 2}),
    lambda: memoryview(b"abc"),
    lambda: np.ma.masked_array([1, 2], mask=[True, False]),
    lambda: np.array([object()], dtype=object),
    lambda: np.zeros(2, dtype=[("a", "i4")]),
    lambda: np.matrix([[1, 2]]),
    lambda: torch.ones(3).to_sparse(),
    lambda: torch.ones(2, dtype=torch.complex64).conj(),
    lambda: torch._neg_view(torch.ones(2)),
    lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    lambda: {torch.ones(2): 1},
    lambda: {Color.RED: 1},
    lambda: torch.Generator(),
    lambda: torch.nn.UninitializedParameter(),
    lambda: collections.defaultdict(keep_nothing),
    lambda: torch.strided,
    lambda: torch.contiguous_format,
    lambda: torch.finfo(torch.float32),
    lambda: iter([1]),
    lambda: np.dtype("f4"),
]


MAPPINGS: list[Callable[[dict[Any, Any]], Any]] = [
    Names,
    lambda value: collections.UserDict(value),
]


def number(chance: random.Random) -> Any:
    bits64 = chance.getrandbits(64)
    return chance.choice(
        [
            0,
            -1,
            True,
            False,
            None,
            2**53 + 1,
            -(2**63),
            2**64,
            chance.getrandbits(300) - (1 << 299),
            10**5000,
            0.0,
            -0.0,
            0.1,
            5e-324,
            1.7976931348623157e308,
            float("inf"),
            float("-inf"),
            float("nan"),
            struct.unpack("d", struct.pack("Q", bits64))[0],
            complex(-0.0, float("nan")),
            complex(1.5, -2.0),
            np.float32(0.1),
            np.float64(-0.0),
            np.int8(-3),
            np.uint64(2**64 - 1),
            np.bool_(True),
            np.complex64(1 + 2j),
            np.float16(0.5),
            np.longdouble(1) / 3,
            np.str_("né"),
            np.bytes_(b"a\0b"),
            np.datetime64("2026-01-01T00:00", "m"),
            np.timedelta64(3, "h"),
            np.datetime64("NaT"),
        ]
    )


def word(chance: random.Random) -> Any:
    return chance.choice(
        [
            *ODD_NAMES,
            "\ud800 alone",
            "é",
            "e\u0301",
            "\u2028",
            b"",
            b"\xff\0",
            bytearray(b"ab"),
            torch.float8_e5m2,
            torch.complex32,
            torch.device("cuda", 3),
            torch.device("meta"),
            torch.device("cpu"),
            torch.Size([]),
            torch.Size([2, 0]),
        ]
    )


def array(chance: random.Random) -> Any:
    count = chance.choice([0, 1, 6, 24, 600])
    kind = chance.choice(
        [
            "f4",
            ">f4",
            "<f2",
            "f8",
            "i1",
            ">i8",
            "u2",
            "?",
            "c8",
            ">c16",
            "S3",
            "U2",
            ">U2",
            "g",
            "M8[ns]",
            "m8[D]",
            "M8",
            "G",
        ]
    )
    source = chance.randbytes(count)
    value = np.frombuffer(source, dtype="u1").astype("i8")
    value = (value % 2 if kind == "?" else value).astype(kind)
    layout = chance.randrange(6)
    if layout == 0 and count >= 6:
        return np.asfortranarray(value.reshape(2, 3, -1))
    if layout == 1:
        return value[::-1]
    if layout == 2 and count:
        return value[0].reshape(())  # of no dimensions
    if layout == 3:
        return np.broadcast_to(value, (2, count))
    if layout == 4:
        value.flags.writeable = False
    return value


def key(chance: random.Random) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: chance.choice(["a", "b", "a.b", "1", "(1, 2)", "True", "None", "a.0", "state"]),
        lambda: chance.choice(ODD_NAMES),
        lambda: chance.choice([0, 1, -1, 2**70, True, None, 1.5, -0.0, float("inf"), 2j]),
        lambda: chance.choice([(), (1, 2), ("a", (b"b", None)), frozenset({1, "a"}), b"a"]),
        lambda: chance.choice([torch.float16, torch.device("cpu"), torch.Size([1])]),
        lambda: chance.choice([np.int64(3), np.float32(0.5), np.str_("a")]),
        lambda: f"k{chance.randrange(1000)}",
    ]
    return chance.choice(kinds)()


def tree(chance: random.Random, depth: int, made: list[Any], device: torch.device) -> Any:
    kind = chance.randrange(16 if depth else 7)
    if kind < 2:
        return number(chance)
    if kind == 2:
        return word(chance)
    if kind == 3:
        return array(chance)
    if kind < 6:
        tensors = [value for value in made if isinstance(value, torch.Tensor)]
        if tensors and chance.random() < 0.3:
            return chance.choice(tensors)
        where = chance.choice([device, torch.device("cpu")])
        flat = random_bytes(chance, size_of(chance, False) % 9000, chance.choice(DTYPES)).to(where)
        value = laid_out(chance, flat)
        if flat.numel() == 1 and chance.random() < 0.5:
            value = flat.expand(3)
        made.append(value)
        return value
    if kind == 6:
        if made and chance.random() < 0.7:
            return chance.choice(made)  # one list in two places, or a tie
        return None
    inner = [
        tree(chance, depth - 1, made, device) for _ in range(chance.choice([0, 1, 2, 3, 5, 20]))
    ]
    found: Any
    if kind == 7:
        found = tuple(inner)
    elif kind == 8:
        found = collections.deque(inner, maxlen=chance.choice([None, len(inner), 7]))
    elif kind == 9:
        plain = [key(chance) for _ in inner]
        found = chance.choice([set, frozenset])(plain)
    elif kind == 10:
        found = collections.Counter({key(chance): chance.randint(-3, 9) for _ in inner})
    elif kind == 11:
        factory = chance.choice([list, dict, int, float, set, str, None])
        found = collections.defaultdict(factory, {key(chance): value for value in inner})
    elif kind == 12:
        found = collections.OrderedDict((key(chance), value) for value in inner)
        if chance.random() < 0.4:
            found._metadata = collections.OrderedDict({"": {"version": 1}})
    elif kind == 13:
        found = inner
    else:
        found = {key(chance): value for value in inner}
    made.append(found)
    return found


def differ(one: Any, other: Any, path: str = "") -> str:
    """Says where two trees differ; empty if nowhere."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or bits(one) != bits(other):
            return f"{path}: {one.dtype} {one.shape} and {other.dtype} {other.shape}, or bytes"
        return ""
    if type(one) is not type(other):
        return f"{path}: {type(one)} and {type(other)}"
    if isinstance(one, (np.ndarray, np.generic)):
        same = one.dtype == other.dtype and one.shape == other.shape
        if same and one.dtype.char in "gG":  # six of its sixteen bytes are padding
            return "" if np.array_equal(one, other, equal_nan=True) else path
        if not same or one.tobytes() != other.tobytes():
            return f"{path}: {one!r} and {other!r}"
        return ""
    if isinstance(one, dict):
        if getattr(one, "_metadata", None) != getattr(other, "_metadata", None):
            return f"{path}: _metadata"
        if getattr(one, "default_factory", None) is not getattr(other, "default_factory", None):
            return f"{path}: default_factory"
        if said := differ(list(one), list(other), f"{path}.keys()"):
            return said
        pairs = zip(one.items(), other.values(), strict=True)
        return next(filter(None, (differ(a, b, f"{path}[{k!r}]") for (k, a), b in pairs)), "")
    if isinstance(one, (list, tuple, collections.deque)):
        if len(one) != len(other) or getattr(one, "maxlen", 0) != getattr(other, "maxlen", 0):
            return f"{path}: length"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (differ(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), "")
    if isinstance(one, (set, frozenset)):
        texts = [sorted(f"{type(value)} {value!r}" for value in values) for values in (one, other)]
        return "" if texts[0] == texts[1] else f"{path}: {texts}"
    if isinstance(one, float):
        return "" if struct.pack("d", one) == struct.pack("d", other) or one != one else path
    if isinstance(one, int):
        return "" if one == other else path
    return "" if repr(one) == repr(other) else f"{path}: {one!r} and {other!r}"


def stock(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def top_names(chance: random.Random) -> list[str]:
    names = [
        *ODD_NAMES,
        *("rng", "model", "Model", "a/b", "a_b", "a-b", "y" * 120, "y" * 119 + "z", "latest"),
        *("step-00000001", ".lock", "manifest.json", "model-rank-00001-of-00001"),
    ]
    many = [f"n{index}" for index in range(chance.choice([0, 0, 0, 40]))]
    chosen = dict.fromkeys(chance.sample(names, chance.randint(1, 12)) + many)
    refused = {"$", "__metadata__"}  # and those without a letter, as the error says
    return [name for name in chosen if name not in refused and any(map(str.isalpha, name))]


def judge_tree(chance: random.Random, folder: Path, device: torch.device) -> None:
    made: list[Any] = []
    state = {name: tree(chance, 3, made, device) for name in top_names(chance)}
    offender = chance.choice(REFUSED) if chance.random() < 0.25 else None
    if offender is not None:
        within: Any = {MARK: offender()}
        for _ in range(chance.randint(0, 2)):
            within = chance.choice([[within], (1, within), {"in": within}])
        state["odd"] = within
    with residency.Checkpointer(folder, verify=chance.choice(["gate", "full"])) as checkpointer:
        if offender is not None:
            try:
                came = residency.snapshot(state).tree["odd"]
            except residency.RefusedError as error:
                text = str(error)
                if NAME_TWICE in text:
                    return
                assert MARK in text, text
                with pytest.raises(residency.RefusedError, match=MARK):
                    checkpointer.save(1, state, rng=False)
                assert checkpointer.steps() == []
            else:
                assert not differ(stock(state["odd"]), came)
            return
        right = stock(state)
        try:
            snap = residency.snapshot(state)
        except residency.RefusedError as error:
            if NAME_TWICE in str(error):
                return  # two paths of one spelling, refused by name
            raise
        rng = "rng" not in state
        checkpointer.save(1, state, rng=rng).wait()
        # numpy's own pickles lose the byte order of some text: what was given is right, too.
        came = snap.wait().tree
        said = differ(right, came) and differ(state, came)
        assert not said, f"snapshot: {said}"
        into: dict[str, Any] = dict.fromkeys(state)
        assert checkpointer.restore(into, rng=rng) == 1
        said = differ(right, into) and differ(state, into)
        assert not said, f"restored where there was nothing: {said}"
        kind = chance.choice(MAPPINGS)
        plain = {"a": 1, "deep": {"t": torch.ones(3)}}
        checkpointer.save(2, {MARK: kind(plain)}).wait()
        other = kind({"a": 2, "deep": {"t": torch.zeros(3)}})
        assert checkpointer.restore({MARK: other}) == 2
        assert other["a"] == 1
        assert torch.equal(other["deep"]["t"], torch.ones(3))
        with pytest.raises(residency.RefusedError, match=MARK):
            checkpointer.restore({MARK: chance.choice([None, {}, []])})
        if chance.random() < 0.5:
            check_in_place(checkpointer, state, chance)


def fillable(value: Any) -> bool:
    """Says whether a restore may fill it in place: nothing read-only, nothing expanded."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable)
    if isinstance(value, torch.Tensor):
        return all(
            stride or size == 1 for stride, size in zip(value.stride(), value.shape, strict=True)
        )
    if isinstance(value, dict):
        return all(fillable(inner) for inner in value.values())
    if isinstance(value, (list, tuple, collections.deque)):
        return all(fillable(inner) for inner in value)
    return True


def spoil(chance: random.Random, value: Any) -> None:
    """Empties or changes some of a tree's containers, as training does between saves."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if isinstance(value, (dict, list)) and chance.random() < 0.2:
        value.clear()
    elif isinstance(inner, (list, tuple, collections.deque)):
        for part in inner:
            spoil(chance, part)


def check_in_place(
    checkpointer: residency.Checkpointer, right: dict[str, Any], chance: random.Random
) -> None:
    into = {name: copy.deepcopy(value) for name, value in right.items() if fillable(value)}
    for value in into.values():
        spoil(chance, value)
    kept = {name: value for name, value in into.items() if type(value) in (dict, list)}
    checkpointer.restore(into, step=1, rng="rng" not in right)
    for name, value in into.items():
        said = differ(right[name], value)
        assert not said, f"restored in place, {name!r}: {said}"
        assert name not in kept or kept[name] is value, name


def test_a_tree_comes_back_or_is_refused_by_name(
    torture: Callable[[Judge], None], device: torch.device, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        folder = tmp_path / "saves"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of numpy's casts and of sparse tensors
                judge_tree(chance, folder, device)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    torture(judge)
