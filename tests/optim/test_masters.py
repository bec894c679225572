"""Float32 masters of low-precision parameters equal a reference that keeps them on the device."""

import copy

import pytest
import torch

import residency

CASES = [
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("SGD", {"momentum": 0.9}),
    ("NAdam", {}),
    ("Adafactor", {}),
    ("Muon", {}),
]


class Reference:
    """Steps float32 copies on the device and rounds them into the parameters."""

    def __init__(self, lab, name, options, parameters):
        self.parameters = parameters
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in parameters]
        self.optimizer = getattr(torch.optim, name)(lab.groups(self.masters), lr=1e-2, **options)

    def step(self):
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.parameters, self.masters, strict=True):
                if p.grad is not None:
                    p.copy_(master)


def streamed(lab, name="AdamW", options=None, **settings):
    shapes = {"shapes": lab.matrices} if name == "Muon" else {}
    parameters = lab.parameters(dtype=torch.bfloat16, **shapes)
    optimizer = getattr(torch.optim, name)(lab.groups(parameters), lr=1e-2, **(options or {}))
    settings = {"bucket": lab.bucket, "slots": 2, **settings}
    return residency.offload_optimizer(optimizer, master_weights=True, **settings), parameters


def assert_is(lab, optimizer, parameters, reference):
    for p, other in zip(parameters, reference.parameters, strict=True):
        assert torch.equal(p.detach().cpu(), other.detach().cpu())
    states = lab.read(optimizer, parameters).state
    others = lab.read(reference.optimizer, reference.masters).state
    for state, other, master in zip(states, others, reference.masters, strict=True):
        assert list(state) == ["master_weight", *other]
        assert torch.equal(state["master_weight"], master.detach().cpu())
        for key, value in other.items():
            assert state[key].dtype == value.dtype
            assert torch.equal(state[key], value), key


@pytest.mark.parametrize("resident", [0, "30KiB"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_steps_equal_those_of_masters_on_the_device(lab, name, options, resident):
    optimizer, parameters = streamed(lab, name, options, resident=resident)
    shapes = {"shapes": lab.matrices} if name == "Muon" else {}
    reference = Reference(lab, name, options, lab.parameters(dtype=torch.bfloat16, **shapes))
    lab.take_steps(optimizer, parameters, range(6))
    lab.take_steps(reference, reference.parameters, range(6))
    assert_is(lab, optimizer, parameters, reference)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("is_primed", [False, True])
def test_a_resumed_run_goes_on_from_the_masters(lab, order, is_primed):
    reference = Reference(lab, "AdamW", {}, lab.parameters(dtype=torch.bfloat16))
    lab.take_steps(reference, reference.parameters, range(5))
    optimizer, parameters = streamed(lab)
    lab.take_steps(optimizer, parameters, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in parameters]
    resumed, fresh = streamed(lab)
    if is_primed:
        resumed.prime()

    def load_model():
        with torch.no_grad():
            for p, value in zip(fresh, weights, strict=True):
                p.copy_(value)

    if order == "model first":
        load_model()
    resumed.load_state_dict(saved)
    if order == "optimizer first":
        load_model()
    lab.take_steps(resumed, fresh, range(3, 5))
    assert_is(lab, resumed, fresh, reference)


def test_what_somebody_else_writes_to_a_parameter_counts(lab):
    optimizer, parameters = streamed(lab)
    reference = Reference(lab, "AdamW", {}, lab.parameters(dtype=torch.bfloat16))
    for each, all_parameters in ((optimizer, parameters), (reference, reference.parameters)):
        lab.take_steps(each, all_parameters, range(2))
        with torch.no_grad():
            for p in all_parameters:
                p.view(-1)[:2].fill_(0.25)
    with torch.no_grad():
        for master in reference.masters:
            master.view(-1)[:2].fill_(0.25)
    lab.take_steps(optimizer, parameters, range(2, 4))
    lab.take_steps(reference, reference.parameters, range(2, 4))
    assert_is(lab, optimizer, parameters, reference)


def assign_half(p):
    p.data = p.data * 0.5


BEHIND_THE_COUNTER = {
    "clamped": lambda p: p.data.clamp_(-0.01, 0.01),
    "copied": lambda p: p.data.copy_(p.data * 0.5),
    "assigned": assign_half,
    "vector": lambda p: torch.nn.utils.vector_to_parameters(p.detach().reshape(-1) * 0.5, [p]),
    "sign of zero": lambda p: p.data.fill_(-0.0),
    "storage": lambda p: p.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("resident", [0, "1MiB"])
@pytest.mark.parametrize("how", BEHIND_THE_COUNTER)
def test_what_is_written_past_the_version_counter_counts(lab, how, resident):
    optimizer, parameters = streamed(lab, resident=resident)
    reference = Reference(lab, "AdamW", {}, lab.parameters(dtype=torch.bfloat16))
    for each, all_parameters in ((optimizer, parameters), (reference, reference.parameters)):
        lab.take_steps(each, all_parameters, range(2))
        for p in all_parameters:
            BEHIND_THE_COUNTER[how](p)
    with torch.no_grad():
        for master, p in zip(reference.masters, reference.parameters, strict=True):
            # Clamping leaves most of the small weights, and so their masters.
            rounded = master.to(p.dtype)
            is_same = rounded.view(torch.int16) == p.view(torch.int16)
            master.copy_(torch.where(is_same, master, p.float()))
    lab.take_steps(optimizer, parameters, range(2, 4))
    lab.take_steps(reference, reference.parameters, range(2, 4))
    assert_is(lab, optimizer, parameters, reference)


class Marking(torch.optim.Optimizer):
    """Reads and sets attributes of its parameters."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * getattr(p, "scale", 1.0))
                    p.times = getattr(p, "times", 0) + 1


def test_a_master_has_the_attributes_of_its_parameter(lab):
    parameters = lab.parameters(dtype=torch.bfloat16)
    optimizer = Marking(parameters, lr=1e-2)
    residency.offload_optimizer(optimizer, master_weights=True)
    before = [p.detach().float() for p in parameters]
    for p in parameters:
        p.scale = 0.5
    for step in range(2):
        lab.set_gradients(parameters, step, missing=False)
        before = [b - p.grad.float() * 1e-2 * 0.5 for b, p in zip(before, parameters, strict=True)]
        optimizer.step()
    assert [p.times for p in parameters] == [2] * len(parameters)
    for p, b in zip(parameters, before, strict=True):
        assert torch.allclose(p.detach().float(), b, rtol=1e-2, atol=1e-3)


def test_an_optimizer_that_has_stepped_goes_on_in_float32(lab):
    reference = Reference(lab, "AdamW", {}, lab.parameters(dtype=torch.bfloat16))
    parameters = lab.parameters(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(lab.groups(parameters), lr=1e-2)
    lab.take_steps(optimizer, parameters, range(2))
    with torch.no_grad():
        for p, other, master in zip(
            parameters, reference.parameters, reference.masters, strict=True
        ):
            other.copy_(p)
            master.copy_(p)
            reference.optimizer.state[master] = {
                k: v.float() for k, v in copy.deepcopy(optimizer.state[p]).items()
            }
    residency.offload_optimizer(optimizer, bucket=lab.bucket, master_weights=True)
    lab.take_steps(optimizer, parameters, range(2, 5), missing=False)
    lab.take_steps(reference, reference.parameters, range(2, 5), missing=False)
    assert_is(lab, optimizer, parameters, reference)


def test_float32_parameters_get_no_master(lab):
    parameters = lab.parameters()
    optimizer = torch.optim.AdamW(lab.groups(parameters), lr=1e-2)
    residency.offload_optimizer(optimizer, bucket=lab.bucket, master_weights=True)
    lab.take_steps(optimizer, parameters, range(3))
    plain, others = lab.adamw()
    lab.take_steps(plain, others, range(3))
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, others))


def test_master_weights_are_refused_where_nothing_streams_and_cannot_be_undone(lab):
    optimizer, parameters = streamed(lab)
    lab.take_steps(optimizer, parameters, range(1))
    with pytest.raises(residency.RefusedError, match="master weights"):
        residency.onload_optimizer(optimizer)
    on_host = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    with pytest.raises(residency.RefusedError, match="on the host"):
        residency.offload_optimizer(on_host, master_weights=True)
    assert type(on_host) is torch.optim.AdamW
    with pytest.raises(residency.InvalidArgumentError, match="master_weights is 1"):
        residency.offload_optimizer(on_host, master_weights=1)


@pytest.mark.parametrize("resident", [0, "1MiB"])
def test_a_save_without_masters_is_restored_into_masters_wherever_their_state_is(
    lab, tmp_path, resident
):
    saved = lab.parameters(dtype=torch.bfloat16)
    plain = torch.optim.AdamW(lab.groups(saved), lr=1e-2)
    lab.take_steps(plain, saved, range(2), missing=False)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"parameters": saved, "optimizer": plain})
    found = []
    for how in ("restored", "loaded"):
        optimizer, parameters = streamed(lab, resident=resident)
        lab.take_steps(optimizer, parameters, range(1), missing=False)
        if how == "restored":
            into = {"parameters": parameters, "optimizer": optimizer}
            residency.Checkpointer(tmp_path).restore(into, rng=False)
        else:
            with torch.no_grad():
                for p, value in zip(parameters, saved, strict=True):
                    p.copy_(value)
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        for p in parameters:
            on = lab.device if resident else torch.device("cpu")
            assert {optimizer.state[p][key].device for key in ("exp_avg", "exp_avg_sq")} == {on}
        lab.take_steps(optimizer, parameters, range(2, 4), missing=False)
        found.append(lab.read(optimizer, parameters))
    lab.assert_equal(*found)
