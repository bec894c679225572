"""Optimizers that know names: moments go by them, in whatever order the parameters come back."""

from __future__ import annotations

import random

import pytest
import torch

import residency

NAMES = [f"{k}.weight" for k in "abcde"]


def made(device, groups, *, is_named=True, offload=False):
    """Returns a module, and an optimizer that has stepped, over its parameters in these groups."""
    torch.manual_seed(0)
    layers = {k: torch.nn.Linear(4, 4, bias=False) for k in "abcde"}
    model = torch.nn.ModuleDict(layers).to(device)
    by_name = dict(model.named_parameters())
    given = [
        {"params": [(n, by_name[n]) if is_named else by_name[n] for n in names]} for names in groups
    ]
    optimizer = torch.optim.SGD(given, lr=0.1, momentum=0.9)
    if offload:
        residency.offload_optimizer(optimizer)
    return model, optimizer


def step(model, optimizer):
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, number + 1.0)
    optimizer.step()


def moments(model, optimizer):
    states = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [float(each[0, 0]) for each in states]


def names_are_right(model, optimizer):
    of = {id(p): name for name, p in model.named_parameters()}
    return all(
        [of[id(p)] for p in group["params"]] == group["param_names"]
        for group in optimizer.param_groups
    )


@pytest.mark.filterwarnings("ignore:.*does not fit:UserWarning")  # a module that is not saved
@pytest.mark.parametrize("seed", range(8))
def test_moments_and_names_find_their_parameters_in_another_order(device, tmp_path, seed):
    """With the module on both sides, on one, or on none."""
    chance = random.Random(seed)
    names, cut = chance.sample(NAMES, len(NAMES)), chance.randrange(1, len(NAMES))
    saved, here = [names[:cut], names[cut:]], [names[:cut], names[cut:]]
    for group in here:
        chance.shuffle(group)
    if chance.random() < 0.5:
        here.reverse()
    with_model = [chance.random() < 0.5 for _ in range(2)]
    model, optimizer = made(device, saved, offload=chance.random() < 0.5)
    step(model, optimizer)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"o": optimizer, **({"m": model} if with_model[0] else {})})
        model, optimizer = made(device, here, offload=chance.random() < 0.5)
        state = {"o": optimizer, **({"m": model} if with_model[1] else {})}
        checkpointer.restore(state, strict=with_model[0] or not with_model[1])
    assert moments(model, optimizer) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert names_are_right(model, optimizer)


@pytest.mark.parametrize("here_named", [False, True])
@pytest.mark.parametrize("saved_named", [False, True])
def test_the_same_order_is_restored_whoever_has_names(device, tmp_path, saved_named, here_named):
    model, optimizer = made(device, [NAMES], is_named=saved_named)
    step(model, optimizer)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"o": optimizer})
        model, optimizer = made(device, [NAMES], is_named=here_named)
        checkpointer.restore({"o": optimizer})
    assert moments(model, optimizer) == [1.0, 2.0, 3.0, 4.0, 5.0]
    if saved_named or here_named:
        assert names_are_right(model, optimizer)


def test_names_that_are_others_on_both_sides_leave_the_order_to_decide(device, tmp_path):
    """As those of a module that was wrapped: `module.a.weight`."""
    model, optimizer = made(device, [NAMES])
    step(model, optimizer)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"o": optimizer})
        model, optimizer = made(device, [NAMES])
        own = [f"module.{name}" for name in NAMES]
        optimizer.param_groups[0]["param_names"] = list(own)
        checkpointer.restore({"o": optimizer})
    assert moments(model, optimizer) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert optimizer.param_groups[0]["param_names"] == own


def test_names_that_only_the_save_has_come_in_the_order_of_here(device, tmp_path):
    model, optimizer = made(device, [NAMES])
    step(model, optimizer)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"m": model, "o": optimizer})
        model, optimizer = made(device, [NAMES[::-1]], is_named=False)
        checkpointer.restore({"m": model, "o": optimizer})
    assert moments(model, optimizer) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert names_are_right(model, optimizer)
