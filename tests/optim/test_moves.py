"""A model that moves after the offload, or whose data is swapped: the state follows, or it says
so."""

import pytest
import torch

import residency
from residency import _device
from residency._dtensor import moved
from residency._transfer import _events, moved_at_once

CASES = {
    "AdamW": {},
    "AdamW fused": {"fused": True},
    "SGD": {"momentum": 0.9},
    "NAdam": {},
    "Rprop": {},
    "ASGD": {},
}


def build(lab, name, device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.Linear(33, 7))
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    model.to(device)
    cls = getattr(torch.optim, name.split()[0])
    return model, cls(model.parameters(), lr=1e-2, **CASES[name])


def move(model, optimizer, device, how):
    """Moves a model as users do, and a plain optimizer's state as an offloaded one's moves."""
    model.to(device)
    for p in model.parameters():
        p.grad = None
    if how == "plain":
        for p, state in optimizer.state.items():
            for key, value in state.items():
                stays = value.is_cpu and value.dim() == 0 and key in ("step", "mu_product")
                is_fused = optimizer.param_groups[0].get("fused")
                is_asgd = isinstance(optimizer, torch.optim.ASGD)
                if not stays or is_fused or is_asgd:
                    state[key] = value.to(device)
                assert p in optimizer.state
    elif how == "advised":
        residency.offload_optimizer(residency.onload_optimizer(optimizer), bucket=2000)
    elif how == "onloaded":
        residency.onload_optimizer(optimizer)


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("there", ["to the device", "to the host"])
@pytest.mark.parametrize("how", ["by itself", "advised", "onloaded"])
def test_the_state_follows_a_model_to_another_device(lab, name, there, how, pinned_bytes):
    devices = [torch.device("cpu"), lab.device]
    if there == "to the host":
        devices.reverse()
    results = []
    before = pinned_bytes()
    for kind in ("plain", how):
        model, optimizer = build(lab, name, devices[0])
        if kind != "plain":
            residency.offload_optimizer(optimizer, bucket=2000)
        parameters = list(model.parameters())
        lab.take_steps(optimizer, parameters, range(2))
        move(model, optimizer, devices[1], kind)
        lab.take_steps(optimizer, parameters, range(2, 4))
        results.append(lab.read(optimizer, parameters))
    lab.assert_equal(*results)
    if how == "onloaded" or there == "to the host":
        assert pinned_bytes() == before
        tensors = [v for s in optimizer.state.values() for v in s.values() if v.dim() > 0]
        assert {value.device for value in tensors} == {devices[1]}
    else:
        assert optimizer.statistics().home_bytes > 0


def test_a_load_and_a_resident_part_follow_the_model_too(lab):
    model, optimizer = build(lab, "AdamW", torch.device("cpu"))
    residency.offload_optimizer(optimizer, bucket=2000, resident=1024)
    parameters = list(model.parameters())
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    saved = optimizer.state_dict()
    move(model, optimizer, lab.device, "by itself")
    optimizer.load_state_dict(saved)
    assert optimizer.statistics().home_bytes > 0
    assert 0 < optimizer.statistics().resident_bytes <= 1024
    lab.take_steps(optimizer, parameters, range(2, 4), missing=False)
    move(model, optimizer, torch.device("cpu"), "by itself")
    lab.take_steps(optimizer, parameters, range(4, 5), missing=False)
    assert optimizer.statistics().home_bytes == 0
    assert all(v.is_cpu for s in optimizer.state.values() for v in s.values())


def test_a_model_that_moved_in_part_is_refused_and_nothing_is_stepped(lab):
    model, optimizer = build(lab, "AdamW", lab.device)
    residency.offload_optimizer(optimizer)
    parameters = list(model.parameters())
    lab.take_steps(optimizer, parameters, range(1))
    model[0].to("cpu")
    before = lab.read(optimizer, parameters)
    with pytest.raises(residency.RefusedError, match="on one device"):
        optimizer.step()
    lab.assert_equal(lab.read(optimizer, parameters), before)
    model.to(lab.device)
    lab.take_steps(optimizer, parameters, range(1, 2))


def test_too_little_host_memory_for_a_moved_model_leaves_the_state(lab, monkeypatch):
    from residency._transfer import _slab

    model, optimizer = build(lab, "AdamW", torch.device("cpu"))
    residency.offload_optimizer(optimizer, bucket=2000)
    parameters = list(model.parameters())
    lab.take_steps(optimizer, parameters, range(2))
    move(model, optimizer, lab.device, "by itself")
    before = lab.read(optimizer, parameters)
    lab.set_gradients(parameters, 2)
    with monkeypatch.context() as tight:
        tight.setattr(_slab, "available_host_bytes", lambda: 1000)
        with pytest.raises(residency.RefusedError, match="1000 B are"):
            optimizer.step()
    lab.assert_equal(lab.read(optimizer, parameters), before)
    optimizer.step()
    assert optimizer.statistics().home_bytes > 0


@pytest.mark.parametrize(
    "swap", [lambda d: d[:10].clone(), lambda d: d.to(torch.bfloat16)], ids=["shape", "dtype"]
)
def test_data_of_another_shape_or_dtype_is_refused_until_the_state_goes(lab, swap):
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    p = parameters[0]
    p.grad = None
    data, p.data = p.data, swap(p.data)
    for q in parameters:
        q.grad = torch.ones_like(q)
    before = [q.detach().cpu().clone() for q in parameters]
    with pytest.raises(residency.RefusedError, match="was made for"):
        optimizer.step()
    assert all(torch.equal(q.cpu(), b) for q, b in zip(parameters, before, strict=True))
    del optimizer.state[p]
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].shape == p.shape
    assert optimizer.state[p]["step"] == 1
    assert data.numel() > 0


def test_a_memory_format_that_changes_between_steps_changes_no_bit(lab):
    results = []
    for offload in (True, False):
        (p,) = lab.parameters(shapes=((8, 16, 4, 4),))
        optimizer = torch.optim.AdamW([p], lr=1e-2)
        if offload:
            residency.offload_optimizer(optimizer, bucket=2048)
        lab.take_steps(optimizer, [p], range(2))
        p.grad = None
        p.data = p.data.to(memory_format=torch.channels_last)
        lab.take_steps(optimizer, [p], range(2, 4))
        results.append(lab.read(optimizer, [p]))
    lab.assert_equal(*results)


def test_the_way_back_to_the_device_is_one_wait_for_copies_on_the_lane(lab, monkeypatch):
    """And a device without room for all of it has got nothing."""
    waits = []

    class Counted(torch.Event):
        def synchronize(self):
            waits.append(self)
            super().synchronize()

    def refuse(device=None):
        raise AssertionError("waited for the whole device")

    model, plain = build(lab, "AdamW fused", lab.device)
    lab.take_steps(plain, list(model.parameters()), range(3), missing=False)
    expected = lab.read(plain, list(model.parameters()))
    model, optimizer = build(lab, "AdamW fused", lab.device)
    parameters = list(model.parameters())
    residency.offload_optimizer(optimizer, bucket=2000)
    lab.take_steps(optimizer, parameters, range(3), missing=False)
    optimizer.state[parameters[0]]["exp_avg"].sum()  # waits for the copies home
    expected_room = sum(v.numel() * 4 for s in expected.state for v in s.values())
    before = torch.accelerator.memory_allocated()
    busy = torch.full((1000, 1000), 1.0, device=lab.device)
    with monkeypatch.context() as patch:
        patch.setattr(_events, "new_event", lambda device, **_: Counted(device.type))
        patch.setattr(torch.Tensor, "to", None)  # a copy that the host waits for
        torch.accelerator.reset_peak_memory_stats()
        patch.setattr(_device, "synchronize", refuse)
        residency.onload_optimizer(optimizer)
    assert len(waits) == 1
    assert torch.accelerator.max_memory_allocated() - before <= (
        busy.nbytes + expected_room + 512 * 3 * len(parameters)
    )
    lab.assert_equal(lab.read(optimizer, parameters), expected)


@pytest.mark.sim
def test_a_failure_between_copies_to_the_device_leaves_none_under_way(lab, monkeypatch):

    sources = [torch.full((50_000,), float(n)).pin_memory() for n in range(3)]
    copy = torch._foreach_copy_

    def copy_two(targets, sources, **options):
        copy(targets[:2], sources[:2], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", copy_two)
        with pytest.raises(KeyboardInterrupt):
            moved_at_once(sources, lab.device, copy=True)
    del sources
    # What was freed is written by others at once; a copy under way would be a race.
    others = [torch.full((50_000,), 7.0, device=lab.device) for _ in range(3)]
    assert all((other == 7).all().item() for other in others)


@pytest.mark.parametrize("copy", [True, False])
def test_what_is_moved_at_once_is_what_each_would_be_alone(lab, copy):

    tensors = [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::2],
        torch.empty(0, 3),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.ones(4, device=lab.device),
        torch.nn.Parameter(torch.ones(3)),
    ]
    for device in (lab.device, torch.device("cpu")):
        together = moved_at_once(tensors, device, copy=copy)
        alone = [moved(tensor, device, copy=copy) for tensor in tensors]
        for ours, other in zip(together, alone, strict=True):
            assert torch.equal(ours, other)
            assert (ours.stride(), ours.dtype, ours.device) == (
                other.stride(),
                other.dtype,
                other.device,
            )
            assert not ours.requires_grad
        assert (together[4].data_ptr() == tensors[4].data_ptr()) == (
            not copy and device == lab.device
        )
    assert moved_at_once([], lab.device, copy=True) == []


def test_a_state_with_masters_stays_as_it_was_when_its_model_goes_to_the_host(lab):
    parameters = lab.parameters(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    residency.offload_optimizer(optimizer, master_weights=True)
    lab.take_steps(optimizer, parameters, range(1))
    before, on_device = optimizer.state, [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.cpu()
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(residency.RefusedError, match="master"):
        optimizer.step()
    assert optimizer.state is before
    for parameter, data in zip(parameters, on_device, strict=True):
        parameter.data, parameter.grad = data, None
