"""A parked module's bytes are on the host and nowhere else; back on the device, nothing shows that
they were away.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import residency
from residency import park, unpark
from residency._park._guards import Notices
from residency._park._parking import Parking
from residency._park._tensors import Owner


class Tied(nn.Module):
    """Embedding and head are one parameter, and batch statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.inner = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.inner(self.embedding(tokens)))))


def tied(device: torch.device) -> Tied:
    torch.manual_seed(0)
    return Tied().to(device)


def held() -> int:
    gc.collect()
    return torch.accelerator.memory_allocated()


def blocks(*tensors: Tensor) -> int:
    return sum(-(-t.untyped_storage().nbytes() // 512) * 512 for t in tensors)


def backward(model: nn.Module, device: torch.device, seed: int) -> None:
    torch.manual_seed(seed)
    tokens = torch.randint(0, 40, (12,)).to(device)
    model(tokens).square().mean().backward()


def bits(model: nn.Module) -> list[Tensor]:
    return [t.detach().cpu().clone() for t in (*model.parameters(), *model.buffers())]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def train(device: torch.device, *, parked: bool, steps: int = 4, **settings: str) -> list[Tensor]:
    """Takes steps on two accumulated gradients each, with or without parkings in between."""
    model = tied(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def away() -> None:
        if parked:
            park(model, **settings)
            park(optimizer)
            assert all(t.is_cpu for t in (*model.parameters(), *model.buffers()))
            unpark(optimizer)
            unpark(model)

    for step in range(steps):
        backward(model, device, 2 * step)
        away()
        backward(model, device, 2 * step + 1)
        away()
        optimizer.step()
        optimizer.zero_grad()
        away()
    states = [v for s in optimizer.state.values() for v in s.values()]
    assert all(v.device.type == device.type or v.dim() == 0 for v in states)
    return [*bits(model), *(v.cpu() for v in states)]


def test_training_with_parkings_between_all_its_parts_has_the_same_bits(device) -> None:
    assert equal(train(device, parked=True), train(device, parked=False))


def test_parking_frees_what_it_says_and_takes_it_back(device) -> None:
    model = tied(device)
    backward(model, device, 0)
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    expected, before = blocks(*tensors), held()
    del tensors
    assert park(model) == expected
    assert held() == before - expected
    assert unpark(model) == expected
    assert held() == before


@pytest.mark.parametrize("gradients", ["move", "drop"])
def test_what_others_free_meanwhile_is_not_counted(device, monkeypatch, gradients) -> None:
    model = tied(device)
    backward(model, device, 0)
    expected = blocks(*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()))
    others = [torch.ones(1000, device=device)]
    others.append(others)  # only a garbage collection frees it
    put_up = Notices.put_up

    def collect_first(notices: Notices, owners: list[Owner]) -> None:
        gc.collect()
        put_up(notices, owners)

    monkeypatch.setattr(Notices, "put_up", collect_first)
    before = held()
    del others
    assert park(model, gradients=gradients) == expected
    assert torch.accelerator.memory_allocated() == before - expected - 4096
    unpark(model)


def test_parking_twice_is_parking_once(device) -> None:
    model = tied(device)
    values = bits(model)
    assert unpark(model) == 0
    freed = park(model)
    assert park(model) == 0
    assert unpark(model) == freed
    assert unpark(model) == 0
    assert equal(bits(model), values)


def test_the_second_parking_of_a_module_allocates_no_pinned_memory(device, pinned_bytes) -> None:
    model = tied(device)
    before = pinned_bytes()
    park(model)
    taken = pinned_bytes()
    assert taken > before
    for _ in range(3):
        unpark(model)
        park(model)
        assert pinned_bytes() == taken
    unpark(model)
    del model
    gc.collect()
    assert pinned_bytes() == before


def test_ties_views_and_strides_stay_on_the_host_and_come_back(device) -> None:
    model = nn.Module()
    flat = torch.arange(64.0, device=device)
    model.whole = nn.Parameter(flat)
    model.part = nn.Parameter(flat[8:24].view(4, 4).t())
    model.register_buffer("strided", flat[1::3])
    model.register_buffer("overlapping", flat.as_strided((4, 8), (4, 1), 2))
    model.register_buffer("alone", torch.ones(6, device=device)[2:4])
    model.register_buffer("nothing", torch.empty(0, 3, device=device))
    model.seen = flat[5:9]
    del flat
    names = ("whole", "part", "strided", "overlapping", "alone", "nothing", "seen")
    tensors = {name: getattr(model, name) for name in names}

    def layout(tensor: Tensor) -> tuple[object, ...]:
        size = tensor.untyped_storage().nbytes()
        return tensor.shape, tensor.stride(), tensor.storage_offset(), size, type(tensor)

    layouts = {name: layout(t) for name, t in tensors.items()}
    before = held()
    freed = park(model)
    assert freed == held() - before + 2 * freed == 2 * 512
    for is_back in (False, True):
        if is_back:
            unpark(model)
        for name, tensor in tensors.items():
            assert getattr(model, name) is tensor
            assert tensor.is_cpu is not is_back
            assert layout(tensor) == layouts[name]
        with torch.no_grad():
            tensors["whole"].add_(1)
        for name in ("part", "strided", "overlapping", "seen"):
            storages = {tensors[n].untyped_storage().data_ptr() for n in ("whole", name)}
            assert len(storages) == 1
    assert tensors["part"][1, 0].item() == 8 + 1 + 2
    assert held() == before


def test_a_storage_that_somebody_else_holds_stays_with_a_warning(device) -> None:
    flat = torch.zeros(1000, device=device)
    model = nn.Linear(10, 10).to(device)
    model.bias.data = flat[3:13]
    with pytest.warns(UserWarning, match="stay on the device: other code holds") as caught:
        freed = park(model)
    assert caught[0].filename == __file__  # the line that parks
    assert freed == blocks(model.weight)
    assert model.weight.is_cpu
    flat.fill_(2)
    assert model.bias.cpu().eq(2).all()
    unpark(model)
    assert model(torch.zeros(1, 10, device=device)).eq(2).all()


@pytest.mark.parametrize("node_lives", [False, True])
def test_hooks_and_nodes_of_parameters_outlive_a_parking(device, node_lives) -> None:
    parameter = nn.Parameter(torch.ones(8, device=device))
    model = nn.ParameterList([parameter])
    calls: list[str] = []
    parameter.register_hook(lambda gradient: calls.append("tensor"))
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    if node_lives:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_hook(lambda *_: calls.append("node"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    (parameter * 2).sum().backward()
    version = parameter._version
    calls.clear()
    park(model)
    assert parameter.is_cpu
    assert parameter.grad.is_cpu
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert type(parameter) is nn.Parameter
    unpark(model)
    assert parameter._version == version
    (parameter * 2).sum().backward()
    assert calls == ["tensor", "after", *["node"] * node_lives]
    assert parameter.grad.eq(4).all()
    optimizer.step()
    assert parameter.eq(-3).all()
    if node_lives:
        assert torch.autograd.graph.get_gradient_edge(parameter).node is node


@pytest.mark.parametrize("node_lives", [False, True])
def test_gradients_that_change_while_they_are_away_come_back_changed(device, node_lives) -> None:
    model = nn.Linear(4, 4).to(device)
    loss = model(torch.ones(2, 4, device=device)).sum()
    loss.backward()
    if not node_lives:
        del loss
    park(model)
    model.weight.grad = None
    model.bias.grad.mul_(3)
    unpark(model)
    assert model.weight.grad is None
    assert model.bias.grad.device == device
    assert model.bias.grad.eq(6).all()


@pytest.mark.parametrize("node_lives", [False, True])
def test_a_gradient_that_is_given_to_a_parked_parameter_goes_where_it_goes(
    device, node_lives
) -> None:
    parameter = nn.Parameter(torch.ones(8, device=device))
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    if not node_lives:
        del node
    model = nn.ParameterList([parameter])
    park(model)
    parameter.grad = torch.full((8,), 3.0)
    unpark(model)
    assert parameter.grad.device == device
    (parameter * 2).sum().backward()
    assert parameter.grad.eq(5).all()


@pytest.mark.parametrize("node_lives", [False, True])
def test_gradients_are_dropped_on_request(device, node_lives) -> None:
    model = tied(device)
    backward(model, device, 0)
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    if not node_lives:
        del nodes
    expected = blocks(*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()))
    assert park(model, gradients="drop") == expected
    unpark(model)
    assert all(p.grad is None for p in model.parameters())


def test_a_need_parks_whole_storages_and_few_bytes_more(device) -> None:
    sizes = (1, 2, 4, 9, 30)
    model = nn.ParameterList([torch.zeros(128 * n, device=device) for n in sizes])
    for need, expected in (
        (1, {1}),
        (512 * 3, {1, 2}),
        (512 * 5, {1, 4}),
        (512 * 8, {9}),
        ("15KiB", {30}),
        (512 * 45, {2, 4, 9, 30}),
        (512 * 46, {1, 2, 4, 9, 30}),
        ("1GiB", {1, 2, 4, 9, 30}),
        (0, set()),
    ):
        before = torch.accelerator.memory_allocated()
        freed = park(model, need=need)
        parked = {n for n, p in zip(sizes, model, strict=True) if p.is_cpu}
        assert parked == expected
        assert freed == 512 * sum(expected) == before - torch.accelerator.memory_allocated()
        assert unpark(model) == freed
        assert torch.accelerator.memory_allocated() == before


@pytest.mark.parametrize("need", [512 * 3, 512 * 3 + 1, "1GiB"])
@pytest.mark.parametrize("gradients", ["move", "drop"])
def test_a_need_that_takes_all_bytes_parks_what_has_none_too(device, need, gradients) -> None:
    model = nn.Linear(128, 1, bias=False, device=device)  # with its gradient 1 KiB
    model.buffer = nn.Buffer(torch.ones(128, device=device))
    model.empty = nn.Parameter(torch.zeros(0, 3, device=device))
    model.empty_buffer = nn.Buffer(torch.zeros(0, device=device))
    model.window = nn.Buffer(model.buffer[:0])
    model.attribute = model.empty_buffer.view(0, 1)
    (model(torch.ones(128, device=device)).sum() + model.empty.sum()).backward()
    assert park(model, need=need, gradients=gradients) == 512 * 3
    tensors = [*model.parameters(), *model.buffers(), model.attribute]
    assert len(tensors) == 6
    assert all(tensor.is_cpu for tensor in tensors)
    assert all(p.grad is None or p.grad.is_cpu for p in model.parameters())
    unpark(model)
    assert all(tensor.device == device for tensor in tensors)


def test_each_parking_brings_back_what_it_took(device) -> None:
    model = nn.ParameterList([torch.zeros(128 * n, device=device) for n in (1, 2, 4)])
    first, second = Parking(model), Parking(model)
    assert first.num_bytes_on_device == 7 * 512
    assert first.park(512 * 2) == 512 * 2
    assert second.park() == 512 * 5
    assert second.num_bytes_on_device == 0
    assert second.unpark() == 512 * 5
    assert [p.is_cpu for p in model] == [False, True, False]
    assert first.is_parked
    assert not second.is_parked
    assert first.unpark() == 512 * 2
    assert not any(p.is_cpu for p in model)


def test_an_offloaded_optimizer_has_nothing_to_park(device) -> None:
    model = tied(device)
    optimizer = residency.offload_optimizer(torch.optim.AdamW(model.parameters()))
    backward(model, device, 0)
    optimizer.step()
    assert Parking(optimizer).num_bytes_on_device == 0
    assert park(optimizer) == 0
    park(model)
    unpark(model)
    backward(model, device, 1)
    optimizer.step()
    assert optimizer.statistics().num_steps == 2


def test_copies_of_a_parked_module_are_ordinary_modules(device) -> None:
    model = tied(device)
    park(model)
    copied = copy.deepcopy(model)
    unpark(model)
    assert all(p.is_cpu for p in copied.parameters())
    assert equal(bits(copied), bits(model))
    assert copied.head.weight is copied.embedding.weight


def test_state_in_containers_leaves_the_device_with_the_rest(device) -> None:
    parameter = nn.Parameter(torch.arange(1.0, 201.0, device=device))
    optimizer = torch.optim.LBFGS([parameter], max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    [state] = optimizer.state.values()
    containers = [v for v in state.values() if isinstance(v, list)]
    inside = [t for each in containers for t in each if isinstance(t, Tensor)]
    values = [t.cpu() for t in inside]
    assert len(values) > 2
    park(optimizer)
    assert all(t.is_cpu for t in inside)
    unpark(optimizer)
    assert all(t.device.type == device.type for t in inside)
    assert equal([t.cpu() for t in inside], values)


def test_inference_mode_leaves_parameters_that_train(device) -> None:
    trained, inferred = nn.Linear(4, 4).to(device), None
    with torch.inference_mode():
        inferred = nn.Linear(4, 4).to(device)
        for model in (trained, inferred):
            freed = park(model)
            assert freed > 0
            assert unpark(model) == freed
        park(trained)
    assert park(inferred) > 0
    unpark(trained)
    unpark(inferred)
    trained(torch.ones(1, 4, device=device)).sum().backward()
    assert trained.weight.grad.eq(1).all()
    with torch.inference_mode():
        assert inferred(torch.ones(1, 4, device=device)).device == device


def test_conjugate_views_come_back_as_such(device) -> None:
    model = nn.Module()
    model.register_buffer("values", torch.full((4,), 1j, device=device).conj())
    assert park(model) == 512
    assert model.values.is_conj()
    assert model.values.tolist() == [-1j] * 4
    unpark(model)
    assert model.values.cpu().tolist() == [-1j] * 4


def test_a_script_is_refused_and_stays_where_it_is(device: torch.device) -> None:
    with pytest.warns(DeprecationWarning, match="script"):
        script = torch.jit.script(nn.Linear(4, 4).to(device))
    with pytest.raises(residency.RefusedError, match="is a script"):
        park(script)
    assert script.weight.device.type == device.type


def test_what_cannot_be_watched_stays_whole_on_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tied(device)
    before = bits(model)
    monkeypatch.setattr(Notices, "put_up", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        park(model)
    assert all(t.device.type == device.type for t in model.parameters())
    assert equal(before, bits(model))
