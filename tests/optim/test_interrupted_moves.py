"""An exception anywhere in an offload, its undoing, a load or a template: all of it or nothing."""

import copy

import interruptions
import pytest
import torch

import residency
from residency._transfer import lending

NUM_LINES = 24


def build(lab, *, steps=2, offload=True, **settings):
    parameters = lab.parameters(shapes=((40, 30), (33,), (), (2100,)))
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # patches `step`
    if offload:
        residency.offload_optimizer(optimizer, bucket=6000, **settings)
    lab.take_steps(optimizer, parameters, range(steps), missing=False)
    return optimizer, parameters


def offloaded(lab, settings):
    optimizer, parameters = build(lab, offload=False)
    return optimizer, parameters, lambda: residency.offload_optimizer(optimizer, **settings)


def onloaded(lab, settings):
    optimizer, parameters = build(lab, **settings)
    return optimizer, parameters, lambda: residency.onload_optimizer(optimizer)


def loaded(lab, settings):
    source, _ = build(lab, offload=False, steps=3)
    saved = copy.deepcopy(source.state_dict())
    optimizer, parameters = build(lab, **settings)
    return optimizer, parameters, lambda: optimizer.load_state_dict(saved)


def primed(lab, settings):
    optimizer, parameters = build(lab, steps=0, **settings)
    return optimizer, parameters, optimizer.prime


ACTIONS = {"offload": offloaded, "onload": onloaded, "load": loaded, "prime": primed}


def is_equal(lab, left, right):
    try:
        lab.assert_equal(left, right)
    except AssertionError:
        return False
    return True


@pytest.mark.sim_device(schedule="late")
@pytest.mark.parametrize("resident", [0, 12_000])
@pytest.mark.parametrize("name", ACTIONS)
def test_an_exception_at_any_line_leaves_all_or_nothing(lab, pinned_bytes, name, resident):
    def prepared():
        return ACTIONS[name](lab, {"resident": resident})

    optimizer, parameters, action = prepared()
    before = lab.read(optimizer, parameters)
    count = interruptions.count_lines(action)
    after = lab.read(optimizer, parameters)
    pinned = {type(optimizer): pinned_bytes()}
    finals = [final_of(lab, optimizer, parameters)]
    optimizer, parameters, action = prepared()
    pinned[type(optimizer)] = max(pinned_bytes(), pinned.get(type(optimizer), 0))
    finals.append(final_of(lab, optimizer, parameters))
    del optimizer, parameters, action
    for line in interruptions.spread(count, NUM_LINES, seed=3):
        optimizer, parameters, action = prepared()
        raised = (KeyboardInterrupt, torch.OutOfMemoryError)[line % 2]("here")
        where = interruptions.interrupted_at(line, action, raised)
        raised.__traceback__ = None
        assert not lending
        now = lab.read(optimizer, parameters)
        assert is_equal(lab, now, before) or is_equal(lab, now, after), where
        assert pinned_bytes() <= pinned[type(optimizer)], where
        optimizer.state_dict()
        final = final_of(lab, optimizer, parameters)
        assert any(is_equal(lab, final, each) for each in finals), where
        del optimizer, parameters, action


def final_of(lab, optimizer, parameters):
    lab.take_steps(optimizer, parameters, range(5, 7), missing=False)
    return lab.read(optimizer, parameters)


def test_a_load_after_an_interrupted_one_loads_its_own_dict(lab):
    def prepared():
        optimizer, _, action = loaded(lab, {})
        return optimizer, action

    saved = build(lab, offload=False, steps=4)[0].state_dict()
    count = interruptions.count_lines(prepared()[1])
    for line in [*interruptions.spread(count, NUM_LINES, seed=5), *range(count - 12, count)]:
        optimizer, action = prepared()
        interruptions.interrupted_at(line, action, KeyboardInterrupt())
        optimizer.load_state_dict(copy.deepcopy(saved))
        found = optimizer.state_dict()["state"]
        assert list(found) == list(saved["state"])
        for index, values in saved["state"].items():
            for key, value in values.items():
                assert torch.equal(found[index][key].cpu(), value.cpu()), (line, index, key)
