"""What loops of trainers assign into the state goes home, whatever device it comes from."""

import pytest
import torch

import residency

CLASSES = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2, foreach=True),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=1e-2, foreach=True),
}


def all_to(optimizer, place):
    """Assigns all state, on another device.

    In the order in which verl's `load_fsdp_optimizer` and `offload_fsdp_optimizer` do around each
    phase of a run, group by group, key by key, with copies that do not block. tests/verl has them.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = optimizer.state[parameter]
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    values[key] = value.to(place, non_blocking=True)


def all_but_step_to(optimizer, place):
    """Does so but for ``step``, as Lightning does after a load."""
    for values in optimizer.state.values():
        for key, value in values.items():
            if key != "step":
                values[key] = value.to(place)


def whole_dicts_to(optimizer, place):
    for parameter, values in list(optimizer.state.items()):
        optimizer.state[parameter] = {key: value.to(place) for key, value in values.items()}


def a_mapping_to(optimizer, place):
    """Puts another mapping at ``optimizer.state``, which a step without gradients takes over."""
    optimizer.state = {
        parameter: {key: value.to(place) for key, value in values.items()}
        for parameter, values in optimizer.state.items()
    }
    optimizer.step()


def places_of(optimizer):
    return {
        (index, key): (value.device.type, value.is_pinned())
        for index, values in enumerate(optimizer.state.values())
        for key, value in values.items()
    }


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("move", [all_to, all_but_step_to, whole_dicts_to, a_mapping_to])
def test_a_state_that_is_moved_to_the_device_and_back_goes_home_each_time(lab, move, kind):
    def make(offload):
        parameters = lab.parameters(shapes=lab.matrices)
        optimizer = CLASSES[kind](lab.groups(parameters))
        if offload:
            residency.offload_optimizer(optimizer, bucket=lab.bucket, resident="16KiB")
        return optimizer, parameters

    plain, others = make(False)
    lab.take_steps(plain, others, range(6))
    optimizer, parameters = make(True)
    for steps in (range(2), range(2, 4), range(4, 6)):
        move(optimizer, lab.device)  # as before a phase that trains
        lab.take_steps(optimizer, parameters, steps)
        optimizer.zero_grad()
        before = places_of(optimizer)
        allocated = torch.accelerator.memory_allocated()
        for place in (lab.device, "cpu"):
            move(optimizer, place)
            assert places_of(optimizer) == before
        assert torch.accelerator.memory_allocated() == allocated
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, others))


def test_a_scalar_of_the_host_comes_back_to_the_host_and_one_of_the_device_stays_pinned(lab):
    parameters = lab.parameters()
    optimizer = torch.optim.NAdam(lab.groups(parameters), lr=1e-2)
    residency.offload_optimizer(optimizer, bucket=lab.bucket)
    lab.take_steps(optimizer, parameters, range(1))
    values = optimizer.state[parameters[0]]
    values["mu_product"] = torch.tensor(0.5, device=lab.device)
    assert not values["mu_product"].is_pinned()
    assert values["mu_product"] == 0.5
    values["more"] = torch.tensor(0.5, device=lab.device)  # nothing says that it is the host's
    assert values["more"].is_pinned()
    values["more"] = torch.tensor(0.25)
    assert values["more"].is_pinned()
    values["step"] = torch.ones(3, device=lab.device)  # not a scalar any more
    assert values["step"].is_pinned()
    flat = optimizer.state[parameters[2]]  # of a parameter without dimensions
    flat["exp_avg"] = torch.tensor(0.5)
    assert flat["exp_avg"].is_pinned()
