"""Hooks, schedulers and the profiler see an offloaded optimizer as they see a plain one."""

import copy
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import residency


class Subclass(torch.optim.AdamW):
    """Calls the hooked step of its parent, as many user classes do."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Subclass])
def test_each_hook_fires_once_per_step(lab, cls):
    parameters = lab.parameters()
    optimizer = cls(lab.groups(parameters), lr=1e-2)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda *a: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *a: calls.append("global post")),
    ]
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
    residency.offload_optimizer(optimizer, bucket=lab.bucket)
    optimizer.register_step_post_hook(lambda *a: calls.append("post"))
    try:
        lab.take_steps(optimizer, parameters, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        lab.take_steps(optimizer, parameters, range(1))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["global pre", "pre", "post", "global post"] * 3


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11 on CUDA
def test_the_profiler_sees_one_range_with_the_name_of_the_class(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.set_gradients(parameters, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [e.key for e in profile.key_averages() for _ in range(e.count)]
    assert names.count("Optimizer.step#AdamW.step") == 1


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)


def in_sequence(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2]
    )


ADAMW = torch.optim.AdamW
SCHEDULES = {
    "LambdaLR": (ADAMW, lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)),
    "OneCycleLR of betas": (ADAMW, one_cycle),
    "OneCycleLR of momentum": (lambda ps, lr: torch.optim.SGD(ps, lr, momentum=0.9), one_cycle),
    "ReduceLROnPlateau": (ADAMW, lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)),
    "SequentialLR": (ADAMW, in_sequence),
}


def advance(scheduler):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)  # it never gets better: the rate falls at every second call
    else:
        scheduler.step()


def begin(lab, kind, when, *, offload):
    make, schedule = SCHEDULES[kind]
    parameters = lab.parameters()
    optimizer = make(lab.groups(parameters), lr=1e-2)
    scheduler = schedule(optimizer) if "before" in when else None
    if offload:
        residency.offload_optimizer(optimizer, bucket=lab.bucket)
    return parameters, optimizer, scheduler or schedule(optimizer)


def go_on(lab, begun, steps):
    parameters, optimizer, scheduler = begun
    for step in steps:
        lab.take_steps(optimizer, parameters, [step])
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)  # it never gets better: the rate falls at every second call
        else:
            scheduler.step()


@pytest.mark.parametrize("when", ["before", "after", "before and onloaded", "after and onloaded"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_scheduler_drives_the_offloaded_optimizer_without_a_warning(lab, when, kind):
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for offload in (True, False):
            parameters, optimizer, _ = begun = begin(lab, kind, when, offload=offload)
            go_on(lab, begun, range(2))
            if offload and "onloaded" in when:
                residency.onload_optimizer(optimizer)
            go_on(lab, begun, range(2, 4))
            ends.append(lab.read(optimizer, parameters))
    lab.assert_equal(*ends)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_and_its_offloaded_optimizer_resume_from_their_state_dicts(lab, when, kind):
    plain, first, second = (begin(lab, kind, when, offload=way) for way in (False, True, True))
    go_on(lab, plain, range(6))
    go_on(lab, first, range(3))
    with torch.no_grad():
        for new, old in zip(second[0], first[0], strict=True):
            new.copy_(old)
    for new, old in zip(second[1:], first[1:], strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    go_on(lab, second, range(3, 6))
    rates = {group["lr"] for group in plain[1].param_groups}
    assert rates.isdisjoint({1e-2, 3e-3}), "the schedule did nothing"
    lab.assert_equal(lab.read(second[1], second[0]), lab.read(plain[1], plain[0]))


def test_load_hooks_see_the_whole_dict_before_and_the_loaded_state_after(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(2))
    saved = optimizer.state_dict()
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append(len(d["state"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(saved)
    assert seen == [len(parameters)] * 2


def test_parameters_on_the_host_are_stepped_where_they_are():
    results = []
    for offload in (True, False):
        parameter = torch.nn.Parameter(torch.ones(8))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        if offload:
            residency.offload_optimizer(optimizer)
            assert isinstance(optimizer, residency.OffloadedOptimizer)
        for _ in range(3):
            parameter.grad = torch.arange(8.0)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        if offload:
            assert optimizer.statistics().home_bytes == 0
            residency.onload_optimizer(optimizer)
            assert type(optimizer) is torch.optim.AdamW
        results.append((parameter.detach(), optimizer.state[parameter]["exp_avg"]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
