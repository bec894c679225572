"""State that is assigned goes home, and a resumed run continues at the bits of the uninterrupted
one."""

import collections
import copy
import io
import threading

import pytest
import torch

import residency
from residency._transfer import _slab

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


def test_every_way_of_reading_a_state_waits_for_its_final_values(lab):
    plain, parameters = lab.adamw()
    lab.take_steps(plain, parameters, range(2), missing=False)
    ways = {
        "or": lambda s: (s | {"more": 1})["exp_avg"],
        "ror": lambda s: ({"more": 1} | s)["exp_avg"],
        "copy": lambda s: s.copy()["exp_avg"],
        "reversed": lambda s: {k: dict.__getitem__(s, k) for k in reversed(s)}["exp_avg"],
        "setdefault": lambda s: s.setdefault("exp_avg", None),
        "popitem": lambda s: s.popitem()[1],
    }
    for name, read in ways.items():
        optimizer, others = lab.adamw(offload=True)
        lab.take_steps(optimizer, others, range(2), missing=False)
        key = "exp_avg_sq" if name == "popitem" else "exp_avg"
        expected = plain.state[parameters[0]][key].cpu()
        assert torch.equal(read(optimizer.state[others[0]]), expected), name


def test_a_state_is_the_mapping_that_a_plain_one_would_be(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    inner = optimizer.state[parameters[0]]
    with pytest.raises(TypeError):
        inner | [("a", 1)]
    assert type(inner | {}) is dict
    assert list(reversed(inner)) == ["exp_avg_sq", "exp_avg", "step"]
    inner |= {"exp_avg": torch.full(parameters[0].shape, 3.0)}
    assert inner["exp_avg"].is_pinned()
    assert (inner["exp_avg"] == 3).all()
    assert [inner.popitem()[0] for _ in range(3)] == ["exp_avg_sq", "exp_avg", "step"]
    with pytest.raises(KeyError):
        inner.popitem()
    state = optimizer.state
    state |= {parameters[1]: {"exp_avg": torch.ones(33)}}
    assert state is optimizer.state
    assert list(state[parameters[1]]) == ["exp_avg"]
    assert state[parameters[1]]["exp_avg"].is_pinned()
    merged = state | {"other": {}}
    assert type(merged) is collections.defaultdict
    assert merged[parameters[2]] is state[parameters[2]]
    assert "other" not in state


def broken(saved, how):
    entry = saved["state"][3]
    if how == "repair":
        saved["state"][4] = {"exp_avg": entry["exp_avg"]}
    elif how == "layout":
        entry["exp_avg"] = entry["exp_avg"].cpu().to_sparse()
    elif how == "meta":
        entry["exp_avg"] = entry["exp_avg"].to("meta")
    elif how == "value":
        entry["more"] = threading.Lock()
    return saved


@pytest.mark.parametrize("how", ["repair", "layout", "meta", "value", "host"])
def test_a_load_that_fails_leaves_the_optimizer_as_it_was(lab, monkeypatch, how):
    source, others = lab.adamw(amsgrad=True)
    lab.take_steps(source, others, range(3), missing=False)
    saved = broken(copy.deepcopy(source.state_dict()), how)
    for group in saved["param_groups"]:
        group["lr"] = 0.5
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    before = lab.read(optimizer, parameters)
    groups = optimizer.param_groups
    with monkeypatch.context() as patch:
        if how == "host":
            patch.setattr(_slab, "available_host_bytes", lambda: 100)
        with pytest.raises((KeyError, TypeError, residency.RefusedError)):
            optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups
    lab.assert_equal(lab.read(optimizer, parameters), before)
    plain, ps = lab.adamw()
    lab.take_steps(plain, ps, range(2), missing=False)
    lab.take_steps(plain, ps, range(2, 4))
    lab.take_steps(optimizer, parameters, range(2, 4))
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, ps))


def test_a_resident_state_is_the_parameters_and_not_that_of_whoever_gets_its_address(lab):
    optimizer, parameters = lab.adamw()
    residency.offload_optimizer(optimizer, resident="1MiB")
    resident = optimizer._residency.resident
    assert all(p in resident for p in parameters)
    assert len(resident) == len(parameters)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    state = optimizer.state.pop(parameters[0])
    assert parameters[0] not in resident
    assert not state.is_resident


class Looking(torch.optim.SGD):
    """Lets somebody look in the midst of a step."""

    look = None

    def step(self, closure=None):
        if Looking.look is not None:
            Looking.look()
        return super().step(closure)


def test_a_state_that_is_taken_in_the_midst_of_a_step_has_its_bytes_after_it(lab, monkeypatch):
    parameters = lab.parameters()
    optimizer = Looking(parameters, lr=0.1, momentum=0.9)
    residency.offload_optimizer(optimizer, bucket=lab.bucket)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    taken = []
    with monkeypatch.context() as patch:
        patch.setattr(
            Looking,
            "look",
            lambda: taken or taken.append(optimizer.state[parameters[0]]["momentum_buffer"]),
        )
        lab.take_steps(optimizer, parameters, range(1, 2), missing=False)
    seen = taken[0].clone()
    assert torch.equal(seen, optimizer.state[parameters[0]]["momentum_buffer"])


def test_priming_waits_for_copies_home_into_the_memory_that_it_zeroes(lab):
    parameters = lab.parameters(shapes=((64, 40),) * 3)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    residency.offload_optimizer(optimizer, bucket=4096)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    optimizer.state.pop(parameters[0])  # while copies home are under way
    optimizer.prime()
    found = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    assert not found[0].any()
    assert all(torch.equal(f, p.grad.cpu()) for f, p in zip(found[1:], parameters[1:], strict=True))


def test_setdefault_gives_the_live_state_and_not_the_default(lab):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(1))
    state = optimizer.state[parameters[0]]
    made = state.setdefault("more", torch.ones_like(parameters[0]))
    made.mul_(2)
    assert state["more"].eq(2).all()
    assert state.setdefault("more", None) is made
