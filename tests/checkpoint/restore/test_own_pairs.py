"""What only an object's own ``state_dict`` and ``load_state_dict`` know goes through them: saved
and given back as the pair itself gives it back, or refused in the save.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import residency
from residency import RefusedError


@pytest.fixture
def checkpointer(tmp_path) -> Iterator[residency.Checkpointer]:
    with residency.Checkpointer(tmp_path / "saves") as made:
        yield made


def on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    return [on_host(each) for each in value] if isinstance(value, list) else copy.deepcopy(value)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left.cpu(), right.cpu())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


# ------------------------------------------------------------------------------------- modules


class Part(nn.Linear):
    """A part with some ways of its own, drawn at random, of which loading undoes saving."""

    def __init__(self, ways: frozenset[str], chance: random.Random):
        super().__init__(3, 3)
        self.ways = ways
        self.count, self.rows = 0, []
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.register_buffer("seen", torch.zeros(0 if "grown" in ways else 2))
        if "post hook" in ways:
            self.register_load_state_dict_post_hook(lambda part, _: part.derive())
        if "pre hook" in ways:
            self.register_load_state_dict_pre_hook(
                lambda part, found, prefix, *_: part.note(prefix)
            )
        if "halving hooks" in ways:
            self.register_state_dict_post_hook(
                lambda _, found, prefix, __: self.double(found, prefix)
            )
            self._register_load_state_dict_pre_hook(self.halve)
        self.last = None
        with torch.no_grad():
            self.weight.fill_(chance.random())

    def derive(self):
        self.table.copy_(self.weight.detach().square().sum(1))

    def note(self, prefix):
        self.last = prefix

    @staticmethod
    def double(found, prefix):
        found[prefix + "bias"] = found[prefix + "bias"].detach() * 2

    @staticmethod
    def halve(found, prefix, *_):
        if prefix + "bias" in found:
            found[prefix + "bias"] = found[prefix + "bias"] / 2

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if "value" in self.ways:
            destination[prefix + "count"] = self.count
        if "list" in self.ways:
            destination[prefix + "rows"] = [row.detach() for row in self.rows]
        if "made" in self.ways:
            destination[prefix + "sum"] = self.weight.detach().sum() + self.count

    def _load_from_state_dict(self, found, prefix, *rest):
        if "value" in self.ways:
            self.count = found.pop(prefix + "count")
        if "list" in self.ways:
            self.rows = list(found.pop(prefix + "rows"))
        if "made" in self.ways:
            self.total = found.pop(prefix + "sum")
        if "grown" in self.ways:
            self.seen.resize_(found[prefix + "seen"].shape)
        super()._load_from_state_dict(found, prefix, *rest)
        if "override" in self.ways:
            self.derive()

    def train_a_little(self, chance: random.Random):
        with torch.no_grad():
            self.weight.add_(chance.random())
            self.bias.add_(chance.random())
        self.count += chance.randint(1, 9)
        self.rows.append(torch.full((2,), chance.random(), device=self.weight.device))
        if "grown" in self.ways:
            self.seen.resize_(4).fill_(chance.random())
        self.derive()

    def picture(self) -> dict[str, Any]:
        rows = [row.device.type == self.weight.device.type for row in self.rows]
        names = ("weight", "bias", "table", "seen", "count", "rows", "last", "total")
        return on_host({n: getattr(self, n, None) for n in names} | {"where": rows})


class PlainPart(nn.Linear):
    """A part whose tensors are all that there is to it."""

    def __init__(self, chance: random.Random):
        super().__init__(3, 3)
        self.given: object = chance.random()

    def get_extra_state(self):
        return {"given": self.given}

    def set_extra_state(self, state):
        self.given = state["given"]

    def train_a_little(self, chance: random.Random):
        self.given = chance.random()
        with torch.no_grad():
            self.weight.add_(chance.random())

    def picture(self) -> dict[str, Any]:
        return on_host({"weight": self.weight, "given": self.given})


WAYS = ("value", "list", "made", "grown", "override", "post hook", "pre hook", "halving hooks")


def random_module(seed: int) -> nn.Module:
    chance = random.Random(seed)
    module = nn.Sequential()
    for index in range(chance.randint(1, 4)):
        ways = frozenset(each for each in WAYS if chance.random() < 0.4)
        part = PlainPart(chance) if chance.random() < 0.3 else Part(ways, chance)
        module.add_module(str(index), nn.Sequential(part) if chance.random() < 0.5 else part)
    return module


def parts_of(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, Part | PlainPart)]


@pytest.mark.parametrize("seed", range(12))
def test_a_module_with_ways_of_its_own_comes_back_as_by_its_own_pair(
    device, checkpointer, tmp_path, seed
):
    saved = random_module(seed).to(device)
    for part in parts_of(saved):
        part.train_a_little(random.Random(seed + 1))
    stock, ours, filled = (random_module(seed).to(device) for _ in range(3))
    stock.load_state_dict(copy.deepcopy(saved.state_dict()))
    before = {name: id(p) for name, p in ours.named_parameters()}
    checkpointer.save(1, {"m": saved}).wait()
    checkpointer.restore({"m": ours})
    torch.save(saved.state_dict(), tmp_path / "m.pt")
    for part, twin in zip(parts_of(ours), parts_of(stock), strict=True):
        assert same(part.picture(), twin.picture()), getattr(part, "ways", "")
    assert {name: id(p) for name, p in ours.named_parameters()} == before
    if all(isinstance(value, Tensor) for value in saved.state_dict().values()):
        residency.load_into(filled, tmp_path / "m.pt")
        for part, twin in zip(parts_of(filled), parts_of(stock), strict=True):
            assert same(part.picture(), twin.picture())


class Whole(nn.Module):
    """Overrides both methods."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.updates = 0

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "updates": self.updates}

    def load_state_dict(self, found, *args, **kwargs):
        found = dict(found)
        self.updates = found.pop("updates")
        return super().load_state_dict(found, *args, **kwargs)


def test_a_module_that_overrides_both_methods_is_given_what_it_gave(checkpointer):
    saved, there = Whole(), Whole()
    saved.updates = 7
    checkpointer.save(1, {"m": saved}).wait()
    checkpointer.restore({"m": there})
    assert there.updates == 7
    assert torch.equal(there.inner.weight, saved.inner.weight)


def test_what_no_method_of_a_module_takes_back_is_refused_in_the_save(checkpointer, tmp_path):
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_state_dict_post_hook(
        lambda _, found, prefix, __: found.update({prefix + "n": 3})
    )
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict(module.state_dict())
    for call in (checkpointer.prepare, lambda state: checkpointer.save(1, state)):
        with pytest.raises(RefusedError, match=r"m\.0\.n is in the state_dict\(\) of Sequential"):
            call({"m": module})
    assert checkpointer.steps() == []
    assert residency.snapshot({"m": module}).tree["m"]["0.n"] == 3


def test_a_tensor_that_is_no_buffer_is_filled_where_it_is(device, checkpointer):
    class Held(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.held = torch.zeros(3, device=device)

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight.held"] = self.held  # as bitsandbytes' tables are given

    saved, there = Held().to(device), Held().to(device)
    saved.held.fill_(5)
    held = there.held
    checkpointer.save(1, {"m": saved}).wait()
    checkpointer.restore({"m": there})
    assert there.held is held
    assert held.tolist() == [5, 5, 5]


@pytest.mark.parametrize("call", ["restore", "load_into"])
def test_a_lazy_module_takes_its_shapes_from_what_it_loads(checkpointer, tmp_path, call):
    saved, there = nn.LazyLinear(3), nn.LazyLinear(3)
    saved(torch.ones(1, 4))
    if call == "restore":
        checkpointer.save(1, {"m": saved}).wait()
        checkpointer.restore({"m": there})
    else:
        torch.save(saved.state_dict(), tmp_path / "m.pt")
        residency.load_into(there, tmp_path / "m.pt")
    assert torch.equal(there.weight, saved.weight)


# ---------------------------------------------------------------------------------- optimizers


class Counting(Optimizer):
    """Steps by a count that is no part of the state, which its own methods keep."""

    def __init__(self, params, ways=frozenset()):
        super().__init__(params, {"lr": torch.tensor(0.1)})
        self.ways, self.count, self.loads = ways, 0, 0
        if "hooks" in ways:
            self.register_state_dict_post_hook(lambda o, found: found.update(count=o.count))
            self.register_load_state_dict_pre_hook(lambda o, found: o.take(found))
        if "renaming hooks" in ways:
            self.register_state_dict_post_hook(lambda _, found: renamed(found, "m", "moment"))
            self.register_load_state_dict_pre_hook(lambda _, found: renamed(found, "moment", "m"))
        if "post hook" in ways:
            self.register_load_state_dict_post_hook(lambda o: setattr(o, "loads", o.loads + 1))

    def take(self, found):
        self.count = found["count"]

    def state_dict(self):
        found = super().state_dict()
        if "override" in self.ways:
            found = {**found, "count": self.count, "sum": self.total()}
        if "doubled" in self.ways:
            found["state"] = {k: {**v, "m": v["m"] * 2} for k, v in found["state"].items()}
        return found

    def load_state_dict(self, state_dict):
        found = dict(state_dict)
        if "override" in self.ways:
            self.count = found.pop("count")
            self.sum = found.pop("sum")
        if "doubled" in self.ways:
            found["state"] = {k: {**v, "m": v["m"] / 2} for k, v in found["state"].items()}
        super().load_state_dict(found)

    def total(self):
        return sum(float(p.detach().float().sum()) for g in self.param_groups for p in g["params"])

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p, dtype=torch.float32)
                        state["step"] = torch.tensor(0.0)
                    state["step"] += 1
                    state["m"].mul_(0.9).add_(p.grad.float())
                    rate = float(group["lr"]) / self.count
                    p.add_(state["m"].to(p.dtype), alpha=-rate)


def renamed(found, old, new):
    state = {
        k: {new if name == old else name: each for name, each in v.items()}
        for k, v in found["state"].items()
    }
    return {**found, "state": state}


WAYS_TO_COUNT = [
    {"override"},
    {"hooks"},
    {"post hook"},
    {"override", "doubled", "post hook"},
    {"hooks", "renaming hooks"},
]


def run_of(device, ways, dtype, offloaded):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device, dtype)
    optimizer = Counting(model.parameters(), frozenset(ways))
    if offloaded:
        residency.offload_optimizer(optimizer)
    return model, optimizer


def steps(model, optimizer, num):
    for _ in range(num):
        first = next(model.parameters())
        model(torch.ones(2, 4, device=first.device, dtype=first.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("offloaded", [False, True], ids=["plain", "offloaded"])
@pytest.mark.parametrize("ways", WAYS_TO_COUNT, ids=lambda ways: "-".join(sorted(ways)))
def test_an_optimizer_with_a_pair_of_its_own_goes_on_as_if_uninterrupted(
    device, checkpointer, ways, offloaded, dtype
):
    model, optimizer = run_of(device, ways, dtype, offloaded)
    steps(model, optimizer, 3)
    state = {"model": model, "optimizer": optimizer}
    tree = residency.snapshot(optimizer).tree
    assert same(on_host(optimizer.state_dict()), on_host(tree))
    checkpointer.save(1, state).wait()
    there = run_of(device, ways, dtype, offloaded)
    rate = there[1].param_groups[0]["lr"]
    checkpointer.restore({"model": there[0], "optimizer": there[1]})
    assert there[1].count == (optimizer.count if ways & {"override", "hooks"} else 0)
    there[1].count = optimizer.count
    assert there[1].loads == ("post hook" in ways)
    assert there[1].param_groups[0]["lr"] is rate
    for run in ((model, optimizer), there):
        steps(*run, 2)
    assert torch.equal(there[0].weight, model.weight)
    moments = [next(iter(run[1].state.values()))["m"] for run in ((model, optimizer), there)]
    assert moments[0].dtype == moments[1].dtype == torch.float32
    assert torch.equal(*(each.cpu() for each in moments))


class Around(Optimizer):
    """Stands around another optimizer, as Lookahead does; its state dict has a form of its own."""

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        self.steps = 0

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def state_dict(self):
        return {"inner": self.inner.state_dict(), (0, "steps"): self.steps}

    def load_state_dict(self, found):
        self.inner.load_state_dict(found["inner"])
        self.steps = found[0, "steps"]

    def step(self, closure=None):
        self.steps += 1
        self.inner.step()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


def test_an_optimizer_around_another_is_saved_as_the_state_dict_that_it_gives(device, checkpointer):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        return model, Around(model.parameters())

    model, optimizer = make()
    steps(model, optimizer, 3)
    checkpointer.save(1, {"model": model, "optimizer": optimizer}).wait()
    there = make()
    checkpointer.restore({"model": there[0], "optimizer": there[1]})
    assert there[1].steps == 3
    for run in ((model, optimizer), there):
        steps(*run, 2)
    assert torch.equal(there[0].weight, model.weight)
    with pytest.raises(RefusedError, match="saved an object with state_dict, here a SGD"):
        checkpointer.restore({"optimizer": there[1].inner})


def test_keys_of_an_optimizers_own_meet_no_other_order_of_parameters(checkpointer):
    model = nn.Linear(2, 2)

    def make(params):
        return Counting(params, frozenset({"override"}))

    checkpointer.save(1, {"m": model, "o": make([model.weight, model.bias])}).wait()
    with pytest.raises(RefusedError, match="count, sum, of parameters in another order"):
        checkpointer.restore({"m": model, "o": make([model.bias, model.weight])})
    plain = Counting([model.weight, model.bias])
    plain.__class__ = type("Counting", (torch.optim.Optimizer,), {})
    with pytest.raises(RefusedError, match="which only a load_state_dict of its own takes"):
        checkpointer.restore({"m": model, "o": plain})


# ------------------------------------------------------------------------ scalers and schedules


class Scaler(torch.amp.GradScaler):
    """Counts its updates."""

    updates = 0

    def state_dict(self):
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, found):
        found = dict(found)
        self.updates = found.pop("updates")
        super().load_state_dict(found)


def test_a_scaler_with_values_of_its_own_gets_them_back(device, checkpointer):
    saved, there = Scaler(device.type), Scaler(device.type)
    saved.scale(torch.ones((), device=device))
    saved.updates = 7
    checkpointer.save(1, {"s": saved}).wait()
    checkpointer.restore({"s": there})
    assert there.state_dict() == saved.state_dict()
    with pytest.raises(RefusedError, match="s: saved an object with state_dict, here a GradScaler"):
        checkpointer.restore({"s": torch.amp.GradScaler(device.type)})
    checkpointer.save(2, {"s": torch.amp.GradScaler(device.type)}).wait()
    with pytest.raises(RefusedError, match="s: saved a GradScaler, here a Scaler"):
        checkpointer.restore({"s": there})


def test_what_an_object_had_on_a_device_is_given_to_it_on_one(device, checkpointer):
    class Average:
        def __init__(self):
            self.shadow = [torch.zeros(3, device=device), torch.zeros(2)]

        def state_dict(self):
            return {"shadow": self.shadow}

        def load_state_dict(self, state):
            self.shadow = state["shadow"]

    saved, there = Average(), Average()
    saved.shadow[0].fill_(2)
    checkpointer.save(1, {"a": saved}).wait()
    checkpointer.restore({"a": there})
    assert [each.device.type for each in there.shadow] == [device.type, "cpu"]
    assert there.shadow[0].tolist() == [2, 2, 2]


def test_a_generator_goes_on_where_it_was(device, checkpointer):
    saved = {"host": torch.Generator().manual_seed(3), "device": torch.Generator(device)}
    torch.rand(5, generator=saved["host"])
    checkpointer.save(1, saved).wait()
    there: dict[str, Any] = {"host": torch.Generator(), "device": None}
    host = there["host"]
    checkpointer.restore(there)
    assert there["host"] is host
    for name, generator in saved.items():
        drawn = [torch.rand(4, generator=g, device=g.device) for g in (generator, there[name])]
        assert torch.equal(*drawn)
