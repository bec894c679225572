"""A parked tensor is the user's own: what is done to it while it is away is there when it is back,
as on tensors that never were away, and nothing of ours goes along with copies of it.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import residency
from residency import _module_calls, park, unpark
from residency._park import _guards

pytestmark = pytest.mark.sim_device(capacity="256MiB", workspaces=False)
Log = list[object]
ACTIONS: dict[str, Callable[[Any, Log], object]] = {}


def action(function: Callable[[Any, Log], object]) -> Callable[[Any, Log], object]:
    ACTIONS[function.__name__] = function
    return function


class Weight(nn.Module):
    """One parameter that its graph saves, and how often each hook of before was called."""

    def __init__(self, device: torch.device, log: Log) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]).to(device))
        self.w.tag = "before"
        self.frozen = nn.Parameter(torch.ones(3).to(device), requires_grad=False)
        self.early = self.w.register_hook(lambda g: log.append("early"))
        self.late = self.w.register_post_accumulate_grad_hook(lambda p: log.append("late"))
        self.plain = nn.Parameter(torch.ones(4).to(device))  # with no hook yet

    def forward(self) -> Tensor:
        return (self.w**2).sum() + (self.plain**3).sum()


@action
def nothing(model: Any, log: Log) -> None:
    pass


@action
def hooks_are_registered(model: Any, log: Log) -> None:
    for parameter in (model.w, model.plain):
        parameter.register_hook(lambda g: g * 3)
        parameter.register_hook(lambda g: log.append(("second", g.cpu().tolist())))


@action
def a_hook_is_registered_and_removed(model: Any, log: Log) -> None:
    model.plain.register_hook(lambda g: g * 3).remove()


@action
def hooks_after_accumulation_are_registered(model: Any, log: Log) -> None:
    for parameter in (model.w, model.plain):
        parameter.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.cpu().tolist()))


@action
def hooks_of_before_are_removed(model: Any, log: Log) -> None:
    model.early.remove()
    model.late.remove()


@action
def hooks_are_taken_away_whole(model: Any, log: Log) -> None:
    model.w._backward_hooks = None
    model.w._post_accumulate_grad_hooks = None


@action
def weights_are_written_in_place(model: Any, log: Log) -> None:
    with torch.no_grad():
        model.plain.mul_(2)


@action
def weights_are_written_through_another_name(model: Any, log: Log) -> None:
    model.plain.detach().add_(1)


@action
def weights_are_written_past_the_counter(model: Any, log: Log) -> None:
    model.plain.data.add_(1)


@action
def weights_are_loaded(model: Any, log: Log) -> None:
    model.load_state_dict({n: torch.full_like(t, 7.0) for n, t in model.state_dict().items()})


@action
def parameters_are_frozen(model: Any, log: Log) -> None:
    model.plain.requires_grad_(False)
    model.frozen.requires_grad_(True)


@action
def a_gradient_is_set(model: Any, log: Log) -> None:
    model.w.grad = torch.full_like(model.w, 5.0)
    model.plain.grad = torch.full_like(model.plain, 6.0)


@action
def gradients_are_zeroed(model: Any, log: Log) -> None:
    model.zero_grad(set_to_none=False)


@action
def gradients_are_dropped(model: Any, log: Log) -> None:
    model.zero_grad()


@action
def attributes_are_set(model: Any, log: Log) -> None:
    model.w.tag = "meanwhile"
    model.plain.group = {"lr": 1}


@action
def gradients_are_retained(model: Any, log: Log) -> None:
    model.plain.retain_grad()


@action
def the_gradients_type_is_set(model: Any, log: Log) -> None:
    model.plain.grad = None
    model.plain.grad_dtype = torch.float64
    log.append(str(model.plain.grad_dtype))


@action
def values_are_replaced(model: Any, log: Log) -> None:
    model.plain.data = torch.full_like(model.plain, 9.0)


def outcome(
    device: torch.device, do: Callable[[Any, Log], object], *, parked: bool, node_lives: bool
) -> list[object]:
    log: Log = []
    model = Weight(device, log)
    model().backward()  # gradients are there
    loss = model() if node_lives else None
    parameters = dict(model.named_parameters())
    refs = [weakref.ref(p) for p in parameters.values()]
    if parked:
        assert park(model) > 0
        assert all(p.is_cpu for p in model.parameters())
    versions = [p._version for p in parameters.values()]
    do(model, log)
    versions += [p._version for p in parameters.values()]
    if parked:
        unpark(model)
    assert all(p.device == device for p in model.parameters())
    error = ""
    try:
        (model() if loss is None else loss).backward()
    except RuntimeError as problem:
        error = str(problem).partition(";")[0]
    facts: list[object] = [error, log, versions]
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        gradient = parameter.grad
        assert gradient is None or gradient.device == device
        facts += [name, parameter.detach().cpu().tolist(), parameter._version, vars(parameter)]
        facts += [parameter.requires_grad, None if gradient is None else gradient.cpu().tolist()]
        facts += [str(parameter.grad_dtype), parameter.is_leaf]
        facts += [len(h or ()) for h in _park_ties_hooks(parameter)]
    assert all(ref() is not None for ref in refs)
    return facts


def _park_ties_hooks(parameter: Tensor) -> tuple[Any, Any]:
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize("node_lives", [True, False])
@pytest.mark.parametrize("name", ACTIONS)
def test_whatever_is_done_to_a_parked_parameter_is_there_when_it_is_back(
    device: torch.device, name: str, node_lives: bool
) -> None:
    stock, ours = (
        outcome(device, ACTIONS[name], parked=parked, node_lives=node_lives)
        for parked in (False, True)
    )
    assert ours == stock


def test_a_parking_fires_the_hooks_of_a_graph_that_is_made_on_the_host(device) -> None:
    log: Log = []
    model = Weight(device, log)
    loss = model()
    park(model)
    model().backward()
    assert log == ["early", "late"]
    assert model.w.grad.is_cpu
    unpark(model)
    loss.backward()
    assert model.w.grad.tolist() == [4.0, 8.0, 12.0, 16.0]


# ------------------------------------------------------------------------------- nothing of ours


def test_copies_and_pickles_of_a_parked_module_have_nothing_of_ours(device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, device=device)).sum().backward()
    loss = model(torch.ones(2, 4, device=device)).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a graph holds weights
        park(model)
    park(optimizer)
    before = {id(part): dict(vars(part)) for part in model.modules()}
    file = io.BytesIO()
    torch.save((model, optimizer.state_dict()), file)
    for data in (file.getvalue(), pickle.dumps(model), pickle.dumps(optimizer)):
        assert b"residency" not in data
    for other in (copy.deepcopy(model), copy.copy(model)):
        for part in other.modules():
            assert not any(value for name, value in vars(part).items() if "hook" in name)
        assert "residency" not in repr([vars(p) for p in other.parameters()])
    unpark(optimizer)
    unpark(model)
    assert before == {id(part): dict(vars(part)) for part in model.modules()}
    del loss


def test_the_call_of_modules_is_torchs_own_again_when_nothing_is_parked(device) -> None:
    gc.collect()  # watches of tests before
    torch_call = nn.Module.__call__
    first, second = (nn.Linear(4, 4).to(device) for _ in range(2))
    park(first)
    park(second)
    assert nn.Module.__call__ is not torch_call
    unpark(first)
    with pytest.raises(RuntimeError) as caught:
        second(torch.ones(4, device=device))
    assert "residency.unpark" in caught.value.__notes__[0]
    del second, caught  # parked still
    gc.collect()
    assert nn.Module.__call__ is torch_call


def test_a_watch_that_begins_in_one_thread_while_the_last_one_ends_in_another_stays(
    device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # watches of tests before
    torch_call = nn.Module.__call__
    model = nn.Linear(4, 4).to(device)
    ending, beginning = (_guards.Notices({0: object()}) for _ in range(2))
    has_come = threading.Event()  # to the lock, or past it
    lock, set_call = _guards._lock, _module_calls._set_call

    class Lock:
        def __enter__(self) -> None:
            if threading.current_thread() is thread:
                has_come.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def begin() -> None:
        beginning.put_up([model])
        has_come.set()

    def begin_meanwhile(function: object) -> None:
        if function is torch_call:
            thread.start()
            assert has_come.wait(60)
        set_call(function)

    thread = threading.Thread(target=begin)
    monkeypatch.setattr(_guards, "_lock", Lock())
    monkeypatch.setattr(_module_calls, "_set_call", begin_meanwhile)
    ending.put_up([model])
    ending.take_down()
    thread.join()
    monkeypatch.undo()
    watched = nn.Module.__call__
    beginning.take_down()
    assert watched is _module_calls._call
    assert nn.Module.__call__ is torch_call


def test_a_function_put_around_the_call_meanwhile_stays(
    device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # watches of tests before
    torch_call = nn.Module.__call__
    model = nn.Linear(4, 4).to(device)
    park(model)
    inner, calls = nn.Module.__call__, []

    def theirs(self: nn.Module, *args: Any) -> Any:
        calls.append(self)
        return inner(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", theirs)
        unpark(model)
        assert nn.Module.__call__ is theirs
        model(torch.ones(4, device=device))
        assert calls == [model]
        park(model)  # ours is underneath
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(4, device=device))
        assert len(caught.value.__notes__) == 1
        unpark(model)
    park(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(4, device=device))
    assert len(caught.value.__notes__) == 1
    unpark(model)
    assert nn.Module.__call__ is torch_call


# The compiler's reset imports parts of torch that a GPU alone needs, and one of them warns.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_modules_are_not_compiled_anew_while_another_is_parked(device) -> None:
    frames: list[object] = []

    def backend(graph: Any, inputs: object) -> Any:
        frames.append(graph)
        return graph.forward

    torch.compiler.reset()
    other = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend=backend)
    data = torch.ones(2, 4)
    expected = other(data)
    model = nn.Linear(4, 4).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        park(model)
        assert torch.equal(other(data), expected)
        unpark(model)
        assert torch.equal(other(data), expected)
    assert len(frames) == 1
    torch.compiler.reset()


def test_optimizers_step_in_one_thread_while_others_park(
    device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry is read between any two changes of it, in another thread."""
    errors: list[BaseException] = []
    model = nn.Linear(4, 4).to(device)

    class Turning(_guards.Notices):
        def has_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
            for change in (self.other.take_down, lambda: self.other.put_up([model])):
                thread = threading.Thread(target=change)
                thread.start()
                thread.join()
            return False

    parked = {0: object()}
    notices = [Turning(parked) for _ in range(3)]
    for each in notices:
        each.other = _guards.Notices(parked)
        each.put_up([model])
    host = nn.Linear(2, 2)
    host(torch.ones(2)).sum().backward()
    try:
        torch.optim.SGD(host.parameters()).step()
    except RuntimeError as error:
        errors.append(error)
    for each in notices:
        each.take_down()
        each.other.take_down()
    assert not errors


# ------------------------------------------------------------------- what torch would refuse late


def test_a_weak_reference_of_compiled_code_is_found_before_anything_moves(device) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    loss = sum((p**2).sum() for p in model.parameters())
    reference = torch._C._WeakTensorRef(model[1].weight)
    before = torch.accelerator.memory_allocated()
    with pytest.raises(residency.RefusedError, match=r"1\.weight cannot be moved.*weak reference"):
        park(model)
    assert all(p.device == device for p in model.parameters())
    assert torch.accelerator.memory_allocated() == before
    del reference
    assert park(model) > 0
    reference = torch._C._WeakTensorRef(model[0].bias)
    with pytest.raises(residency.RefusedError, match=r"0\.bias cannot be moved"):
        unpark(model)
    assert all(p.is_cpu for p in model.parameters())
    del reference
    unpark(model)
    loss.backward()
    assert all(torch.equal(p.grad, 2 * p.detach()) for p in model.parameters())


@pytest.mark.alone
def test_owners_of_one_request_may_share_storages(device) -> None:
    class Part(nn.Module):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(tensor)

    flat = torch.arange(8.0, device=device)
    first, second = Part(flat[:4]), Part(flat[4:])
    del flat
    nodes = [torch.autograd.graph.get_gradient_edge(p.weight).node for p in (first, second)]
    second.weight.grad = torch.ones(4, device=device)
    values = [p.weight.detach().cpu() for p in (first, second)]
    one = torch.accelerator.memory_allocated()
    capacity = residency.memory_state().capacity
    with residency.hand_off(capacity, park=[first, second], timeout=5):
        assert torch.accelerator.memory_allocated() == 0
        assert all(p.weight.is_cpu for p in (first, second))
        assert second.weight.grad.is_cpu
        assert first.weight.untyped_storage()._cdata == second.weight.untyped_storage()._cdata
        second.load_state_dict({"weight": torch.full((4,), 9.0)})
    assert torch.accelerator.memory_allocated() == one
    assert first.weight.untyped_storage()._cdata == second.weight.untyped_storage()._cdata
    assert torch.equal(first.weight.detach().cpu(), values[0])
    assert second.weight.tolist() == [9.0] * 4
    (second.weight * 3).sum().backward()
    assert second.weight.grad.tolist() == [4.0] * 4
    edges = [torch.autograd.graph.get_gradient_edge(p.weight).node for p in (first, second)]
    assert edges == nodes
    with pytest.warns(UserWarning, match="other code holds"):
        assert park(first) == 0  # asked for alone, the other one is somebody else


@pytest.mark.parametrize("need", [1, 1500, 2500, 5000])
def test_a_gradient_that_is_cleared_while_a_part_is_parked_stays_cleared(
    need: int, device: torch.device
) -> None:
    flat = torch.ones(512, device=device)
    module = nn.Module()
    module.a, module.b = nn.Parameter(flat[:256]), nn.Parameter(flat[256:])
    module.e = nn.Parameter(torch.ones(256, 256, device=device))
    del flat

    def loss() -> torch.Tensor:
        return ((torch.full((2, 256), 2.0, device=device) * module.a + module.b) @ module.e).sum()

    loss().backward()
    pending = loss()  # whose graph keeps the parameters' nodes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the graph holds and so stays
        residency.park(module, need=need)
    shown = [p.grad is not None for p in module.parameters()]
    module.zero_grad()
    residency.unpark(module)
    assert shown == [True, True, True]
    assert [p.grad for p in module.parameters()] == [None, None, None]
    del pending


def test_a_part_is_found_beside_a_parameter_without_elements(device: torch.device) -> None:
    module = nn.Module()
    module.small = nn.Parameter(torch.zeros(1000, device=device))
    module.big = nn.Parameter(torch.zeros(270400, device=device))
    module.empty = nn.Parameter(torch.zeros(0, 3, device=device))
    assert residency.park(module, need=100_000) >= 100_000
    residency.unpark(module)
