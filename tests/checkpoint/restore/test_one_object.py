"""What is one object here comes back as one, or its two names are refused before any byte moves."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from typing import Any

import numpy
import pytest
import torch
from judging import judged, same
from torch import nn

import residency
from residency import RefusedError

MAKERS = {
    "dict": lambda x: {"n": x},
    "plain keys": lambda x: {1: x},
    "ordered": lambda x: OrderedDict(n=x),
    "counter": lambda x: Counter(n=x),
    "default": lambda x: defaultdict(int, n=x),
    "own mapping": lambda x: UserDict(n=x),
    "list": lambda x: [x],
    "nested": lambda x: {"n": [(x, {"m": x})]},
    "set": lambda x: {x, "a", "b"},
    "deque": lambda x: deque([x]),
    "bytearray": lambda x: bytearray([x] * 5),
    "longer bytearray": lambda x: bytearray(x),
    "long bytearray": lambda x: bytearray([x] * 5000),
    "array": lambda x: numpy.full(3, x),
    "longer array": lambda x: numpy.full(x, 1.0),
    "array of long bytes in a list": lambda x: [numpy.full((2, 2), x), bytes([x] * 5000)],
    "tensor within": lambda x: {"t": torch.full((3,), float(x))},
    "new tensor within": lambda x: {"t": 0} if x == 9 else {"t": torch.full((3,), float(x))},
}


@pytest.fixture
def checkpointer(tmp_path):
    with residency.Checkpointer(tmp_path, keep=1) as made:
        yield made


def refused(checkpointer, state, words):
    before = judged(state)
    with pytest.raises(RefusedError, match=words) as caught:
        checkpointer.restore(state, rng=False)
    assert "nothing was changed" in str(caught.value)
    assert same(judged(state), before)


@pytest.mark.parametrize("kind", MAKERS)
def test_one_container_under_two_names_comes_back_as_one_or_is_refused(checkpointer, kind):
    make = MAKERS[kind]
    here = make(9)
    checkpointer.save(1, {"a": make(3), "b": make(4)}).wait()
    refused(checkpointer, {"a": here, "b": here}, "a and b: they are one .* here, and their")
    apart = {"a": make(9), "b": make(8)}
    checkpointer.restore(apart)
    assert same(apart, {"a": make(3), "b": make(4)})
    for saved in ([make(3), make(3)], [make(3)] * 2):
        checkpointer.save(1, {"a": saved[0], "b": [saved[1]]}).wait()
        state = {"a": here, "b": [here]}
        checkpointer.restore(state)
        assert state["a"] is state["b"][0]
        assert same(state["a"], make(3))


def test_a_list_of_one_dict_is_refused_where_several_were_saved(checkpointer):
    checkpointer.save(1, {"s": [{"n": 1}, {"n": 2}, {"n": 3}]}).wait()
    refused(checkpointer, {"s": [{"n": 0}] * 3}, r"s\.0 and s\.1: they are one dict here")
    checkpointer.save(1, {"s": [{"n": 4}] * 3}).wait()
    state = {"s": [{"n": 0}] * 3}
    checkpointer.restore(state)
    assert judged(state) == {"s": [{"n": 4}] * 3}
    assert state["s"][0] is state["s"][2]


def test_signs_types_and_bits_of_plain_values_tell_them_apart(checkpointer):
    for left, right in ((0.0, -0.0), (1, True), (1, 1.0), ("1", 1), (None, False), ([], {})):
        checkpointer.save(1, {"a": {"n": left}, "b": {"n": right}}).wait()
        here: dict[str, Any] = {"n": 7}
        refused(checkpointer, {"a": here, "b": here}, "a and b: they are one dict")


VIEWS = {
    "parts": lambda a: (a[:4], a[2:]),
    "backwards": lambda a: (a[::-1], a),
    "columns": lambda a: (a.reshape(2, 3)[:, 1], a),
    "turned": lambda a: (a.reshape(2, 3).T, a),
    "bytes": lambda a: (a.view("u1"), a),
    "a tensor": lambda a: (a, torch.from_numpy(a)),
    "a tensor over a part": lambda a: (a[::2], torch.from_numpy(a)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_arrays_over_one_memory_get_values_that_agree_or_are_refused(checkpointer, view):
    left, right = VIEWS[view](numpy.arange(6.0))
    checkpointer.save(1, {"a": left + left.dtype.type(1), "b": right}).wait()
    a, b = VIEWS[view](numpy.zeros(6))
    refused(checkpointer, {"a": a, "b": b}, "[ab] and [ab]: they share memory here")
    if view == "backwards":  # which a file is not read into: alone, it is filled in its place
        checkpointer.restore({"a": a})
        assert same(a.copy(), left + 1)
        return
    checkpointer.save(1, {"a": left, "b": right}).wait()
    checkpointer.restore({"a": a, "b": b})
    assert numpy.array_equal(a, left)
    assert numpy.array_equal(numpy.asarray(b), numpy.asarray(right))


@pytest.mark.parametrize("length", [6, 6000])
def test_a_bytearray_and_an_array_over_it_get_values_that_agree_or_are_refused(
    checkpointer, length
):
    here = bytearray(length)
    state = {"a": here, "b": numpy.frombuffer(here, "u1")}
    checkpointer.save(1, {"a": bytearray(b"1" * length), "b": numpy.full(length, 50, "u1")})
    refused(checkpointer, state, "a and b: they share memory here")
    checkpointer.save(1, {"a": bytearray(b"1" * length), "b": numpy.full(length, 49, "u1")})
    checkpointer.restore(state)
    assert state["a"] is here == b"1" * length
    checkpointer.save(1, {"a": bytearray(b"123"), "b": numpy.full(length, 50, "u1")})
    checkpointer.restore(state)  # the array keeps its memory, so the bytearray another length
    assert state["a"] == b"123"
    assert here == b"2" * length


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("code", ["<f4", ">i2", "M8[s]", "<U2", "V3", "?"])
def test_arrays_are_filled_in_place_in_whatever_layout_they_have(checkpointer, code, order):
    chance = random.Random(code + order)
    for _ in range(10):
        shape = tuple(chance.choice((1, 2, 3, 5)) for _ in range(chance.randrange(4)))
        size = int(numpy.prod(shape, dtype=int)) * numpy.dtype(code).itemsize
        data = bytes(chance.randrange(2) for _ in range(size))
        saved = numpy.zeros(shape, code) if "U" in code else numpy.frombuffer(data, code)
        saved = numpy.array(saved.reshape(shape), order=order)
        checkpointer.save(1, {"a": saved}).wait()
        wide = numpy.zeros([2 * n + 1 for n in shape], code, order=chance.choice("CF"))
        steps = [chance.choice((slice(0, n), slice(1, None, 2), slice(n, 0, -1))) for n in shape]
        here = wide[(..., *steps)]
        state = {"a": here}
        checkpointer.restore(state)
        assert state["a"] is here
        assert here.tobytes() == saved.tobytes()


def objects(device):
    """Makes two optimizers, schedulers, scalers and modules after different histories."""
    for rate in (0.1, 0.7):
        model = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        model(torch.ones(1, 3, device=device)).sum().backward()
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        scheduler.last_epoch = int(10 * rate)
        scaler = torch.amp.GradScaler(device, init_scale=rate)
        yield model, {"model": model, "optim": optimizer, "sched": scheduler, "scaler": scaler}


@pytest.mark.parametrize("kind", ["model", "optim", "sched", "scaler"])
def test_one_object_under_two_names_is_restored_once_or_refused(device, checkpointer, kind):
    (left, mine), (_, theirs), (model, here) = *objects(device), next(objects(device))
    checkpointer.save(1, {"p": left, "a": mine[kind], "b": theirs[kind]}).wait()
    before = [copy.deepcopy(each.state_dict()) for each in (model, here[kind])]
    state = {"p": model, "a": here[kind], "b": here[kind]}
    with pytest.raises(RefusedError, match=r"[ap] and b: they are one"):
        checkpointer.restore(state)
    assert same([model.state_dict(), here[kind].state_dict()], before)
    checkpointer.save(1, {"p": left, "a": mine[kind], "b": mine[kind]}).wait()
    checkpointer.restore(state)
    assert same(here[kind].state_dict(), mine[kind].state_dict())


def two_groups(device, rates, *, offload=False):
    parameters = [nn.Parameter(torch.ones(2, device=device)) for _ in range(3)]
    groups = [{"params": [each]} for each in parameters]
    optimizer = torch.optim.Adam(groups, lr=rates[0])
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate
    if offload:
        residency.offload_optimizer(optimizer)
    return {"p": nn.ParameterList(parameters), "o": optimizer}


def rates_of(state):
    return [float(group["lr"]) for group in state["o"].param_groups]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_tensor_that_is_the_rate_of_all_groups_gives_each_the_rate_that_was_saved(
    device, checkpointer, offload, is_tensor, dtype
):
    values = [0.125, 0.75, 0.125]
    rates = [torch.tensor(v) for v in values] if is_tensor else values
    checkpointer.save(1, two_groups(device, rates, offload=offload)).wait()
    shared = torch.tensor(0.5, dtype=dtype)
    state = two_groups(device, [shared] * 3, offload=offload)
    checkpointer.restore(state)
    assert rates_of(state) == values
    assert state["o"].param_groups[0]["lr"] is shared
    assert state["o"].param_groups[2]["lr"] is shared
    checkpointer.save(1, two_groups(device, [rates[1]] * 3, offload=offload)).wait()
    state = two_groups(device, [shared] * 3, offload=offload)
    checkpointer.restore(state)
    assert all(group["lr"] is shared for group in state["o"].param_groups)
    assert rates_of(state) == [0.75] * 3


def test_two_optimizers_over_one_tensor_for_their_rates_get_their_own(device, checkpointer):
    def state(left, right):
        both = [two_groups(device, [rate] * 3) for rate in (left, right)]
        return {f"{key}{i}": each[key] for i, each in enumerate(both) for key in each}

    checkpointer.save(1, state(torch.tensor(0.25), torch.tensor(0.5))).wait()
    shared = torch.tensor(1.0)
    here = state(shared, shared)
    checkpointer.restore(here)
    rates = [here[name].param_groups[1]["lr"].item() for name in ("o0", "o1")]
    assert rates == [0.25, 0.5]
    assert here["o0"].param_groups[0]["lr"] is shared


def test_a_rate_that_the_state_names_beside_its_optimizer_is_one_memory(device, checkpointer):
    rate = torch.tensor(0.25)
    checkpointer.save(1, {**two_groups(device, [rate] * 3), "rate": rate + 1}).wait()
    here = torch.tensor(0.5)
    state = {**two_groups(device, [here] * 3), "rate": here}
    with pytest.raises(RefusedError, match="they share memory here, and their"):
        checkpointer.restore(state)
    assert here.item() == 0.5


def tied(chance, make, depth=3):
    """Draws a tree whose containers stand in several places, of a stock of leaves."""
    stock: list[Any] = [1, "x", None]
    for _ in range(chance.randrange(3, 9)):
        parts = [chance.choice(stock) for _ in range(chance.randrange(1, 4))]
        stock.append(
            chance.choice(
                (
                    lambda p: list(p),
                    lambda p: dict(zip("abc", p, strict=False)),
                    lambda p: OrderedDict(zip("abc", p, strict=False)),
                    lambda p: tuple(p),
                    lambda p: make(),
                )
            )(parts)
        )
    return {"s": stock[-4:]}


@pytest.mark.parametrize("seed", range(40))
def test_trees_with_ties_come_back_with_their_ties_as_torch_load_makes_them(checkpointer, seed):
    def tree(first):
        numbers = iter(range(first, first + 99))
        chance = random.Random(seed)
        kinds = (
            lambda n: numpy.full(2, n),
            lambda n: bytearray([n % 256] * 3),
            lambda n: torch.full((2,), float(n)),
            lambda n: [n, {n}],
        )
        return tied(chance, lambda: chance.choice(kinds)(next(numbers)))

    saved, here = tree(1), tree(100)
    ties = shape_of(here)
    checkpointer.save(1, saved).wait()
    checkpointer.restore(here)
    assert same(here, judged(saved))
    assert shape_of(here) == ties == shape_of(judged(saved))


def shape_of(tree):
    """Returns, of each mutable object of a tree in its order, as which of them it was met first."""
    first: dict[int, int] = {}
    met = []

    def look(value):
        if isinstance(value, dict | list | bytearray | numpy.ndarray | torch.Tensor):
            met.append(first.setdefault(id(value), len(first)))
        if isinstance(value, dict | list | tuple):
            for each in value.values() if isinstance(value, dict) else value:
                look(each)

    look(tree)
    return met
