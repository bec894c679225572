"""An offloaded optimizer under accelerate: before or after `prepare`, with and without a scaler."""

import pytest
import torch
from torch.optim import lr_scheduler

import residency

BUCKET = 2000
FOREACH = {"foreach": True, "fused": False}


class Coupled(torch.optim.SGD):
    """Cannot be offloaded: it steps by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad / norm, alpha=0.1)


@pytest.fixture
def prepare(framework, device, monkeypatch, make_net):
    """Returns an accelerator with a prepared network and optimizer, and mostly a schedule."""
    accelerate = framework("accelerate")
    from accelerate.state import AcceleratorState

    def prepare(make, *, scaled=False, scheduled=True, before=lambda model, optimizer: None):
        AcceleratorState._reset_state(True)
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
        assert accelerator.device.type == device.type
        if scaled:  # what `mixed_precision="fp16"` makes, which accelerate refuses on "sim"
            accelerator.scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        net = make_net()
        optimizer = make(net.parameters())
        schedules = [lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)] if scheduled else []
        before(net, optimizer)
        return accelerator, *accelerator.prepare(net, optimizer, *schedules)

    yield prepare
    AcceleratorState._reset_state(True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, **FOREACH)


def train(prepared, rows, steps, *, infinite=()):
    """Takes steps of two batches each; says which of them were skipped."""
    accelerator, net, optimizer, *schedules = prepared
    skipped = []
    for step in steps:
        for batch in rows[4 * step : 4 * step + 4].split(2):
            with accelerator.accumulate(net):
                loss = net(batch.to(accelerator.device))["loss"]
                accelerator.backward(loss * (float("inf") if step in infinite else 1.0))
                optimizer.step()
                for schedule in schedules:
                    schedule.step()
                optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    return skipped


def end(lab, prepared):
    return lab.read(prepared[2].optimizer, list(prepared[1].parameters()))


def fill(model, optimizer):
    """Steps once before accelerate is there."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("filled", [False, True], ids=["fresh", "filled"])
@pytest.mark.parametrize("when", ["before", "after", "in between", "in between, and back"])
def test_a_prepared_optimizer_streams_to_the_bits_of_a_plain_one(
    lab, prepare, rows, scaled, filled, when
):
    infinite = {1, 3} if scaled else set()

    def run(offload):
        def before(net, optimizer):
            if filled:
                fill(net, optimizer)
            if offload and when == "before":
                residency.offload_optimizer(optimizer, bucket=BUCKET)

        prepared = prepare(adamw, scaled=scaled, before=before)
        wrapper = prepared[2]
        if offload and when == "after":
            assert residency.offload_optimizer(wrapper, bucket=BUCKET) is wrapper
        skipped = train(prepared, rows, range(2), infinite=infinite)
        if offload and "in between" in when:
            residency.offload_optimizer(wrapper, bucket=BUCKET)
        skipped += train(prepared, rows, range(2, 5), infinite=infinite)
        if offload:
            state = wrapper.state[wrapper.param_groups[0]["params"][0]]
            assert state["exp_avg"].is_pinned()
            assert wrapper.optimizer.statistics().num_buckets > 1
        if offload and "back" in when:
            assert residency.onload_optimizer(wrapper) is wrapper
            assert type(wrapper.optimizer) is torch.optim.AdamW
        skipped += train(prepared, rows, range(5, 6))
        assert skipped == [step in infinite for step in range(6)]
        return end(lab, prepared)

    lab.assert_equal(run(True), run(False))


def test_the_optimizer_inside_is_refused_by_its_first_scaled_step_and_the_wrapper_cures_it(
    lab, prepare, rows
):
    plain = prepare(adamw, scaled=True)
    train(plain, rows, range(3))

    prepared = prepare(adamw, scaled=True)
    _, _, wrapper, schedule = prepared
    residency.offload_optimizer(wrapper.optimizer, bucket=BUCKET)
    before = end(lab, prepared)
    with pytest.raises(residency.RefusedError, match="pass the result of prepare to"):
        train(prepared, rows, range(1))
    lab.assert_equal(end(lab, prepared), before)
    residency.onload_optimizer(wrapper)
    residency.offload_optimizer(wrapper, bucket=BUCKET)
    wrapper.step()  # its gradients are those of the step that was refused
    schedule.step()
    wrapper.zero_grad()
    train(prepared, rows, range(1, 3))
    lab.assert_equal(end(lab, prepared), end(lab, plain))


def test_the_optimizer_inside_is_refused_after_a_scaled_step_with_nothing_changed(
    lab, prepare, rows
):
    plain, prepared = (prepare(adamw, scaled=True, scheduled=False) for _ in range(2))
    train(plain, rows, range(2))
    train(prepared, rows, range(1))
    inner = prepared[2].optimizer
    with pytest.raises(residency.RefusedError, match="or pass the result of accelerate's prepare"):
        residency.offload_optimizer(inner)
    assert type(inner) is torch.optim.AdamW
    train(prepared, rows, range(1, 2))
    lab.assert_equal(end(lab, prepared), end(lab, plain))


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_a_wrapper_that_is_refused_is_left_as_it_was(lab, prepare, rows, scaled):
    def make(parameters):
        return Coupled(parameters, lr=0.1)

    plain, prepared = (prepare(make, scaled=scaled) for _ in range(2))
    train(plain, rows, range(3))
    train(prepared, rows, range(2))
    wrapper = prepared[2]
    before = dict(wrapper.__dict__), dict(wrapper.optimizer.__dict__)
    with pytest.raises(residency.RefusedError, match="couples the parameters"):
        residency.offload_optimizer(wrapper)
    with pytest.raises(residency.RefusedError, match="is not offloaded"):
        residency.onload_optimizer(wrapper)
    assert (wrapper.__dict__, wrapper.optimizer.__dict__) == before
    train(prepared, rows, range(2, 3))
    lab.assert_equal(end(lab, prepared), end(lab, plain))


def test_a_wrapper_around_an_engine_s_own_optimizer_is_refused(prepare):
    wrapper = prepare(adamw)[2]
    wrapper.optimizer = object()
    for swap in (residency.offload_optimizer, residency.onload_optimizer):
        with pytest.raises(residency.RefusedError, match="holds a object, which is not a torch"):
            swap(wrapper)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_a_saved_state_resumes_to_the_bits_of_a_plain_uninterrupted_run(
    lab, prepare, rows, tmp_path, scaled
):
    plain = prepare(adamw, scaled=scaled)
    train(plain, rows, range(4))
    for part in (range(2), range(2, 4)):
        prepared = prepare(adamw, scaled=scaled)
        residency.offload_optimizer(prepared[2], bucket=BUCKET)
        if part.start:
            prepared[0].load_state(str(tmp_path))
        train(prepared, rows, part)
        prepared[0].save_state(str(tmp_path))
    state = prepared[2].state[prepared[2].param_groups[0]["params"][0]]
    assert state["exp_avg"].is_pinned()
    assert not state["step"].is_pinned()
    lab.assert_equal(end(lab, prepared), end(lab, plain))
