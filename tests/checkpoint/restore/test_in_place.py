"""A restore writes over values that are there: autograd hears of it, orders come back,
TorchScript's modules are modules, and a random generator of another kind is no damage."""

from __future__ import annotations

import random
import warnings
from collections import Counter, OrderedDict, defaultdict

import numpy
import pytest
import torch

import residency
from residency import RefusedError


def _network() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))


def _stock(module, folder):
    module.load_state_dict(torch.load(folder / "m.pt"))


def _restore(module, folder):
    residency.Checkpointer(folder / "saves").restore({"m": module})


def _into(module, folder):
    residency.load_into(module, folder / "m.pt")


@pytest.mark.parametrize("fill", [_stock, _restore, _into])
def test_a_graph_of_the_values_before_does_not_go_on_with_those_after(tmp_path, fill):
    saved = _network()
    torch.save(saved.state_dict(), tmp_path / "m.pt")
    with residency.Checkpointer(tmp_path / "saves") as checkpointer:
        checkpointer.save(1, {"m": saved})
    module = _network()
    loss = module(torch.ones(1, 2)).square().sum()
    fill(module, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_are_filled(tmp_path):
    with torch.inference_mode():
        module = torch.nn.Linear(2, 2)
    torch.save({n: torch.ones_like(t) for n, t in module.state_dict().items()}, tmp_path / "m.pt")
    _into(module, tmp_path)
    assert module.weight.eq(1).all()


@pytest.mark.filterwarnings("ignore:.*does not fit")
@pytest.mark.parametrize("kind", [dict, OrderedDict, Counter, lambda x: defaultdict(int, x)])
def test_a_mapping_has_the_order_that_was_saved(tmp_path, kind):
    draws = random.Random(3)
    for attempt in range(20):
        keys = [*range(5), "a", "b", (1, 2)]
        draws.shuffle(keys)
        saved = kind({key: draws.randrange(9) for key in keys[:6]})
        with residency.Checkpointer(tmp_path / str(attempt)) as checkpointer:
            checkpointer.save(1, {"x": saved})
            order = [*saved, *keys[6 : draws.randrange(6, 9)]]
            draws.shuffle(order)
            here = kind(dict.fromkeys(order, 0))
            checkpointer.restore({"x": here}, strict=False)
        assert [key for key in here if key in saved] == list(saved)
        assert {key: here[key] for key in saved} == dict(saved)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 2))])
@pytest.mark.parametrize("is_part", [True, False])
def test_torchscripts_modules_are_modules(tmp_path, make, is_part):
    def build():
        scripted = make(_network())
        return torch.nn.ModuleDict({"pre": scripted, "head": _network()}) if is_part else scripted

    saved, other, third = build(), build(), build()
    torch.save(saved.state_dict(), tmp_path / "m.pt")
    with residency.Checkpointer(tmp_path / "saves") as checkpointer:
        checkpointer.prepare({"m": saved})
        checkpointer.save(1, {"m": saved})
    tree = residency.snapshot({"m": saved}).tree
    _restore(other, tmp_path)
    _into(third, tmp_path)
    for found in (other.state_dict(), third.state_dict(), tree["m"]):
        for name, value in saved.state_dict().items():
            assert torch.equal(found[name], value)


@pytest.fixture
def numpy_generator():
    before = numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(before)


KINDS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_numpys_global_generator_may_be_of_any_kind(tmp_path, numpy_generator, saved, here):
    numpy.random.set_bit_generator(getattr(numpy.random, saved)(3))
    with warnings.catch_warnings(), residency.Checkpointer(tmp_path) as checkpointer:
        warnings.simplefilter("error")
        checkpointer.save(1, {"a": 1})
        expected = numpy.random.standard_normal(5)
        numpy.random.set_bit_generator(getattr(numpy.random, here)(4))
        if saved == here:
            checkpointer.restore({"a": 0})
            assert (numpy.random.standard_normal(5) == expected).all()
            return
        state = {"a": 0}
        with pytest.raises(RefusedError, match=rf"set_bit_generator\(numpy.random.{saved}\(\)\)"):
            checkpointer.restore(state)
        assert state == {"a": 0}
        numpy.random.set_bit_generator(getattr(numpy.random, saved)())  # as the error says
        checkpointer.restore(state)
        assert (numpy.random.standard_normal(5) == expected).all()


class _Outer(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler with another one in its state, as warmups of the web have it."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)
        self.after = torch.optim.lr_scheduler.ConstantLR(optimizer)


def test_an_object_inside_of_a_state_dict_is_refused_with_a_way(tmp_path):
    optimizer = torch.optim.SGD(_network().parameters(), lr=0.1)
    with (
        residency.Checkpointer(tmp_path) as checkpointer,
        pytest.raises(RefusedError, match=r"let that one give its state_dict\(\) instead"),
    ):
        checkpointer.save(1, {"s": _Outer(optimizer)})


class _Prefixed(torch.nn.Linear):
    """A layer with names of its own in its state dict, as wrappers have them."""

    def state_dict(self, *args, **options):
        return {f"pre.{n}": v for n, v in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state_dict, *args, **options):
        own = {name.removeprefix("pre."): value for name, value in state_dict.items()}
        return super().load_state_dict(own, *args, **options)


def test_a_file_of_a_modules_own_names_is_loaded_into_it(tmp_path):
    saved, fresh = _Prefixed(2, 2), _Prefixed(2, 2)
    torch.save(saved.state_dict(), tmp_path / "m.pt")
    residency.load_into(fresh, tmp_path / "m.pt")
    assert torch.equal(fresh.weight, saved.weight)
