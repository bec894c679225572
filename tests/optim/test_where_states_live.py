"""Two rules say where a state lives; each has other knowledge, and for torch's own classes they
agree with the class' own step.

A restore into a plain optimizer has neither state nor schema, only the saved entry; a load of an
offloaded one, and a state whose model comes from the host, have the schema of a first step; an
assignment has the value alone.
"""

import pytest
import torch

import residency
from residency._checkpoint._restore._plain_optimizers import _needs_device
from residency._optim._offload_record import record_of
from residency._optim._placement import members_of
from residency._optim._places import Residents, StatePlace, needs_device
from residency._optim._trial._first_step import Schemas
from residency._transfer import Incoming

OPTIONS = {
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9},
}
# LBFGS has one state for all parameters, SparseAdam takes sparse gradients: neither is offloaded.
NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if name not in {"Optimizer", "LBFGS", "SparseAdam"}
)


def stepped(name, device):
    """Returns an optimizer that has stepped, and one that is offloaded and has not."""
    shapes = ((6, 4),) if name == "Muon" else ((6, 4), (5,), ())
    parameters = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
    made = [getattr(torch.optim, name)(parameters, **OPTIONS.get(name, {})) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made[0].step()
    return made[0], residency.offload_optimizer(made[1])


def entries(optimizer):
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                yield parameter, key, value


@pytest.mark.parametrize("name", NAMES)
def test_each_rule_finds_the_place_that_a_classs_own_step_chose(device, name):
    plain, offloaded = stepped(name, device)
    record, group, schemas = record_of(offloaded), plain.param_groups[0], Schemas()
    for parameter, key, value in entries(plain):
        is_there = not value.is_cpu
        incoming = Incoming(value.dtype, tuple(value.shape), value.is_cpu)
        assert _needs_device(plain, group, parameter, key, incoming, None) == is_there, key
        schema = record.schema_in(offloaded, offloaded.param_groups[0], parameter, schemas)
        for saved in (value.cpu(), value):
            places = record.places_of(parameter, {key: saved}, schema, Residents())
            assert places == {key: StatePlace.HOME if is_there else StatePlace.HOST}
        assert needs_device(key, value, None) == is_there, key


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_comes_from_the_host_with_its_model_goes_where_a_step_has_it(device, name):
    plain, offloaded = stepped(name, device)
    record = record_of(offloaded)
    where = {(p, key): not value.is_cpu for p, key, value in entries(plain)}
    for parameter, values in plain.state.items():
        plain.state[parameter] = {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
    for member in members_of(plain):
        values, schema = plain.state[member.parameter], record.schema_of(plain, member)
        places = record.places_of(member.parameter, values, schema, Residents(), is_arranged=True)
        for parameter, key, _ in entries(plain):
            if parameter is member.parameter:
                assert (places[key] is StatePlace.HOME) == where[parameter, key], key


def test_an_assignment_knows_the_value_alone_and_a_load_the_class(device):
    """ASGD steps a scalar of the device; one that a caller assigns stays on the host until then."""
    plain, offloaded = stepped("ASGD", device)
    parameter = plain.param_groups[0]["params"][0]
    record = record_of(offloaded)
    schema = record.schema_in(offloaded, offloaded.param_groups[0], parameter, Schemas())
    on_host = plain.state[parameter]["step"].cpu()
    places = record.places_of(parameter, {"step": on_host}, schema, Residents())
    assert places == {"step": StatePlace.HOME}
    record.on_host.state[parameter]["step"] = on_host
    assert not record.on_host.state.peek(parameter).homes_by_key


class SecondStateLater(torch.optim.Optimizer):
    """Momentum, and from a parameter's step ``age`` on a sum of it, which is one state more."""

    def __init__(self, parameters, age):
        super().__init__(
            [{"params": [p], "age": a} for p, a in zip(parameters, age, strict=True)], {}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["num"], state["momentum"] = 0, torch.zeros_like(p)
                state["num"] += 1
                state["momentum"].mul_(0.9).add_(p.grad)
                p.sub_(state["momentum"], alpha=0.1)
                if state["num"] >= group["age"]:
                    state.setdefault("sum", torch.zeros_like(p)).add_(state["momentum"])
                    p.sub_(state["sum"], alpha=0.01)


@pytest.mark.parametrize("age", [(4, 4), (4, 9), (9, 4)])
def test_a_state_that_grows_out_of_its_room_on_the_device_streams_from_then_on(lab, age):
    runs = []
    for is_ours in (False, True):
        parameters = lab.parameters(shapes=((400,), (400,)))
        optimizer = SecondStateLater(parameters, age)
        lab.take_steps(optimizer, parameters, [0], missing=False)
        if is_ours:
            residency.offload_optimizer(optimizer, resident="4KiB")
            assert not any(optimizer.state[p]["momentum"].is_cpu for p in parameters)
        lab.take_steps(optimizer, parameters, range(1, 7), missing=False)
        runs.append(lab.read(optimizer, parameters))
        if is_ours:
            are_here = [optimizer.state[p]["momentum"].is_cpu for p in parameters]
            assert are_here == [a == 4 for a in age]
    lab.assert_equal(*runs)
