"""Values of the classes of Python, torch and numpy that a save has no entry for: each is refused by
name in the call, or comes back as what it was.
"""

from __future__ import annotations

import array
import configparser
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import http.cookies
import io
import ipaddress
import pathlib
import pickle
import re
import time
import types
import uuid
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString, namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from judging import judged, refusal, same

import residency
from residency import RefusedError
from residency._checkpoint._document._kinds import kind_for

Pair = namedtuple("Pair", "left right")


class OwnOrdered(OrderedDict):
    """Has a class that no save knows."""


class Frozen(Mapping):
    """Takes no values once it is made."""

    def __init__(self, **values):
        self._values = values

    def __getitem__(self, key):
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def __eq__(self, other):
        return type(other) is Frozen and other._values == self._values


class Mode(enum.Enum):
    TRAIN = "train"


class Bits(enum.IntFlag):
    ONE = 1


class Word(enum.StrEnum):
    ONE = "one"


@dataclasses.dataclass
class Record:
    """Has fields."""

    left: int = 1


@dataclasses.dataclass
class RecordList(list):
    """Has fields, and is a list of none."""

    left: int = 1


class Named(Pair):
    """Is a named tuple by inheritance."""


def config_of(number):
    made = configparser.ConfigParser()
    made["part"] = {"number": str(number)}
    return made


# How each is made of a number, so that a restore has something else in its place.
STANDARD: list[Callable[[int], Any]] = [
    lambda n: types.MappingProxyType({"a": n}),
    lambda n: ChainMap({"a": 1}, {"b": n}),
    lambda n: Frozen(a=n),
    lambda n: UserDict(a=n),
    lambda n: UserList([n]),
    lambda n: UserString(str(n)),
    lambda n: OwnOrdered(a=n),
    lambda n: http.cookies.SimpleCookie({"a": str(n)}),
    config_of,
    lambda n: config_of(n)["part"],
    lambda n: {"a": n}.keys(),
    lambda n: {"a": n}.values(),
    lambda n: {"a": n}.items(),
    lambda n: array.array("d", [n]),
    lambda n: range(n),
    lambda n: memoryview(bytes(n)),
    lambda n: io.BytesIO(bytes(n)),
    lambda n: types.SimpleNamespace(a=n),
    lambda n: Mode.TRAIN,
    lambda n: Bits.ONE,
    lambda n: Word.ONE,
    lambda n: fractions.Fraction(1, n),
    lambda n: decimal.Decimal(n),
    lambda n: pathlib.PurePosixPath(str(n)),
    lambda n: datetime.date(n, 1, 1),
    lambda n: datetime.datetime(n, 1, 1),
    lambda n: datetime.timedelta(n),
    lambda n: datetime.timezone(datetime.timedelta(0, n)),
    lambda n: uuid.UUID(int=n),
    lambda n: ipaddress.ip_address(n),
    lambda n: re.compile(str(n)),
    lambda n: time.gmtime(n),
    lambda n: slice(n),
    lambda n: complex(n, -0.0),
    lambda n: frozenset([n, "a", None, (1, 2.5)]),
    lambda n: Pair(n, 2),
    lambda n: Named(n, 2),
    lambda n: Record(n),
    lambda n: RecordList(n),
    lambda n: torch.Size([n]),
    lambda n: torch.float16 if n == 3 else torch.float32,
    lambda n: torch.device("cpu", n),
    lambda n: torch.channels_last,
    lambda n: torch.per_tensor_affine,
    lambda n: torch.finfo(torch.float32),
    lambda n: torch.Generator().manual_seed(n),
    lambda n: torch.full((n,), n).untyped_storage(),
    lambda n: torch.full((n, 3), n).max(0),
    lambda n: numpy.dtype("f4"),
    lambda n: numpy.random.RandomState(n),
    lambda n: numpy.random.default_rng(n),
    lambda n: functools.partial(pow, n),
    lambda n: int,
    lambda n: ...,
    lambda n: NotImplemented,
]


@pytest.fixture
def checkpointer(tmp_path):
    with residency.Checkpointer(tmp_path, keep=1) as made:
        yield made


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("make", STANDARD, ids=lambda make: type(make(3)).__name__)
def test_values_of_other_classes_come_back_as_they_were_or_are_refused_by_name(checkpointer, make):
    value = make(3)
    said = refusal(checkpointer, {"x": value})
    if said is not None:
        assert said.startswith(f"x is a {type(value).__module__}.{type(value).__qualname__}")
        assert "Nothing was saved; " in said
        return
    with contextlib.suppress(pickle.PicklingError, TypeError):
        assert same(judged(value), value)
    there = {"x": make(5)}
    checkpointer.restore(there, rng=False)
    assert same(there["x"], value)
    nothing: dict[str, Any] = {"x": None}
    if kind_for(value) is None:  # a class that a save knows by its name alone
        with pytest.raises(RefusedError, match="x: saved a mapping, here a NoneType"):
            checkpointer.restore(nothing, rng=False)
        assert nothing == {"x": None}
        return
    checkpointer.restore(nothing, rng=False)
    assert same(nothing["x"], value)


def test_a_state_that_takes_no_values_is_refused_before_one_is_lost(checkpointer):
    tensor = torch.zeros(2)
    checkpointer.save(1, types.MappingProxyType({"t": torch.ones(2), "n": 1})).wait()
    with pytest.raises(RefusedError, match=r"the state is a mappingproxy.*give dict\(it\)"):
        checkpointer.restore(types.MappingProxyType({"t": tensor, "n": 0}))
    assert not tensor.any()
