"""The bounds that the docstrings state, computed from ``numel * itemsize``, and the way back."""

import copy
import gc
import io

import pytest
import torch

import residency


def state_of(parameters):
    """Bytes of AdamW's two float32 states of each parameter, as the allocator rounds them."""
    return [2 * (-(-4 * p.numel() // 512) * 512) for p in parameters]


def peak_over(step):
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    step()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before, before


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("resident", [0, 70_000])
def test_a_step_holds_at_most_its_slots_and_the_resident_state(lab, slots, resident):
    shapes = ((64, 64),) * 6 + ((512, 64),)
    bucket = 2 * 64 * 64 * 4
    parameters = lab.parameters(shapes=shapes)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    empty = torch.accelerator.memory_allocated()
    residency.offload_optimizer(optimizer, bucket=bucket, slots=slots, resident=resident)
    total = sum(state_of(parameters))
    scalars = 512 * len(parameters)
    for step in range(3):
        lab.set_gradients(parameters, step, missing=False)
        gradients = torch.accelerator.memory_allocated()
        peak, before = peak_over(optimizer.step)
        # The first step adds what stays resident to what passes through.
        made = optimizer.statistics().resident_bytes + scalars if step == 0 else 0
        assert peak <= slots * bucket + made
        assert peak < total / 2
        assert before == gradients
    for p in parameters:
        p.grad = None
    left = torch.accelerator.memory_allocated() - empty
    assert left <= resident
    assert (left == 0) == (resident == 0)


def test_an_optimizer_that_cannot_be_cut_is_bounded_by_its_largest_parameter(lab):
    parameters = lab.parameters(shapes=((64, 64), (256, 64), (64, 64)))
    optimizer = torch.optim.Muon(parameters, lr=1e-2)
    residency.offload_optimizer(optimizer, bucket=1024, slots=2)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    assert optimizer.statistics().slot_bytes == 256 * 64 * 4


def test_pinned_bytes_exceed_the_state_by_less_than_one_slab_per_power_of_two(lab, pinned_bytes):
    before = pinned_bytes()
    optimizer, parameters = lab.adamw()
    residency.offload_optimizer(optimizer, bucket=lab.bucket)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    torch.accelerator.synchronize()
    state = sum(state_of(parameters))
    largest = max(state_of(parameters)) // 2
    assert state <= pinned_bytes() - before
    assert optimizer.statistics().pinned_bytes == pinned_bytes() - before
    assert pinned_bytes() - before <= state + 2 * largest


def test_onload_restores_the_object_exactly_and_leaves_nothing_pinned(lab, pinned_bytes):
    before = pinned_bytes()
    plain, others = lab.adamw(fused=True)
    lab.take_steps(plain, others, range(5))
    optimizer, parameters = lab.adamw(fused=True)
    attributes = set(vars(optimizer))
    hooks = dict(optimizer._optimizer_step_pre_hooks)
    lab.take_steps(optimizer, parameters, range(2))
    same = residency.offload_optimizer(optimizer, bucket=lab.bucket)
    assert same is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    lab.take_steps(optimizer, parameters, range(2, 4))
    assert residency.onload_optimizer(optimizer) is optimizer
    assert type(optimizer) is torch.optim.AdamW
    assert set(vars(optimizer)) == attributes
    assert dict(optimizer._optimizer_step_pre_hooks) == hooks
    assert type(optimizer.state).__name__ == "defaultdict"
    for inner in optimizer.state.values():
        assert type(inner) is dict
        assert all(value.device.type == lab.device.type for value in inner.values())
    gc.collect()
    assert pinned_bytes() == before
    lab.take_steps(optimizer, parameters, range(4, 5))
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, others))


def test_moving_existing_state_home_frees_its_device_bytes(lab):
    optimizer, parameters = lab.adamw(fused=True)
    empty = torch.accelerator.memory_allocated()
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    for p in parameters:
        p.grad = None
    assert torch.accelerator.memory_allocated() > empty
    residency.offload_optimizer(optimizer)
    assert torch.accelerator.memory_allocated() == empty


def test_saving_a_state_dict_writes_the_states_and_not_the_slabs(lab):
    sizes = []
    for offload in (True, False):
        optimizer, parameters = lab.adamw(offload=offload)
        lab.take_steps(optimizer, parameters, range(2), missing=False)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        sizes.append(len(file.getvalue()))
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert len(loaded["state"]) == len(parameters)
    assert sizes[0] <= 1.01 * sizes[1]


def test_an_optimizer_dies_with_its_last_reference(lab, pinned_bytes):
    before = pinned_bytes()
    gc.collect()
    gc.disable()
    try:
        optimizer, parameters = lab.adamw(offload=True)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
        lab.take_steps(optimizer, parameters, range(2))
        torch.accelerator.synchronize()
        del optimizer
        assert pinned_bytes() == before
    finally:
        gc.enable()


def test_statistics_count_every_byte(lab):
    parameters = lab.parameters(shapes=((64, 48), (128, 40), (16,)))
    optimizer = residency.offload_optimizer(
        torch.optim.AdamW(parameters, lr=1e-2), bucket=lab.bucket, slots=2
    )
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    state = sum(2 * 4 * p.numel() for p in parameters)
    first = optimizer.statistics()
    assert first.home_bytes == state
    assert first.copied_to_device_bytes == 0
    assert first.copied_to_host_bytes == state
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    second = optimizer.statistics()
    # A joined copy carries the padding between two entries along.
    padding = 512 * 2 * len(parameters)
    assert state <= second.copied_to_device_bytes <= state + padding
    assert second.num_steps == 2
    assert second.num_slots == 2
    assert second.slot_bytes <= lab.bucket
    assert second.num_buckets == first.num_buckets


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {}),
        ("AdamW", {"fused": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("Rprop", {}),
        ("ASGD", {}),
        ("NAdam", {}),
        ("Adafactor", {}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_primed_optimizer_has_the_keys_of_a_stepped_one_and_steps_as_a_fresh_one(
    lab, pinned_bytes, name, options
):
    results = []
    for is_primed in (False, True):
        parameters = lab.parameters()
        optimizer = getattr(torch.optim, name)(lab.groups(parameters), lr=1e-2, **options)
        residency.offload_optimizer(optimizer, bucket=lab.bucket)
        before = pinned_bytes(), torch.accelerator.memory_allocated()
        values = [p.detach().clone() for p in parameters]
        if is_primed:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            base = torch.accelerator.memory_allocated()
            optimizer.prime()
            assert torch.accelerator.max_memory_allocated() == base
            assert pinned_bytes() == before[0]
            assert all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True))
            template = optimizer.state_dict()["state"]
            for state in template.values():
                assert all(not v.any() for v in state.values() if isinstance(v, torch.Tensor))
        lab.take_steps(optimizer, parameters, range(1), missing=False)
        if is_primed:
            after = optimizer.state_dict()["state"]
            assert [list(s) for s in template.values()] == [list(s) for s in after.values()]
            for index, state in template.items():
                kinds = {k: (v.shape, v.dtype, v.device) for k, v in state.items()}
                now = after[index].items()
                assert kinds == {k: (v.shape, v.dtype, v.device) for k, v in now}
        lab.take_steps(optimizer, parameters, range(1, 4))
        results.append(lab.read(optimizer, parameters))
    lab.assert_equal(*results)


@pytest.mark.parametrize("how", ["in place", "loaded", "assigned"])
def test_what_is_written_into_a_template_counts(lab, how):
    source, others = lab.adamw()
    lab.take_steps(source, others, range(3), missing=False)
    saved = copy.deepcopy(source.state_dict())
    optimizer, parameters = lab.adamw(offload=True)
    optimizer.prime()
    with torch.no_grad():
        for p, other in zip(parameters, others, strict=True):
            p.copy_(other)
    if how == "loaded":
        optimizer.load_state_dict(saved)
    for p, index in zip(parameters, saved["state"], strict=True):
        for key, value in saved["state"][index].items():
            if how == "in place":
                optimizer.state[p][key].copy_(value)
            elif how == "assigned":
                optimizer.state[p][key] = value
    lab.take_steps(optimizer, parameters, range(3, 5))
    lab.take_steps(source, others, range(3, 5))
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(source, others))


def test_a_setting_that_makes_new_state_later_keeps_to_the_bound(lab):
    parameters = lab.parameters(shapes=((128, 64),) * 8)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.0)
    residency.offload_optimizer(optimizer, bucket="32KiB", slots=2)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    optimizer.param_groups[0]["momentum"] = 0.9
    lab.set_gradients(parameters, 1, missing=False)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    optimizer.step()
    # The bound of the state, and torch's own copy of one bucket of gradients (a clone becomes
    # the buffer).
    assert torch.accelerator.max_memory_allocated() - before <= 2 * 32_768 + 32_768
