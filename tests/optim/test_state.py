"""State that is assigned goes home, and a resumed run continues at the bits of the uninterrupted
one."""

import collections
import copy
import io

import pytest
import torch

import residency

CLASSES = {
    **{n: {} for n in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")},
    "AdamW": {"fused": True},
    "Adam": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "SGD": {"momentum": 0.9},
    "Adafactor": {},
    "Muon": {},
}


def build(lab, name, offload):
    shapes = {"shapes": lab.matrices} if name == "Muon" else {}
    parameters = lab.parameters(**shapes)
    optimizer = getattr(torch.optim, name)(lab.groups(parameters), lr=1e-2, **CLASSES[name])
    if offload:
        residency.offload_optimizer(optimizer, bucket=lab.bucket, slots=2)
    return optimizer, parameters


def resume(lab, name, saved_from, loaded_into):
    first, others = build(lab, name, saved_from)
    lab.take_steps(first, others, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu", weights_only=True)
    second, resumed = build(lab, name, loaded_into)
    for source, target in zip(others, resumed, strict=True):
        target.data.copy_(source.data)
    second.load_state_dict(saved)
    lab.take_steps(second, resumed, range(3, 6))
    return lab.read(second, resumed)


@pytest.mark.parametrize(
    ("saved_from", "loaded_into"), [(True, True), (True, False), (False, True)]
)
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_resumed_run_equals_the_uninterrupted_one(lab, name, saved_from, loaded_into):
    plain, parameters = build(lab, name, False)
    lab.take_steps(plain, parameters, range(6))
    expected = lab.read(plain, parameters)
    if not loaded_into and name in ("ASGD", "NAdam"):
        # torch loads their scalars onto another device than their first step made them on, and its
        # own resumed run differs from its uninterrupted one: compare with what torch does.
        expected = resume(lab, name, False, False)
    lab.assert_equal(resume(lab, name, saved_from, loaded_into), expected)


def test_loading_touches_no_device_memory_and_keeps_the_saved_dtype(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    saved = copy.deepcopy(optimizer.state_dict())
    narrow = lab.parameters(dtype=torch.bfloat16)
    fresh = torch.optim.AdamW(lab.groups(narrow), lr=1e-2)
    residency.offload_optimizer(fresh)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    fresh.load_state_dict(saved)
    assert torch.accelerator.max_memory_allocated() == before
    assert fresh.state[narrow[0]]["exp_avg"].dtype is torch.float32
    assert fresh.state[narrow[0]]["exp_avg"].is_pinned()


def test_a_dict_that_does_not_match_is_refused_and_nothing_is_loaded(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(2))
    before = lab.read(optimizer, parameters)
    with pytest.raises(ValueError, match="different number"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    lab.assert_equal(lab.read(optimizer, parameters), before)


def test_whatever_is_assigned_to_a_state_goes_home(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    p = parameters[0]
    inner = optimizer.state[p]
    home = inner["exp_avg"].data_ptr()
    for assign in (
        lambda v: inner.__setitem__("exp_avg", v),
        lambda v: inner.update(exp_avg=v),
        lambda v: optimizer.state.__setitem__(p, {**inner, "exp_avg": v}),
        lambda v: optimizer.state.update({p: {**inner, "exp_avg": v}}),
    ):
        value = torch.randn(p.shape).to(lab.device)
        assign(value)
        assert optimizer.state[p]["exp_avg"].data_ptr() == home
        assert torch.equal(optimizer.state[p]["exp_avg"], value.cpu())
    inner["step"] = torch.tensor(7.0)
    assert inner["step"].is_cpu
    assert optimizer.state[p] is inner


def test_a_state_that_is_removed_stays_whole_for_whoever_holds_it(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    held = optimizer.state[parameters[0]]["exp_avg"]
    expected = held.clone()
    del optimizer.state[parameters[0]]
    lab.take_steps(optimizer, parameters, range(2, 4), missing=False)
    torch.accelerator.synchronize()
    assert torch.equal(held, expected)
    assert optimizer.state[parameters[0]]["step"] == 2


def test_a_mapping_put_in_the_place_of_the_state_is_adopted(lab):
    results = []
    for offload in (True, False):
        optimizer, parameters = lab.adamw(offload=offload)
        lab.take_steps(optimizer, parameters, range(2))
        optimizer.state = copy.copy(optimizer.state)
        lab.take_steps(optimizer, parameters, range(2, 4))
        results.append(lab.read(optimizer, parameters))
    lab.assert_equal(*results)


def test_a_reset_state_is_taken_at_its_word_by_load_and_by_onload(lab):
    plain, parameters = lab.adamw()
    lab.take_steps(plain, parameters, range(1))
    saved = plain.state_dict()
    offloaded, others = lab.adamw(offload=True)
    lab.take_steps(offloaded, others, range(1))
    offloaded.state = collections.defaultdict(dict)
    offloaded.load_state_dict(saved)
    lab.take_steps(plain, parameters, range(1, 2))
    lab.take_steps(offloaded, others, range(1, 2))
    lab.assert_equal(lab.read(offloaded, others), lab.read(plain, parameters))
    offloaded.state = collections.defaultdict(dict)
    residency.onload_optimizer(offloaded)
    assert not offloaded.state


def test_printing_the_state_waits_for_its_final_values(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(2))
    printed = repr(optimizer.state[parameters[0]])
    torch.accelerator.synchronize()
    assert printed == repr(optimizer.state[parameters[0]])


def test_a_state_that_is_not_dense_keeps_its_values(lab):
    (parameter,) = lab.parameters(shapes=((3, 8),))
    momentum = torch.arange(48.0).view(8, 6)[:, :3].t().to(lab.device)
    strided = torch.arange(48.0, device=lab.device).view(8, 6)[:, :3].t()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = strided
    residency.offload_optimizer(optimizer)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], momentum.cpu())
