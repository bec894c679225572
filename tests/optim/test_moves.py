"""A model that moves after the offload, or whose data is swapped: the state follows, or it says
so."""

import pytest
import torch

import residency

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
