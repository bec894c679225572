"""A document is understood wholly before a byte moves: what makes no sense is damage, everything is
as it was, and the save before is restored, whatever the senseless part is."""

from __future__ import annotations

import copy
import io
import json
import random
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import residency
from residency import CorruptSaveError, RefusedError
from residency._checkpoint._disk._manifest import MANIFEST, dump_manifest
from residency._checkpoint._disk._open_save import read_manifest
from residency._checkpoint._document import _nodes

KINDS = [each for name, each in vars(_nodes).items() if name.isupper() and type(each) is str]
NONSENSE: dict[str, list[dict[str, Any]]] = {
    "float": [{"value": "nan", "bits": "00"}, {"value": "zz"}, {"value": "nan", "bits": 7}, {}],
    "int": [{"value": "zz"}, {"value": "0x"}, {"value": 7}, {"value": "9" * 9000 + "g"}],
    "size": [{"items": ["a"]}, {"items": [[1]]}, {"items": {}}],
    "deque": [{"items": [1], "maxlen": -5}, {"items": [], "maxlen": "x"}, {"items": 3}],
    "str": [{"value": "/w=="}, {"value": "!"}, {"value": ["a"]}],
    "bytes": [{"value": "!!!"}, {"value": 7}, {"tensor": "nothing"}, {"tensor": "t"}, {}],
    "bytearray": [{"value": "a"}, {"tensor": "t"}, {"tensor": 5}],
    "set": [{"items": [[1]]}, {"items": 7}, {"items": [{"a": 1}]}],
    "frozenset": [{"items": [{"$": "set", "items": []}]}],
    "tuple": [{"items": "ab"}, {"items": [{"$": "tuple"}]}],
    "dict": [{"items": [[[1], 2]]}, {"items": [[1]]}, {"items": [["a", {"$": "no"}]]}],
    "ordered": [{"items": [["a", 1], 2]}, {"items": [], "metadata": {"$": "int"}}],
    "defaultdict": [{"items": [], "factory": "eval"}, {"items": []}],
    "counter": [{"items": [[[1], "b"]]}, {"items": [["a", {"$": "complex", "value": []}]]}],
    "ndarray": [
        {"dtype": "O", "shape": [1], "value": "AAAA"},
        {"dtype": "<f8", "shape": [5], "value": "AAAA"},
        {"dtype": "<f8", "shape": [1 << 40], "value": ""},
        {"dtype": "<f8", "shape": [0, 1 << 62, 9], "value": ""},
        {"dtype": "<f3", "shape": [], "value": "AAAA"},
        {"dtype": "f4,f4", "shape": [0], "value": ""},
        {"dtype": "(9999,9999)f8", "shape": [1], "value": ""},
        {"dtype": "<f8", "shape": [-1], "value": ""},
        {"dtype": "|u1", "shape": [1] * 99, "value": "AA=="},
        {"dtype": "|u1", "shape": [1], "value": "AA==", "order": "K"},
        {"dtype": "<U1", "shape": [], "value": "/////w==", "is_scalar": True},
        {"dtype": "|u1", "shape": [3], "tensor": "t"},
        {"dtype": "|u1", "shape": [1 << 40], "tensor": "wide"},
    ],
    "complex": [{"value": [1]}, {"value": ["a", "b"]}, {"value": [1, [2]]}],
    "device": [{"value": "nowhere:99999"}, {"value": ""}, {"value": "cuda:-7"}],
    "dtype": [{"value": "load"}, {"value": "compile"}, {"value": "_dynamo"}],
    "none": [{}, {"value": {"a": 1}}],
    "bool": [{"value": 1}],
    "list": [{"items": [1]}],
    "tensor": [{"name": "nothing"}, {"name": 7}, {}],
    "unknown": [{}, {"value": 1}],
    "mapping": [{"items": 3, "class": "x.Y"}, {"items": []}],
    "stateful": [{"class": "x"}, {"class": 3, "state": 1}],
}


class Holder:
    """Takes whatever it is given."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


class Net(nn.Linear):
    """Has extra state."""

    extra: Any = 1

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def make(value: int) -> dict[str, Any]:
    """Returns a state with every kind of node in it."""
    torch.manual_seed(value)
    net = Net(3, 2)
    optimizer = torch.optim.Adam(
        [{"params": [net.weight]}, {"params": [net.bias]}], lr=torch.tensor(value / 8)
    )
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state["loose"] = {"n": value}
    net.extra = {"n": [value]}
    scaler = torch.amp.GradScaler("cpu", init_scale=float(value))
    scaler.scale(torch.ones(1))
    x = value
    return {
        "t": torch.full((3,), float(x)),
        "w": torch.full((3,), x, dtype=torch.uint8),
        "wide": torch.full((4,), x, dtype=torch.uint8),
        "v": float(x),
        "net": net,
        "optimizer": optimizer,
        "scaler": scaler,
        "holder": Holder({"a": [x, (x,)]}),
        "user": UserDict(a=x),
        "plain": [x, True, None, "text", float("nan"), -x * 3**99, 1j * x, "\ud83d", b"x" * x],
        "long": [b"x" * 5000, bytearray([x] * 5000), bytearray([x])],
        "arrays": [numpy.full(3, x), numpy.full((2, 2), x, order="F"), numpy.float32(x)],
        "sets": {"s": {x, (x, "a")}, "f": frozenset({x}), "d": deque([x], 3)},
        "dicts": {
            "o": OrderedDict([(5, x), ("m", {"k": torch.ones(2) * x})]),
            "c": Counter({("a", 5): x}),
            "d": defaultdict(list, {"a": [x]}),
            "k": {1: "one", "$x": x},
        },
        "types": [torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, x])],
    }


def facts(state: Any) -> bytes:
    """Returns every bit of a state."""
    stream = io.BytesIO()
    shown = {
        name: (each.state_dict(), vars(each).get("value")) if hasattr(each, "state_dict") else each
        for name, each in state.items()
    }
    torch.save([shown, random.getstate(), torch.get_rng_state(), numpy.random.get_state()], stream)
    return stream.getvalue()


class Saves:
    """Two saves, of which the newer one gets documents that are written as they should be."""

    def __init__(self, path):
        self.path = path
        with residency.Checkpointer(path) as checkpointer:
            for step in (1, 2):
                save = checkpointer.save(step, make(step)).wait()
        self.folder = save.path
        self.whole = read_manifest(self.folder)

    def write(self, change):
        """Writes the newer manifest anew, with its document changed."""
        manifest = copy.deepcopy(self.whole)
        change(manifest.ranks[0].document)
        (self.folder / MANIFEST).write_bytes(dump_manifest(manifest))

    def judge(self, is_damage=False):
        """Restores the newer save and then whichever there is; returns how the first one ended."""
        state = make(7)
        del state["wide"]  # which documents may say to be larger than any tensor
        before = facts(state)
        error = self.restore(state, step=2)
        if error is None:
            assert not is_damage
            return "restored"
        assert facts(state) == before, error
        if isinstance(error, RefusedError):
            assert not is_damage, error
            assert "othing was changed" in str(error), error
            return "refused"
        assert str(self.folder) in str(error)
        with pytest.warns(UserWarning, match="An older save is tried"):
            assert self.restore(state) is None
        assert torch.equal(state["t"], torch.ones(3))
        assert state["holder"].value == {"a": [1, (1,)]}
        return "damage"

    def restore(self, state, step=None):
        try:
            with residency.Checkpointer(self.path) as checkpointer:
                checkpointer.restore(state, step=step)
        except (CorruptSaveError, RefusedError) as error:
            return error
        return None


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    numpy.random.get_state()
    return Saves(tmp_path_factory.mktemp("saves"))


PLACES: dict[str, Callable[[Any, Any], None]] = {
    "value": lambda tree, node: tree.update(v=node),
    "within": lambda tree, node: tree["dicts"]["o"]["items"][1][1].update(new=[{"a": node}]),
    "key": lambda tree, node: tree["dicts"]["k"]["items"].append([node, 1]),
    "rate": lambda tree, node: tree["optimizer"]["groups"][1].update(lr=node),
    "group": lambda tree, node: tree["optimizer"]["groups"][0].update(more=[node]),
    "state": lambda tree, node: tree["optimizer"]["state"]["weight"].update(more={"a": node}),
    "extra": lambda tree, node: tree["net"]["extra"].update(_extra_state={"n": node}),
    "object": lambda tree, node: tree["holder"]["state"].update(b=[node]),
}


def is_judged(saves, kind, fields, place):
    """Judges a save with a node at a place, and a view far larger than its bytes."""

    def change(document):
        wide = {"dtype": "uint8", "shape": [1 << 40], "stride": [0], "of": "w", "start": 0}
        document["tensors"]["wide"] = wide
        PLACES[place](document["tree"], {"$": kind, **fields})

    saves.write(change)
    assert saves.judge(is_damage=True)


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_value_that_makes_no_sense_is_damage_and_the_save_before_is_restored(saves, kind):
    for index, fields in enumerate(NONSENSE[kind]):
        is_judged(saves, kind, fields, list(PLACES)[(len(kind) + index) % len(PLACES)])


@pytest.mark.whole
@pytest.mark.parametrize("kind", NONSENSE)
@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_makes_no_sense_is_damage_wherever_it_stands(saves, kind, place):
    for fields in NONSENSE[kind]:
        is_judged(saves, kind, fields, place)


@pytest.mark.parametrize(
    "kind", [7, None, {"$": "tensor", "name": "t"}, {"$": "int", "value": "7"}]
)
def test_the_state_of_no_kind_of_accelerator_is_damage(saves, kind):
    def change(document):
        state = {"$": "tensor", "name": "rng.torch"}
        document["tree"]["rng"]["accelerator"] = {"type": kind, "state": state}

    saves.write(change)
    assert saves.judge(is_damage=True) == "damage"


def nodes_of(tree):
    """Yields every dict and list of a document, with the nodes in them."""
    yield tree
    for each in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(each, dict | list):
            yield from nodes_of(each)


def junk(chance):
    """Returns something that JSON can have."""
    plain = (None, True, -1, 0, 7, 1.5, 1 << 40, 10**30, "", "zz", "nan", "t", "w", "<f8", "0x5")
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    fields = ("value", "items", "name", "tensor", "shape", "dtype", "class", "state", "maxlen")
    made = {"$": chance.choice(KINDS)}
    for _ in range(chance.randrange(4)):
        made[chance.choice(fields)] = chance.choice((*plain, [], [1], ["a"], {}, [[1, 2]]))
    return chance.choice((*plain, [], [[]], {}, [1, "a"], deep, {"a": 1}, made, made, made, made))


def mutate(chance, document):
    """Changes one place of a document."""
    places = [each for each in nodes_of(document["tree"]) if each]
    if document.get("tensors") and chance.random() < 0.15:
        places = [each for each in nodes_of(document["tensors"]) if each]
    kind = chance.choice([each.get("$") for each in places if isinstance(each, dict)])
    fitting = [each for each in places if isinstance(each, dict) and each.get("$") == kind]
    place = chance.choice(fitting if chance.random() < 0.6 else places)
    key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
    what = chance.randrange(6)
    if what == 0:
        del place[key]
    elif what == 1 and isinstance(place, dict):
        place[chance.choice(("$", "value", "params", "order", "place", "x"))] = junk(chance)
    elif what == 2:
        place[key] = copy.deepcopy(chance.choice(places))
    elif what == 3 and isinstance(place, list):
        place += copy.deepcopy(place)
    elif what == 4:
        place[key] = [place[key]]
    else:
        place[key] = junk(chance)


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.whole) for n in range(8, 100))]
)
@pytest.mark.filterwarnings("ignore:the random state of an accelerator")
def test_a_document_that_was_changed_anywhere_is_restored_refused_or_damage(saves, seed):
    chance = random.Random(seed)
    ends = Counter()
    for _ in range(25):
        changed: list[str] = []

        def change(document, changed=changed):
            for _ in range(chance.choice((1, 1, 2))):
                mutate(chance, document)
            changed.append(json.dumps(document))

        saves.write(change)
        try:
            ends[saves.judge()] += 1
        except BaseException as error:
            error.add_note(changed[0][:20_000])
            raise
    assert ends["damage"]


def test_the_document_that_nobody_changed_is_restored(saves):
    saves.write(lambda document: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert saves.judge() == "restored"
