"""A host or a device without room: what a failed step leaves, and what a first step may hold."""

import pytest
import torch

import residency
from residency._optim import _stream
from residency._transfer import SlabArena

CASES = [
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("ASGD", {}),
    ("NAdam", {}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9}),
    ("Adafactor", {}),
    ("Muon", {}),
]


def build(lab, name, options, *, offload):
    shapes = {"shapes": lab.matrices} if name == "Muon" else {}
    parameters = lab.parameters(**shapes)
    optimizer = getattr(torch.optim, name)(lab.groups(parameters), lr=1e-2, **options)
    if offload:
        residency.offload_optimizer(optimizer, bucket=lab.bucket, slots=2)
    return optimizer, parameters


class Failing:
    """Fails at one allocation of an arena, counted from when it is put in place."""

    def __init__(self, monkeypatch, at):
        self.num_calls = 0
        allocate = SlabArena.allocate

        def allocate_or_fail(arena, num_bytes):
            self.num_calls += 1
            if self.num_calls - 1 == at:
                raise residency.RefusedError("no room")
            return allocate(arena, num_bytes)

        monkeypatch.setattr(SlabArena, "allocate", allocate_or_fail)


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_host_without_room_at_any_allocation_leaves_all_as_it_was(
    lab, monkeypatch, pinned_bytes, name, options
):
    at, num_failures = 0, 0
    pinned = pinned_bytes()
    while at == num_failures:
        optimizer, parameters = build(lab, name, options, offload=False)
        lab.take_steps(optimizer, parameters[:2], range(1), missing=False)
        before, attributes = lab.read(optimizer, parameters), dict(vars(optimizer))
        with monkeypatch.context() as patch:
            failing = Failing(patch, at)
            try:
                residency.offload_optimizer(optimizer, bucket=lab.bucket)
                has_failed = False
            except residency.RefusedError:
                has_failed = True
        assert has_failed == (failing.num_calls > at)
        if has_failed:
            num_failures += 1
            assert type(optimizer) is getattr(torch.optim, name)
            assert dict(vars(optimizer)) == attributes
            lab.assert_equal(lab.read(optimizer, parameters), before)
            assert pinned_bytes() == pinned
        at += 1
        assert at < 100
    assert num_failures >= len(parameters)


@pytest.mark.parametrize("pin", [True, False])
def test_a_step_allocates_no_host_memory(lab, monkeypatch, pinned_bytes, pin):
    optimizer, parameters = build(lab, "AdamW", {}, offload=False)
    before = pinned_bytes()
    residency.offload_optimizer(optimizer, bucket=lab.bucket, pin=pin)
    pinned = pinned_bytes()
    assert (pinned > before) == pin
    with monkeypatch.context() as patch:
        failing = Failing(patch, 0)
        lab.take_steps(optimizer, parameters, range(3))
    assert not failing.num_calls
    assert pinned_bytes() == pinned
    plain, others = build(lab, "AdamW", {}, offload=False)
    lab.take_steps(plain, others, range(3))
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, others))


def test_a_device_without_room_for_the_slots_leaves_all_as_it_was(lab, monkeypatch):
    optimizer, parameters = build(lab, "AdamW", {}, offload=True)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    before = lab.read(optimizer, parameters)
    lab.set_gradients(parameters, 2, missing=False)
    allocated = []

    def allocate_or_fail(self, num_bytes):
        if allocated:
            raise torch.OutOfMemoryError("no room")
        allocated.append(torch.empty(num_bytes, dtype=torch.uint8, device=lab.device))
        return allocated[0]

    with monkeypatch.context() as patch:
        patch.setattr(_stream.StreamedStep, "_allocate", allocate_or_fail)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    lab.assert_equal(lab.read(optimizer, parameters), before)
    optimizer.step()
    plain, others = build(lab, "AdamW", {}, offload=False)
    lab.take_steps(plain, others, range(3), missing=False)
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, others))


def peak_of(step):
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    step()
    return torch.accelerator.max_memory_allocated() - before


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize(
    ("shapes", "bucket"),
    [(((10,),) * 120, 12 * 512), (((64, 64),) * 2, 2 * 64 * 64 * 4), (((4096,),), 8192)],
    ids=["many small", "few", "one that is cut"],
)
def test_the_first_step_holds_at_most_slots_times_bucket(lab, shapes, bucket, slots):
    parameters = lab.parameters(shapes=shapes)
    # One fused kernel per unit: it makes nothing but the state.
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    residency.offload_optimizer(optimizer, bucket=bucket, slots=slots)
    for step in range(2):
        lab.set_gradients(parameters, step, missing=False)
        assert peak_of(optimizer.step) <= slots * bucket + 512
    for p in parameters:
        p.grad = None


class Late(torch.optim.SGD):
    """Makes a second state at its second step, when its first is streamed already."""

    @torch.no_grad()
    def step(self, closure=None):
        known = [p for p, state in self.state.items() if state]
        super().step(closure)
        for p in known:
            self.state[p].setdefault("second", torch.zeros_like(p)).add_(p.grad)


def test_state_that_a_streamed_unit_makes_is_held_for_one_unit_at_a_time(lab):
    num_bytes = 4 * 64 * 64
    results = []
    for offload in (True, False):
        parameters = lab.parameters(shapes=((64, 64),) * 8)
        optimizer = Late(parameters, lr=1e-2, momentum=0.9)
        if offload:
            residency.offload_optimizer(optimizer, bucket=num_bytes, slots=2)
        lab.take_steps(optimizer, parameters, range(1), missing=False)
        lab.set_gradients(parameters, 1, missing=False)
        peak = peak_of(optimizer.step)
        if offload:
            # Two slots, and the newest unit's second state.
            assert peak <= 3 * num_bytes
        results.append(lab.read(optimizer, parameters))
    lab.assert_equal(*results)
