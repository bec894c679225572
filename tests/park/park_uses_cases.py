"""Whatever a user can do to a parked module, in a process whose death would be seen."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from park_lab import FOLDER, batch, equal, uses
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import residency
from residency import park, unpark

# ------------------------------------------------------------------------------------ every use


class Parked:
    """Is a small model with its optimizer, parked; each case begins with a fresh one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.model.to("sim")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(batch(0)).sum().backward()
        self.optimizer.step()
        self.model(batch(1)).sum().backward()
        self.loss = self.model(batch(2)).sum()
        del self.loss
        self.values = [p.detach().cpu().clone() for p in self.model.parameters()]
        park(self.model)

    def comes_back(self) -> None:
        """Unparks, and trains."""
        unpark(self.model)
        assert all(p.device.type == "sim" for p in self.model.parameters())
        assert equal([p.detach().cpu() for p in self.model.parameters()], self.values)
        self.model(batch(3)).sum().backward()
        self.optimizer.step()
        torch.accelerator.synchronize()


DEVICE_ERROR = "Expected all tensors to be on the same device"
NOTE = "call residency.unpark"


@uses
def a_forward_is_a_device_error_that_says_what_to_call() -> None:
    parked = Parked()
    with pytest.raises(RuntimeError, match=DEVICE_ERROR) as caught:
        parked.model(batch(0))
    assert [NOTE in note for note in caught.value.__notes__] == [True]
    assert "weight, bias of this Linear" in caught.value.__notes__[0]
    parked.comes_back()
    assert not parked.model[0]._forward_hooks


@uses
def a_backward_through_an_older_graph_is_an_ordinary_error() -> None:
    for keeps in (False, True):
        parked = Parked()
        unpark(parked.model)
        inputs = batch(0).requires_grad_()
        loss = parked.model(inputs).sum()
        with pytest.warns(UserWarning, match="other code holds"):
            park(parked.model)  # autograd's own views of the weights
        with contextlib.suppress(RuntimeError):
            loss.backward(retain_graph=keeps)
        parked.model.zero_grad()
        unpark(parked.model)
        torch.accelerator.synchronize()
        assert equal([p.detach().cpu() for p in parked.model.parameters()], parked.values)


@uses
def an_older_graph_can_be_walked_after_the_parking() -> None:
    gradients = []
    for is_parked in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(8, device="cpu").to("sim"))
        model = nn.ParameterList([weight])
        loss = (weight * weight).sum()
        if is_parked:
            park(model)
            with pytest.raises(RuntimeError):
                loss.backward(retain_graph=True)
            weight.grad = None
            unpark(model)
        loss.backward()
        gradients.append(weight.grad.cpu())
    assert torch.equal(*gradients)


@uses
def state_dicts_are_read_and_written_on_the_host() -> None:
    parked = Parked()
    state = parked.model.state_dict()
    assert all(value.is_cpu for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    changed = {k: v + 1 for k, v in loaded.items()}
    parked.model.load_state_dict(changed)
    del state
    unpark(parked.model)
    for name, value in parked.model.state_dict().items():
        assert torch.equal(value.cpu(), changed[name])
    del value  # it holds a storage
    park(parked.model)
    parked.model.load_state_dict(loaded, assign=True)
    parked.values = [loaded[n] for n, _ in parked.model.named_parameters()]
    unpark(parked.model)
    assert equal([p.detach().cpu() for p in parked.model.parameters()], parked.values)
    assert all(t.device.type == "sim" for t in parked.model.state_dict().values())


@uses
def our_own_saves_and_loads_use_the_bytes_on_the_host() -> None:
    parked = Parked()
    state = {"model": parked.model, "optimizer": parked.optimizer}
    with residency.Checkpointer(FOLDER / "save") as checkpointer:
        checkpointer.save(1, state).wait()
        with torch.no_grad():
            for parameter in parked.model.parameters():
                parameter.zero_()
        snapshot = residency.snapshot({"model": parked.model})
        assert checkpointer.restore(state) == 1
        assert not snapshot.tree["model"]["0.weight"].any()
    assert all(p.is_cpu for p in parked.model.parameters())
    path = FOLDER / "weights.pt"
    torch.save({k: v + 1 for k, v in parked.model.state_dict().items()}, path)
    residency.load_into(parked.model, path)
    parked.values = [v + 1 for v in parked.values]
    parked.comes_back()


@uses
def a_save_in_flight_has_the_bytes_of_its_call() -> None:
    for _ in range(3):
        parked = Parked()
        unpark(parked.model)
        before = torch.accelerator.memory_allocated()
        snapshot = residency.snapshot({"model": parked.model})
        assert park(parked.model) > 0
        assert all(t.is_cpu for t in parked.model.state_dict().values())
        with torch.no_grad():
            for parameter in parked.model.parameters():
                parameter.mul_(2)
        unpark(parked.model)
        snapshot.wait()
        names = [n for n, _ in parked.model.named_parameters()]
        assert equal([snapshot.tree["model"][n] for n in names], parked.values)
        freed = park(parked.model)
        assert torch.accelerator.memory_allocated() == before - freed
        tensors = [*parked.model.parameters(), *parked.model.buffers()]
        tensors += [p.grad for p in parked.model.parameters()]
        assert freed == sum(-(-t.nbytes // 512) * 512 for t in tensors)
        unpark(parked.model)


@uses
def copies_and_pickles_are_ordinary_modules_on_the_host() -> None:
    parked = Parked()
    file = io.BytesIO()
    torch.save(parked.model, file)
    file.seek(0)
    made = [
        copy.deepcopy(parked.model),
        copy.copy(parked.model),
        pickle.loads(pickle.dumps(parked.model)),
        torch.load(file, weights_only=False),
    ]
    for model in made:
        assert equal([p.detach() for p in model.parameters()], parked.values)
        assert model.eval()(torch.zeros(1, 32)).shape == (1, 4)
    parked.model.train()
    del made, model
    parked.comes_back()


@uses
def a_module_that_is_moved_meanwhile_stays_where_it_was_put() -> None:
    for move in (lambda m: m.to("sim"), lambda m: m.sim()):
        parked = Parked()
        move(parked.model)
        parked.comes_back()
        assert all(p.grad.device.type == "sim" for p in parked.model.parameters())
    parked = Parked()
    parked.model.cpu()
    parked.comes_back()


@uses
def a_module_that_is_cast_meanwhile_comes_back_cast() -> None:
    parked = Parked()
    parked.model.half()
    unpark(parked.model)
    for parameter, value in zip(parked.model.parameters(), parked.values, strict=True):
        assert parameter.device.type == "sim"
        assert torch.equal(parameter.detach().cpu(), value.half())


@uses
def optimizers_of_parked_parameters_or_with_parked_state_are_refused() -> None:
    parked = Parked()
    offloaded = residency.offload_optimizer(torch.optim.AdamW(parked.model.parameters()))
    for optimizer in (parked.optimizer, torch.optim.SGD(parked.model.parameters()), offloaded):
        with pytest.raises(residency.RefusedError, match=r"are parked.*residency\.unpark\(module"):
            optimizer.step()
    unpark(parked.model)
    park(parked.optimizer)
    with pytest.raises(residency.RefusedError, match=r"residency\.unpark\(optimizer\)"):
        parked.optimizer.step()
    unpark(parked.optimizer)
    parked.comes_back()


@uses
def gradients_can_be_clipped_zeroed_and_dropped() -> None:
    parked = Parked()
    nn.utils.clip_grad_norm_(parked.model.parameters(), 1e-3)
    parked.optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in parked.model.parameters())
    parked.model.zero_grad()
    parked.optimizer.zero_grad()
    parked.comes_back()


@uses
def functional_calls_take_other_tensors_and_fail_with_the_parked() -> None:
    parked = Parked()
    given = {n: v.to("sim") for n, v in parked.model.state_dict().items()}
    assert torch.func.functional_call(parked.model, given, batch(0)).shape == (6, 4)
    with pytest.raises(RuntimeError, match=DEVICE_ERROR) as caught:
        torch.func.functional_call(parked.model, {}, batch(0))
    assert NOTE in caught.value.__notes__[0]
    parked.comes_back()


@uses
def data_parallel_around_a_parked_module_fails_as_torch_does() -> None:
    parked = Parked()
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=0, world_size=1)
    try:
        with pytest.raises((RuntimeError, ValueError)):
            DistributedDataParallel(parked.model, device_ids=[0])(batch(0))
        unpark(parked.model)
        wrapped = DistributedDataParallel(parked.model)
        park(wrapped)
        with pytest.raises(RuntimeError, match=DEVICE_ERROR) as caught:
            wrapped(batch(0))
        assert NOTE in caught.value.__notes__[0]
        unpark(wrapped)
        wrapped(batch(0)).sum().backward()
        del wrapped
        parked.comes_back()
    finally:
        dist.destroy_process_group()


@uses
def tensors_can_be_looked_at_and_written() -> None:
    parked = Parked()
    weight = parked.model[0].weight
    assert weight.detach().numpy().shape == (16, 32)
    assert "device" not in repr(weight)
    assert weight.data_ptr() == weight.untyped_storage().data_ptr()
    assert weight.tolist() == parked.values[0].tolist()
    vector = nn.utils.parameters_to_vector(parked.model.parameters())
    nn.utils.vector_to_parameters(vector + 1, parked.model.parameters())
    average = copy.deepcopy(parked.model)
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), parked.model.parameters(), strict=True):
            mean.lerp_(parameter, 0.5)
    parked.model.apply(lambda part: part.train())
    parked.values = [v + 1 for v in parked.values]
    with pytest.raises(RuntimeError):
        weight + batch(0).sum()[None]
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(batch(0), weight)
    parked.comes_back()


@uses
def memory_that_is_shared_between_processes_comes_back() -> None:
    parked = Parked()
    with contextlib.suppress(RuntimeError):
        parked.model.share_memory()
    parked.comes_back()


@uses
def parameters_come_and_go_while_their_module_is_parked() -> None:
    parked = Parked()
    parked.model[2].register_parameter("new", nn.Parameter(torch.ones(3)))
    parked.model[2].bias = nn.Parameter(torch.ones(4))
    del parked.model[0].bias
    parked.model[0].register_parameter("bias", None)
    parked.model[1].register_buffer("late", torch.ones(2))
    del parked.optimizer
    before = torch.accelerator.memory_allocated()
    taken = unpark(parked.model)
    assert torch.accelerator.memory_allocated() == before + taken
    assert parked.model[2].new.is_cpu
    assert parked.model[1].late.is_cpu
    assert parked.model[2].bias.device.type == "sim"
    assert parked.model(batch(0)).shape == (6, 4)


@uses
def a_module_that_dies_parked_leaves_nothing() -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    parked = Parked()
    del parked
    gc.collect()
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == before
    torch.optim.SGD([nn.Parameter(torch.ones(2, device="sim"))]).step()


@uses
def wrappers_of_several_tensors_move_as_one() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    inner = [torch.randn(4, 4).to("sim") for _ in range(2)]
    values = [t.cpu() for t in inner]
    model = nn.Module()
    model.register_buffer("pair", TwoTensor(*inner))
    del inner
    assert park(model) == 1024
    assert model.pair.a.is_cpu
    unpark(model)
    assert equal([model.pair.a.cpu(), model.pair.b.cpu()], values)
    assert type(model.pair + model.pair) is TwoTensor
