"""Parameters come and go over a long run, as in Gaussian splatting; what is gone leaves nothing."""

import weakref

import pytest
import torch

import residency


def resized(value, length):
    """Prunes, or densifies with zeros."""
    more = torch.zeros(max(length - len(value), 0), device=value.device)
    return torch.cat([value[:length], more])


def replace(optimizer, group, length):
    """Puts a new parameter of another length in place of one and hands its state over."""
    old = group["params"][0]
    state = optimizer.state.pop(old)
    new = group["params"][0] = torch.nn.Parameter(resized(old.detach(), length))
    optimizer.state[new] = {
        key: resized(value, length) if value.dim() else value for key, value in state.items()
    }


@pytest.mark.parametrize("resident", [0, "1GiB"])
def test_parameters_that_are_replaced_at_every_step_leave_no_byte_on_the_device(lab, resident):
    results = []
    for offload in (False, True):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4096, device=lab.device))])
        if offload:
            residency.offload_optimizer(optimizer, bucket=4096, resident=resident)
        group, seen = optimizer.param_groups[0], []
        for step in range(6):
            lab.take_steps(optimizer, group["params"], [step], missing=False)
            replace(optimizer, group, (3072, 4096)[step % 2])
            seen.append(torch.accelerator.memory_allocated())
        assert max(seen[2:]) == max(seen[:2]), seen
        results.append(lab.read(optimizer, group["params"]))
    lab.assert_equal(*results)


@pytest.mark.parametrize("resident", [0, "1GiB"])
@pytest.mark.parametrize("how", ["group removed", "state forgotten", "primed", "fresh"])
def test_a_parameter_that_left_the_optimizer_dies_at_once(lab, resident, how):
    parameters = [torch.nn.Parameter(torch.ones(64, device=lab.device)) for _ in range(3)]
    gone = weakref.ref(parameters[2])
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer = residency.offload_optimizer(torch.optim.AdamW(groups), resident=resident)
    if how == "primed":
        optimizer.prime()
    elif how != "fresh":
        lab.take_steps(optimizer, parameters, range(2), missing=False)
    if how == "state forgotten":
        optimizer.state.clear()
    else:
        optimizer.state.pop(parameters[2], None)
    optimizer.param_groups.pop()
    del groups, parameters[2]
    assert gone() is None
    lab.take_steps(optimizer, parameters, range(2, 4), missing=False)


def test_a_new_parameter_at_the_address_of_one_that_died_is_stepped(lab):
    parameters = [torch.nn.Parameter(torch.ones(64, device=lab.device))]
    optimizer = residency.offload_optimizer(torch.optim.SGD(parameters, lr=1.0))
    for step in range(4):  # without state nothing but the parameter's own identity tells them apart
        lab.take_steps(optimizer, parameters, [step], missing=False)
        before = parameters[0].detach().clone()
        gone = weakref.ref(parameters[0])
        optimizer.param_groups[0]["params"].clear()
        parameters.clear()
        assert gone() is None
        parameters.append(torch.nn.Parameter(before))
        optimizer.param_groups[0]["params"].append(parameters[0])
        lab.set_gradients(parameters, step, missing=False)
        expected = before - parameters[0].grad
        optimizer.step()
        assert torch.equal(parameters[0], expected)


def test_schemas_of_shapes_that_are_gone_are_forgotten(lab):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(64, device=lab.device))])
    residency.offload_optimizer(optimizer)
    group = optimizer.param_groups[0]
    for step in range(6):
        values = torch.ones(64 + step, device=lab.device)
        group["params"][0] = torch.nn.Parameter(values)
        optimizer.state.clear()
        lab.take_steps(optimizer, group["params"], [step], missing=False)
    assert len(vars(optimizer)["_residency"]._schemas) <= 2
