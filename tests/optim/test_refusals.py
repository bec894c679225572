"""What cannot be done exactly is refused before anything moves, and the optimizer steps on."""

import copy
import pickle
import types

import pytest
import torch

import residency
from residency import sim
from residency._transfer import _slab


class Coupled(torch.optim.SGD):
    """Divides every gradient by the norm over all of them, inside the step."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.float().square().sum() for g in grads]).sum().sqrt()
        for grad in grads:
            grad.div_(norm.to(grad.dtype))
        super().step()


class RowWise(torch.optim.Optimizer):
    """Keeps one scale for each parameter, so that a parameter cannot be cut."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                    buffer.add_(p.grad / (1 + p.grad.abs().max()))
                    p.sub_(buffer, alpha=group["lr"])


class FaintlyCoupled(torch.optim.Optimizer):
    """Scales every gradient by a factor that float32 rounds to 1, and counts in whole numbers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        factor = 1 + 1e-12 * len(grads)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["count"] = torch.zeros_like(p, dtype=torch.int64)
                count = self.state[p]["count"].add_(1)
                # A bitwise operation: it fails where the count is no whole number any more.
                p.sub_(p.grad * factor * (count & 3), alpha=group["lr"])


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_coupling_that_only_float64_shows_is_found_beside_a_state_of_whole_numbers(
    lab, num_steps
):
    parameters = lab.parameters()
    optimizer = FaintlyCoupled(parameters)
    for step in range(num_steps):
        lab.set_gradients(parameters, step, missing=False)
        optimizer.step()
    with pytest.raises(residency.RefusedError, match="couples"):
        residency.offload_optimizer(optimizer)


class Counting(torch.optim.AdamW):
    """Counts its steps in the groups and on itself, and draws no conclusion from it."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


class TouchesIdle(torch.optim.SGD):
    """Decays parameters that have no gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        super().step()


def flag(name):
    def make(lab):
        parameters = lab.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        optimizer.param_groups[0][name] = True
        return optimizer

    return make


def two_devices(lab):
    return torch.optim.AdamW([*lab.parameters(), torch.nn.Parameter(torch.ones(3))])


def patched(lab):
    optimizer = torch.optim.AdamW(lab.parameters())
    optimizer.step = types.MethodType(lambda self: None, optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda lab: torch.optim.LBFGS(lab.parameters()), "one vector"),
        (lambda lab: torch.optim.SparseAdam(lab.parameters()), "sparse"),
        (lambda lab: Coupled(lab.parameters(), lr=1e-2), "couples"),
        (lambda lab: TouchesIdle(lab.parameters(), lr=1e-2), "no gradient"),
        (flag("capturable"), "capturable"),
        (flag("differentiable"), "differentiable"),
        (two_devices, "one device"),
        (patched, "step"),
    ],
)
def test_what_is_refused_is_left_as_it_was(lab, make, reason):
    optimizer = make(lab)
    before = dict(vars(optimizer))
    with pytest.raises(residency.RefusedError, match=reason):
        residency.offload_optimizer(optimizer)
    assert vars(optimizer) == before
    assert not isinstance(optimizer, residency.OffloadedOptimizer)


def test_a_refused_optimizer_steps_as_it_would_have(lab):
    results = []
    for ask in (True, False):
        parameters = lab.parameters()
        optimizer = Coupled(parameters, lr=1e-2, momentum=0.9)
        if ask:
            torch.manual_seed(5)
            expected = torch.rand(3)
            torch.manual_seed(5)
            with pytest.raises(residency.RefusedError):
                residency.offload_optimizer(optimizer)
            assert torch.equal(torch.rand(3), expected)
        lab.take_steps(optimizer, parameters, range(3))
        results.append(lab.read(optimizer, parameters))
    lab.assert_equal(*results)


@pytest.mark.parametrize("cls", [RowWise, Counting])
def test_a_foreign_class_that_can_be_cut_is_streamed_exactly(lab, cls):
    results = []
    for offload in (True, False):
        parameters = lab.parameters()
        optimizer = cls(lab.groups(parameters)) if cls is RowWise else cls(parameters, lr=1e-2)
        if offload:
            residency.offload_optimizer(optimizer, bucket=lab.bucket, slots=2)
        lab.take_steps(optimizer, parameters, range(5))
        results.append(lab.read(optimizer, parameters))
        if cls is Counting:
            assert optimizer.count == 5
    lab.assert_equal(*results)


@pytest.mark.parametrize(
    "settings", [{"slots": 0}, {"slots": 1.5}, {"bucket": "1 GB"}, {"bucket": 0}, {"resident": -1}]
)
def test_settings_that_mean_nothing_are_refused(lab, settings):
    optimizer, _ = lab.adamw()
    with pytest.raises(residency.InvalidArgumentError):
        residency.offload_optimizer(optimizer, **settings)
    assert type(optimizer) is torch.optim.AdamW


_LAYER = torch.nn.Linear(2, 2)
_OPTIMIZER = torch.optim.AdamW(_LAYER.parameters())


@pytest.mark.parametrize("function", [residency.offload_optimizer, residency.onload_optimizer])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((_OPTIMIZER, None), "tuple of AdamW, NoneType; .*: pass its item 0, the AdamW"),
        ([_OPTIMIZER, _OPTIMIZER], "list of AdamW, AdamW; .* for each optimizer in it"),
        ([], "list of nothing; .*: call {} for each optimizer"),
        (_LAYER, r"Linear, which is a torch.nn.Module; .*: pass the optimizer that steps it, su"),
        (torch.optim.AdamW, "the class AdamW; .*: make one of it"),
        (torch.optim.lr_scheduler.StepLR(_OPTIMIZER, 1), "StepLR; .*: pass its .optimizer"),
        ("adamw", "a str; .*: pass the one that does the steps"),
        (None, "a NoneType; "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_optimizer_is_named_with_what_to_pass(function, given, said):
    expected = f"{function.__name__} got .*{said.replace('{}', function.__name__)}"
    with pytest.raises(residency.InvalidArgumentError, match=expected) as info:
        function(given)
    assert "expected a torch.optim.Optimizer. Nothing was changed" in str(info.value)


def test_a_second_offload_and_an_onload_of_a_plain_optimizer_are_refused(lab):
    optimizer, parameters = lab.adamw()
    with pytest.raises(residency.RefusedError, match="not offloaded"):
        residency.onload_optimizer(optimizer)
    residency.offload_optimizer(optimizer)
    with pytest.raises(residency.RefusedError, match="already"):
        residency.offload_optimizer(optimizer)
    lab.take_steps(optimizer, parameters, range(2))


def test_a_sparse_gradient_is_refused_before_any_parameter_is_stepped(lab):
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    dense = lab.parameters()[0]
    weight = torch.nn.Parameter(embedding.weight.detach().to(lab.device))
    optimizer = residency.offload_optimizer(torch.optim.AdamW([dense, weight]))
    before = dense.detach().cpu().clone()
    dense.grad = torch.ones_like(dense)
    embedding(torch.tensor([1, 2])).sum().backward()
    sparse = embedding.weight.grad
    if sim.is_enabled():  # the simulated accelerator has no sparse tensors
        weight.__class__ = type("Sparse", (torch.nn.Parameter,), {"grad": sparse})
    else:
        weight.grad = sparse.to(lab.device)
    with pytest.raises(residency.RefusedError, match="sparse"):
        optimizer.step()
    assert torch.equal(dense.detach().cpu(), before)


def test_too_little_host_memory_is_refused_with_the_figures(lab, monkeypatch, pinned_bytes):
    optimizer, parameters = lab.adamw()
    before = pinned_bytes()
    monkeypatch.setattr(_slab, "available_host_bytes", lambda: 1000)
    with pytest.raises(residency.RefusedError, match="1000 B are"):
        residency.offload_optimizer(optimizer)
    assert pinned_bytes() == before
    assert type(optimizer) is torch.optim.AdamW
    lab.take_steps(optimizer, parameters, range(1))


def test_an_offloaded_optimizer_is_neither_pickled_nor_copied(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(1))
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(residency.RefusedError, match="onload_optimizer"):
            copied(optimizer)


def test_a_step_bound_before_the_offload_is_refused_with_the_reason(lab):
    optimizer, parameters = lab.adamw()
    old = optimizer.step
    residency.offload_optimizer(optimizer)
    new = optimizer.step
    lab.take_steps(optimizer, parameters, range(1))
    before = [p.detach().cpu().clone() for p in parameters]
    with pytest.raises(residency.RefusedError, match="before the offload"):
        old()
    assert all(torch.equal(p.detach().cpu(), b) for p, b in zip(parameters, before, strict=True))
    residency.onload_optimizer(optimizer)
    with pytest.raises(residency.RefusedError, match="not offloaded"):
        new()
    old()


class Subclassed(torch.Tensor):
    """Is a tensor of another type."""


def sparse_parameter(lab):
    parameter = torch.nn.Parameter(torch.ones(4, 4).to(lab.device))
    # The simulated accelerator has no sparse tensors, so the layout is all that is given.
    sparse = torch.ones(4, 4).to_sparse()
    if sim.is_enabled():
        return torch.nn.Parameter(sparse)
    parameter.grad = sparse.to(lab.device)
    return parameter


def new_parameter(lab):
    return torch.nn.Parameter(torch.ones(4, 4).to(lab.device))


GROUPS = {
    "capturable": lambda lab: {"params": [new_parameter(lab)], "capturable": True},
    "differentiable": lambda lab: {"params": [new_parameter(lab)], "differentiable": True},
    "twice": lambda lab: {"params": [new_parameter(lab)] * 2},
    "set": lambda lab: {"params": {new_parameter(lab)}},
    "subclass": lambda lab: {
        "params": [torch.ones(3).to(lab.device).as_subclass(Subclassed).requires_grad_()]
    },
    "sparse": lambda lab: {"params": [sparse_parameter(lab)]},
    "host": lambda lab: {"params": [torch.nn.Parameter(torch.ones(3))]},
    "known": lambda lab: {"params": [lab.known]},
    "not a leaf": lambda lab: {"params": [new_parameter(lab) * 2]},
    "no dict": lambda lab: [("params", [])],
}


@pytest.mark.parametrize("what", GROUPS)
def test_a_group_that_an_offload_would_refuse_is_refused_with_nothing_changed(lab, what):
    parameters = lab.parameters()
    lab.known = parameters[0]
    optimizer = residency.offload_optimizer(torch.optim.AdamW(parameters, lr=1e-2))
    lab.take_steps(optimizer, parameters, range(1))
    before = lab.read(optimizer, parameters)
    group = GROUPS[what](lab)
    given = dict(group)
    error = {"set": TypeError, "no dict": TypeError, "known": ValueError, "not a leaf": ValueError}
    with pytest.raises(error.get(what, residency.RefusedError)):
        optimizer.add_param_group(group)
    lab.assert_equal(lab.read(optimizer, parameters), before)
    assert dict(group).keys() == given.keys()
    lab.take_steps(optimizer, parameters, range(1, 2))


class CouplesItsGroups(torch.optim.SGD):
    """Takes the learning rate of all groups from how many there are."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups[1:] for p in g["params"] if p.grad is not None]
        for grad in grads:
            grad.div_(len(grads))
        super().step()


def test_a_group_that_makes_a_foreign_class_couple_its_parameters_is_refused(lab):
    parameters = lab.parameters()
    optimizer = CouplesItsGroups(parameters[:3], lr=1e-2)
    residency.offload_optimizer(optimizer, bucket=lab.bucket)
    with pytest.raises(residency.RefusedError, match="couples"):
        optimizer.add_param_group({"params": parameters[3:]})
    assert len(optimizer.param_groups) == 1
    lab.take_steps(optimizer, parameters[:3], range(1))


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
@pytest.mark.parametrize("how", ["loaded", "set by hand", "moved"])
def test_a_setting_that_cannot_be_streamed_is_refused_at_every_entrance(lab, flag, how):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    saved = copy.deepcopy(optimizer.state_dict())
    before = lab.read(optimizer, parameters)
    lab.set_gradients(parameters, 2, missing=False)
    if how == "loaded":
        saved["param_groups"][1][flag] = True
        with pytest.raises(residency.RefusedError, match=f"{flag}=True"):
            optimizer.load_state_dict(saved)
    elif how == "set by hand":
        optimizer.param_groups[1][flag] = True
        with pytest.raises(residency.RefusedError, match=f"{flag}=True"):
            optimizer.step()
        optimizer.param_groups[1][flag] = False
    else:
        model = torch.nn.ParameterList(parameters).cpu()
        on_host = torch.optim.AdamW(lab.groups(list(model)), lr=1e-2)
        residency.offload_optimizer(on_host)
        on_host.param_groups[1][flag] = True
        model.to(lab.device)
        lab.set_gradients(parameters, 2, missing=False)
        with pytest.raises(residency.RefusedError, match=f"{flag}=True"):
            on_host.prime()
        return
    lab.assert_equal(lab.read(optimizer, parameters), before)
    optimizer.step()
    plain, others = lab.adamw()
    lab.take_steps(plain, others, range(3), missing=False)
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, others))


def test_adafactor_with_two_precisions_in_a_group_and_no_epsilon_is_refused(device):
    def make(**settings):
        parameters = [
            torch.nn.Parameter(torch.ones(4, 4, device=device, dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16)
        ]
        return torch.optim.Adafactor(parameters, lr=0.05, **settings)

    with pytest.raises(residency.RefusedError, match=r"eps\[0\]=None"):
        residency.offload_optimizer(make())
    residency.offload_optimizer(make(eps=(1e-30, 1e-3)))
