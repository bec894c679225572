"""Optimizers from outside ``torch.optim``: what a step changes besides state, and large tensors."""

import abc
import collections
import copy
import threading

import pytest
import torch

import residency
from residency._optim._trial._first_step import state_schema
from residency._optim._trial._separable import Separability

LARGE = ((96, 64), (33,), (128, 40), (5000,), (16, 16))


class Counting(torch.optim.AdamW):
    """Changes attributes and group values in place, in every form that people use."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.calls = {"n": 0}
        self.history = []
        self.recent = collections.deque(maxlen=2)
        self.nested = {"deep": [collections.Counter()]}
        self.ticks = torch.zeros(())
        self.update = self.update_plainly
        for group in self.param_groups:
            group["seen"] = []
            group["k"] = torch.zeros(())

    def update_plainly(self, closure):
        self.own = len(self.param_groups)
        return super().step(closure)

    def step(self, closure=None):
        self.calls["n"] += 1
        self.history.append(self.calls["n"])
        self.recent.append(self.calls["n"])
        self.nested["deep"][0]["steps"] += 1
        self.ticks += 1
        for group in self.param_groups:
            group["seen"].append(len(self.history))
            group["k"] += 1
        return self.update(closure)


class FromSizeOn(torch.optim.Optimizer):
    """Looks at whole tensors from 4,096 elements on, and at elements below."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "average" not in self.state[p]:
                    is_factored = p.numel() >= 4096 and p.dim() == 2
                    self.state[p]["average"] = p.new_zeros(p.shape[:1] if is_factored else p.shape)
                average = self.state[p]["average"]
                if average.shape != p.shape:
                    average.lerp_(p.grad.square().mean(1), 0.1)
                    p.sub_(p.grad / (average.sqrt() + 1e-3)[:, None], alpha=group["lr"])
                else:
                    scale = p.grad.square().mean() if p.numel() >= 4096 else 1.0
                    average.lerp_(p.grad.square() * scale, 0.1)
                    p.sub_(p.grad / (average.sqrt() + 1e-3), alpha=group["lr"])


class Scaled(torch.optim.AdamW):
    """Overrides the step of an element-wise class with one that is not element-wise."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm() if p.numel() >= 4096 else 1.0)
        return super().step(closure)


class Reading(FromSizeOn):
    """Cannot be tried out without values: it reads one before it makes its state."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if all(float(grad.abs().max()) < 1e9 for grad in grads):
            super().step(closure)


class TensorAttribute(torch.optim.SGD):
    """Changes a tensor of its own in place, at its third step or from the first on."""

    first = 1

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.calls = 0
        self.table = torch.zeros(4, device=self.param_groups[0]["params"][0].device)

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        if self.calls >= self.first:
            self.table.add_(1)
        return super().step(closure)


class LateTensorAttribute(TensorAttribute):
    """Does so only after the steps of any trial."""

    first = 12


class Abstract(abc.ABC, FromSizeOn):
    """Has another layout in Python than a class whose first base is an optimizer."""


class Slotted(Abstract):
    __slots__ = ("unused",)


class Sealed(FromSizeOn):
    def __init_subclass__(cls):
        raise TypeError("Sealed has no subclasses")


class Faintly(FromSizeOn):
    """Decays by a factor that all gradients set together, and that float32 rounds to 1."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = sum(grad.square().mean().item() for grad in grads)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - 1e-9 * norm / (1 + norm))
        super().step(closure)


class EveryFifth(FromSizeOn):
    """Couples its parameters, but only now and then."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        if self.calls % 5 == 0:
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(
                [p for g in self.param_groups for p in g["params"] if p.grad is not None],
                1.0,
                torch.nn.utils.get_total_norm(grads),
            )
        super().step(closure)


class Drawing(FromSizeOn):
    """Draws a number where nothing is drawn in parts: on the host, in its first step."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.rand(())
        super().step(closure)


class Noisy(FromSizeOn):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(torch.randn_like(p.grad))
        super().step(closure)


def run(lab, cls, *, offload, steps, **settings):
    parameters = lab.parameters(shapes=LARGE)
    optimizer = cls(lab.groups(parameters), lr=1e-2)
    if offload:
        residency.offload_optimizer(optimizer, **{"bucket": 4000, "slots": 2, **settings})
    lab.take_steps(optimizer, parameters, steps)
    return optimizer, parameters


@pytest.mark.parametrize("cls", [FromSizeOn, Scaled, Reading, Abstract, Slotted])
def test_a_class_that_treats_large_tensors_in_another_way_is_streamed_exactly(lab, cls):
    plain, others = run(lab, cls, offload=False, steps=range(5))
    streamed, parameters = run(lab, cls, offload=True, steps=range(5))
    assert streamed.statistics().num_buckets > 1
    lab.assert_equal(lab.read(streamed, parameters), lab.read(plain, others))


@pytest.mark.parametrize("cls", [FromSizeOn, Scaled])
def test_a_state_that_has_shapes_of_its_own_is_taken_in_after_the_first_steps(lab, cls):
    plain, others = run(lab, cls, offload=False, steps=range(5))
    streamed, parameters = run(lab, cls, offload=False, steps=range(3))
    residency.offload_optimizer(streamed, bucket=4000, slots=2)
    lab.take_steps(streamed, parameters, range(3, 5))
    lab.assert_equal(lab.read(streamed, parameters), lab.read(plain, others))


@pytest.mark.parametrize("cls", [Abstract, Slotted])
def test_a_class_of_another_layout_is_swapped_in_front_of_its_own_and_back(lab, cls):
    streamed, _ = run(lab, cls, offload=True, steps=range(1))
    assert isinstance(streamed, residency.OffloadedOptimizer)
    assert isinstance(streamed, cls)
    assert type(streamed).__mro__[1:3] == (residency.OffloadedOptimizer, cls)
    residency.onload_optimizer(streamed)
    assert type(streamed) is cls


def test_a_class_whose_instances_cannot_change_theirs_is_refused_before_anything_moves(lab):
    parameters = lab.parameters(shapes=LARGE)
    optimizer = Sealed(parameters, lr=1e-2)
    lab.take_steps(optimizer, parameters, range(1))
    before = dict(vars(optimizer))
    with pytest.raises(residency.RefusedError, match="TypeError: Sealed has no subclasses"):
        residency.offload_optimizer(optimizer)
    assert type(optimizer) is Sealed
    assert all(vars(optimizer)[name] is value for name, value in before.items())
    assert vars(optimizer).keys() == before.keys()


@pytest.mark.parametrize("cls", [FromSizeOn, Scaled, Counting])
def test_a_class_outside_torch_moves_whole_parameters(lab, cls):
    streamed, _ = run(lab, cls, offload=True, steps=range(0))
    assert streamed._residency.separability is Separability.PER_PARAMETER


def test_what_a_step_changes_in_place_is_changed_once_per_step_on_the_users_own_objects(lab):
    plain, others = run(lab, Counting, offload=False, steps=range(4))
    parameters = lab.parameters(shapes=LARGE)
    optimizer = Counting(lab.groups(parameters), lr=1e-2)
    names = ("calls", "history", "recent", "nested", "ticks")
    own = {name: getattr(optimizer, name) for name in names}
    seen = [group["seen"] for group in optimizer.param_groups]
    residency.offload_optimizer(optimizer, bucket=4000)
    assert optimizer.calls == {"n": 0}
    assert optimizer.ticks == 0
    assert seen == [[], [], []]
    lab.take_steps(optimizer, parameters, range(4))
    for name in names:
        assert getattr(optimizer, name) is own[name]
        assert getattr(optimizer, name) == getattr(plain, name)
    assert [group["seen"] for group in optimizer.param_groups] == [[1, 2, 3, 4]] * 3
    assert all(g["seen"] is s for g, s in zip(optimizer.param_groups, seen, strict=True))
    assert optimizer.update.__self__ is optimizer
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, others))


def test_a_step_that_fails_midway_leaves_attributes_and_group_values(lab, monkeypatch):
    optimizer, parameters = run(lab, Counting, offload=True, steps=range(2))
    lab.set_gradients(parameters, 2, missing=False)
    calls = []
    plain_step = torch.optim.AdamW.step

    def fail_at_the_second_part(self, closure=None):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain_step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", fail_at_the_second_part)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert len(calls) == 2
    assert optimizer.calls == {"n": 2}
    assert optimizer.history == [1, 2]


def test_tensors_of_an_optimizer_are_shared_and_not_cloned_for_each_part(lab):
    class WithTable(torch.optim.SGD):
        def step(self, closure=None):
            assert self.table.numel() == 1_000_000
            self.calls["n"] += 1
            return super().step(closure)

    parameters = lab.parameters(shapes=LARGE)
    optimizer = WithTable(parameters, lr=1e-2, momentum=0.9)
    optimizer.calls = {"n": 0}
    optimizer.table = torch.ones(1_000_000, device=lab.device)
    residency.offload_optimizer(optimizer, bucket=4000)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    lab.set_gradients(parameters, 2, missing=False)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    optimizer.step()
    assert torch.accelerator.max_memory_allocated() - before < optimizer.table.nbytes
    assert optimizer.calls == {"n": 3}


def test_a_tensor_that_a_step_changes_in_place_is_found_at_the_offload_or_at_the_step(lab):
    parameters = lab.parameters(shapes=LARGE)
    optimizer = TensorAttribute(parameters, lr=1e-2)
    with pytest.raises(residency.RefusedError, match="'table' in place"):
        residency.offload_optimizer(optimizer)
    assert optimizer.table.sum() == 0
    late = LateTensorAttribute(parameters, lr=1e-2)
    residency.offload_optimizer(late, bucket=4000)
    lab.take_steps(late, parameters, range(11))
    with pytest.raises(residency.ResidencyError, match="'table' in place"):
        lab.take_steps(late, parameters, range(11, 12))


@pytest.mark.parametrize(
    ("cls", "reason"), [(Faintly, "couples"), (EveryFifth, "couples"), (Noisy, "random numbers")]
)
def test_a_class_that_couples_faintly_or_rarely_or_by_chance_is_refused(lab, cls, reason):
    parameters = lab.parameters(shapes=LARGE)
    optimizer = cls(parameters, lr=1e-2)
    before = torch.get_rng_state()
    with pytest.raises(residency.RefusedError, match=reason):
        residency.offload_optimizer(optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.state == {}


def test_a_first_step_that_is_tried_out_draws_no_random_number_of_the_callers(lab):
    parameters = lab.parameters(shapes=LARGE)
    optimizer = Drawing(parameters, lr=1e-2)
    before = torch.get_rng_state()
    group = optimizer.param_groups[0]
    assert state_schema(optimizer, Drawing, group, parameters[0], is_local=True) is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.state == {}


def test_an_attribute_that_cannot_be_copied_is_refused_by_its_name(lab):
    optimizer = Counting(lab.parameters(shapes=LARGE), lr=1e-2)
    optimizer.nested["guard"] = threading.Lock()
    with pytest.raises(residency.RefusedError, match="'nested', a dict, cannot be copied"):
        residency.offload_optimizer(optimizer)
    assert optimizer.calls == {"n": 0}


def test_an_optimizer_that_holds_another_is_refused(lab):
    parameters = lab.parameters(shapes=LARGE)
    optimizer = Counting(parameters, lr=1e-2)
    optimizer.nested["inner"] = torch.optim.SGD(parameters, lr=1e-2)
    with pytest.raises(residency.RefusedError, match="holds another optimizer, a SGD"):
        residency.offload_optimizer(optimizer)


def test_attributes_of_a_class_of_torch_are_shared_whatever_they_are(lab):
    optimizer, parameters = lab.adamw()
    optimizer.guard = threading.Lock()
    optimizer.param_groups[0]["guard"] = optimizer.guard
    residency.offload_optimizer(optimizer, bucket=lab.bucket)
    lab.take_steps(optimizer, parameters, range(1))
    num_buckets = optimizer.statistics().num_buckets
    lab.take_steps(optimizer, parameters, range(1, 2), missing=False)
    # The first step knew as well as the second what state there is.
    assert optimizer.statistics().num_buckets == num_buckets > 1
    assert optimizer.param_groups[0]["guard"] is optimizer.guard


PLACES = set()


class Unforeseen(torch.optim.Optimizer):
    """Looks at a value in its first step, which tensors without bytes do not have, and keeps
    scalars of the host beside its tensors. Where steps found them is in ``PLACES``.
    """

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "average" not in state:
                    state["step"] = torch.zeros(())
                    state["average"] = torch.full_like(p, p.grad.abs().max().item())
                if "scale" not in state and p.dim() > 0:
                    state["scale"] = torch.ones(())
                tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
                PLACES.update((p.device, p.dim(), key, v.device) for key, v in tensors.items())
                state["step"] += 1
                state["average"].lerp_(p.grad, 0.1)
                p.sub_(state["average"], alpha=group["lr"] / state["step"].item())


def test_a_load_that_cannot_foresee_a_step_puts_scalars_where_a_first_step_does(lab):
    shapes = ((33,), (), (16, 16))
    others = lab.parameters(shapes=shapes)
    plain = Unforeseen(others, lr=1e-2)
    PLACES.clear()
    lab.take_steps(plain, others, range(2), missing=False)
    expected = {place for place in PLACES if place[0] == lab.device}
    saved = copy.deepcopy(plain.state_dict())
    parameters = lab.parameters(shapes=shapes)
    resumed = residency.offload_optimizer(Unforeseen(parameters, lr=1e-2))
    with torch.no_grad():
        for p, other in zip(parameters, others, strict=True):
            p.copy_(other)
    resumed.load_state_dict(saved)
    lab.take_steps(plain, others, range(2, 4), missing=False)
    PLACES.clear()
    lab.take_steps(resumed, parameters, range(2, 4), missing=False)
    lab.assert_equal(lab.read(resumed, parameters), lab.read(plain, others))
    assert {place for place in PLACES if place[0] == lab.device} == expected
