"""Whatever is combined, streamed equals plain; and a step neither blocks the host nor makes a
stream."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import residency
from residency import _device

ELEMENT_WISE = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop", "ASGD"]
IMPLEMENTATIONS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {}}
FUSED = {"Adam", "AdamW", "Adagrad"}
ACTIONS = st.lists(
    st.sampled_from(["step", "step", "step", "save and load", "onload and offload"]),
    min_size=1,
    max_size=5,
)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from([*ELEMENT_WISE, "Adadelta", "Rprop", "Adafactor"]),
    implementation=st.sampled_from(sorted(IMPLEMENTATIONS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_groups=st.integers(1, 3),
    is_missing=st.booleans(),
    bucket=st.sampled_from([700, 3000, 8000, 100_000]),
    slots=st.integers(1, 4),
    resident=st.sampled_from([0, 5000, 50_000]),
    pin=st.booleans(),
    is_primed=st.booleans(),
    actions=ACTIONS,
)
def test_streamed_equals_plain(
    lab, name, implementation, dtype, num_groups, is_missing, bucket, slots, resident, pin,
    is_primed, actions,
):  # fmt: skip
    options = dict(IMPLEMENTATIONS[implementation])
    if implementation == "fused" and name in FUSED:
        options = {"fused": True}
    how = {"bucket": bucket, "slots": slots, "resident": resident, "pin": pin}
    results = []
    for offload in (False, True):
        parameters = lab.parameters(dtype=dtype)
        groups = [{"params": parameters[i::num_groups]} for i in range(num_groups)]
        optimizer = getattr(torch.optim, name)(groups, lr=1e-2, **options)
        if offload:
            residency.offload_optimizer(optimizer, **how)
            if is_primed:
                optimizer.prime()
        step = 0
        for action in actions:
            if action == "step":
                lab.take_steps(optimizer, parameters, [step], missing=is_missing)
                step += 1
            elif offload and action == "save and load":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif offload and not (is_primed and not step):
                residency.onload_optimizer(optimizer)
                residency.offload_optimizer(optimizer, **how)
        if step:  # a primed template is no state of a plain one
            results.append(lab.read(optimizer, parameters))
    if results:
        lab.assert_equal(*results)


def test_a_step_never_blocks_the_host_and_makes_no_stream(lab, monkeypatch):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    lab.set_gradients(parameters, 1)
    torch.accelerator.synchronize()

    def refuse(*args, **kwargs):
        raise AssertionError("a step has made a stream, or waited for the device")

    with monkeypatch.context() as patch:
        patch.setattr(_device, "new_stream", refuse)
        patch.setattr(_device, "synchronize", refuse)
        # Read past the wait that readers of the state pass.
        inner = dict.__getitem__(optimizer.state, parameters[0])
        home = dict.__getitem__(inner, "exp_avg")
        before = home.clone()
        for _ in range(3):
            optimizer.step()
        after = home.clone()
    if lab.device.type == "sim":
        # Nothing runs here before the host waits for it, or for something that comes after it.
        assert torch.equal(after, before)
    torch.accelerator.synchronize()
    assert not torch.equal(home, before)


def changed_shapes(saved):
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].flatten()[:1].clone()


def fewer_parameters(saved):
    saved["param_groups"][0]["params"] = saved["param_groups"][0]["params"][:1]


def fewer_groups(saved):
    del saved["param_groups"][0]


@pytest.mark.parametrize("damage", [changed_shapes, fewer_parameters, fewer_groups])
def test_a_load_that_does_not_match_is_refused_and_the_optimizer_steps_as_before(lab, damage):
    optimizer, parameters = lab.adamw(offload=True)
    plain, others = lab.adamw()
    for each, its in ((optimizer, parameters), (plain, others)):
        lab.take_steps(each, its, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    with pytest.raises(
        (residency.RefusedError, ValueError), match=r"shape|doesn't match|different"
    ):
        optimizer.load_state_dict(saved)
    lab.take_steps(optimizer, parameters, range(2, 4))
    lab.take_steps(plain, others, range(2, 4))
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, others))
