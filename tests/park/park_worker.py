"""One process of test_park_uses.py: runs every case of a phase and writes what became of each.

``two`` are ranks of wrapped modules, which train beside the same without parkings; ``uses`` does to
a parked module whatever a user can, in a process whose death would be seen.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from worker_cases import Cases

import residency
from residency import park, sim, unpark

NUM_RANKS, PHASE, FOLDER = int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
cases = {name: Cases() for name in ("two", "uses")}
two, uses = cases.values()


def block(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    """Weights of 40, 7 and 1 rows: on two ranks, even, uneven and empty shards."""
    torch.manual_seed(0)
    modules = (nn.Linear(32, 40), norm(40), nn.Linear(40, 7), nn.Linear(7, 1))
    return nn.Sequential(*modules).to("sim")


def sharded(norm: type[nn.Module] = nn.BatchNorm1d, **settings: Any) -> nn.Sequential:
    model = block(norm)
    mesh = init_device_mesh("sim", (NUM_RANKS,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


def batch(seed: int, rows: int = 6) -> Tensor:
    torch.manual_seed(100 * seed + (dist.get_rank() if dist.is_initialized() else 0))
    return torch.randn(rows, 32).to("sim")


def local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for s in optimizer.state.values() for v in s.values()]
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return [local(t).cpu() for t in (*parameters, *model.buffers(), *states)]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def away(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
    before = torch.accelerator.memory_allocated()
    freed = park(model, **settings) + park(optimizer)
    assert freed > 0
    assert torch.accelerator.memory_allocated() <= before - freed
    values = [*model.parameters(), *model.buffers()]
    assert all(local(t).is_cpu for t in values) or "need" in settings
    assert unpark(model) + unpark(optimizer) == freed
    assert not any(local(t).is_cpu for t in values)


def train(make: Callable[[], nn.Module], parked: bool, **settings: Any) -> list[Tensor]:
    """Takes steps on two accumulated gradients each, the first of them without a reduction."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def between() -> None:
        if parked:
            away(model, optimizer, **settings)

    between()
    for step in range(4):
        with accumulating(model):
            model(batch(2 * step)).square().sum().backward()
        between()
        model(batch(2 * step + 1)).square().sum().backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(batch(50))  # leaves what the root has gathered
            model.train()
        between()
    return bits(model, optimizer)


@contextlib.contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def both_train_alike(make: Callable[[], nn.Module], **settings: Any) -> None:
    assert equal(train(make, True, **settings), train(make, False))


# ------------------------------------------------------------------------------------- two ranks


@two
def fsdp2_trains_with_parkings_as_without() -> None:
    both_train_alike(sharded)
    both_train_alike(sharded, need=3000)


@two
def fsdp2_in_bfloat16_trains_with_parkings_as_without() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    both_train_alike(lambda: sharded(nn.LayerNorm, mp_policy=policy))


@two
def fsdp2_that_keeps_its_parameters_gathered_is_resharded_first() -> None:
    both_train_alike(lambda: sharded(reshard_after_forward=False))
    model = sharded(reshard_after_forward=False)
    shards = torch.accelerator.memory_allocated()
    with torch.no_grad():
        model(batch(0))
    assert torch.accelerator.memory_allocated() > shards
    park(model)
    assert all(not local(p).numel() or local(p).is_pinned() for p in model.parameters())
    assert all(type(p).__name__ == "DTensor" for p in model.parameters())
    unpark(model)


@two
def a_forward_of_a_parked_fsdp2_module_is_refused() -> None:
    model = sharded()
    park(model)
    for part in (model, model[2]):
        with pytest.raises(residency.RefusedError, match=r"call residency\.unpark"):
            part(batch(0) if part is model else batch(0) @ torch.ones(32, 40).to("sim"))
    names = r"^0\.weight, 0\.bias, 1\.weight and more of this FSDPSequential is parked"
    with pytest.raises(residency.RefusedError, match=names):
        model(batch(0))
    unpark(model)
    model(batch(0)).sum().backward()


@two
def fsdp2_within_its_backward_is_refused() -> None:
    model = sharded()
    errors = []

    def park_now(gradient: Tensor) -> None:
        try:
            park(model)
        except residency.RefusedError as error:
            errors.append(str(error))

    out = model[:2](batch(0))
    out.register_hook(park_now)
    model[2:](out).sum().backward()
    assert len(errors) == 1
    assert "park it between steps" in errors[0]


@two
def a_state_dict_goes_into_a_parked_fsdp2_module() -> None:
    source, target = sharded(), sharded()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    park(target)
    state = {k: v.cpu() for k, v in source.state_dict().items()}
    target.load_state_dict(state)
    unpark(target)
    assert equal(
        [local(p).cpu() for p in source.parameters()], [local(p).cpu() for p in target.parameters()]
    )
    for model in (source, target):
        model(batch(3)).sum().backward()
    left, right = ([local(p.grad).cpu() for p in m.parameters()] for m in (source, target))
    assert equal(left, right)


@two
def tensor_parallel_modules_train_with_parkings_as_without() -> None:
    def parallel() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)).to("sim")
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("sim", (NUM_RANKS,)), plan)

    both_train_alike(parallel)


@two
def data_parallel_modules_train_with_parkings_as_without() -> None:
    """The reducer's hooks are on nodes that the parameters must not lose."""
    for as_view in (False, True):

        def wrapped(as_view: bool = as_view) -> nn.Module:
            return DistributedDataParallel(block(), gradient_as_bucket_view=as_view)

        assert equal(_train_data_parallel(wrapped, True), _train_data_parallel(wrapped, False))


def _train_data_parallel(make: Callable[[], nn.Module], parked: bool) -> list[Tensor]:
    model: Any = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def between(owner: nn.Module, **settings: Any) -> None:
        if parked:
            before = torch.accelerator.memory_allocated()
            freed = park(owner, **settings)
            assert torch.accelerator.memory_allocated() == before - freed
            assert all(p.is_cpu for p in model.parameters())
            unpark(owner)

    for step in range(4):
        with model.no_sync():
            model(batch(2 * step)).square().sum().backward()
        between(model)
        between(model.module)
        model(batch(2 * step + 1)).square().sum().backward()
        between(model)
        optimizer.step()
        if parked and step % 2 == 0:
            between(model, gradients="drop")
            assert all(p.grad is None for p in model.parameters())
        else:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            between(model)
    for parameter in model.parameters():
        other = parameter.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(other.cpu(), parameter.cpu()), "the ranks have drifted apart"
    return bits(model, optimizer)


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


def main(own_rank: int) -> None:
    torch.set_num_threads(1)
    sim.enable("1GiB", schedule="late", check_races=True)
    if PHASE == "two":
        store = dist.FileStore(str(FOLDER / f"store-{PHASE}"), NUM_RANKS)
        dist.init_process_group(
            "cpu:gloo,sim:simccl", store=store, rank=own_rank, world_size=NUM_RANKS
        )
    cases[PHASE].run(FOLDER / f"{PHASE}{own_rank}.json")
    if PHASE == "two":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
