"""One rank of tests/sim/test_collectives.py: runs every case and writes what became of each.

A case gets the same result from the device's collectives as from gloo's on host tensors.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worker_cases import Cases

from residency import sim

case, case_of_four = Cases(), Cases()
SIZE = 12
SCHEDULE, DEVICE = sys.argv[2:4]
BACKEND = {"sim": "simccl", "cuda": "nccl"}[DEVICE]
NUM_RANKS = int(sys.argv[4])


def rank() -> int:
    return dist.get_rank()


def values(count: int = SIZE, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank())
    return torch.randint(-9, 9, (count,), generator=generator).to(dtype)


def same_on_both(run: Callable[[str], list[torch.Tensor]]) -> None:
    for ours, gloos in zip(run(DEVICE), run("cpu"), strict=True):
        assert ours.device.type == DEVICE
        assert torch.equal(ours.cpu(), gloos), (ours, gloos)


def missing_wait_raises(start: Callable[[], tuple[Any, torch.Tensor]]) -> None:
    work, output = start()
    with pytest.raises(sim.RaceError, match=r"'(all_reduce|all_gather|send|recv)' on stream"):
        output.add_(1)
    work.wait()
    output.add_(1)
    torch.accelerator.synchronize()


@case
def dry() -> None:
    """Runs first, on an empty device: shapes are kept, and no peer is asked for bytes."""
    sim.enable("64GiB", dry=True)
    output = torch.empty(2 << 30, device=DEVICE)
    dist.all_gather_into_tensor(output, output.chunk(2)[rank()].clone())
    dist.all_reduce(output, async_op=True).wait()
    assert output.shape == (2 << 30,)
    del output
    model = nn.parallel.DistributedDataParallel(nn.Linear(1 << 15, 1 << 15, device=DEVICE))
    for _ in range(2):
        model(torch.zeros(2, 1 << 15, device=DEVICE)).sum().backward()
    del model
    gc.collect()
    sim.enable("1GiB", schedule=SCHEDULE, check_races=True)


# ------------------------------------------------------------------------------------- reductions


@case
def all_reduce() -> None:
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):

        def run(device: str, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
            results = [values(dtype=dtype).to(device) for _ in ops]
            for tensor, op in zip(results, ops, strict=True):
                dist.all_reduce(tensor, op=op)
            return results

        same_on_both(run)


@case
def all_reduce_average() -> None:
    summed, average = values(), values().to(DEVICE)
    dist.all_reduce(summed)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    assert torch.equal(average.cpu(), summed / 2)
    whole = values(dtype=torch.int64).to(DEVICE)
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    assert torch.equal(whole.cpu(), torch.div(summed, 2, rounding_mode="trunc").long())


@case
def sums_of_multiples() -> None:
    dist.all_reduce(summed := values())
    for factor in (0.5, 1.0, torch.full((1,), 2.0, device=DEVICE)):
        scaled = values().to(DEVICE)
        dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(factor))
        assert torch.equal(scaled.cpu(), summed * float(factor))


@case
def all_reduce_coalesced() -> None:
    tensors = [values(seed=seed).to(DEVICE) for seed in range(3)]
    expected = [values(seed=seed) for seed in range(3)]
    for tensor in expected:
        dist.all_reduce(tensor)
    with dist._coalescing_manager(device=torch.device(DEVICE, 0)):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.cpu(), wanted)


@case
def reduce() -> None:
    for root in (0, 1):
        ours, gloos = values().to(DEVICE), values()
        dist.reduce(ours, root)
        dist.reduce(gloos, root)
        assert torch.equal(ours.cpu(), gloos if rank() == root else values())


@case
def reduce_scatter() -> None:
    def run(device: str) -> list[torch.Tensor]:
        listed, whole = torch.empty(6, device=device), torch.empty(6, device=device)
        dist.reduce_scatter(listed, list(values().to(device).chunk(2)))
        dist.reduce_scatter_tensor(whole, values().to(device))
        return [listed, whole]

    same_on_both(run)
    average = torch.empty(6, device=DEVICE)
    dist.reduce_scatter_tensor(average, values().to(DEVICE), op=dist.ReduceOp.AVG)
    assert torch.equal(average.cpu(), run("cpu")[1] / 2)


@case
def coalesced_by_a_manager() -> None:
    def run(device: str) -> list[torch.Tensor]:
        gathered = [torch.empty(2 * SIZE, device=device) for _ in range(2)]
        scattered = [torch.empty(6, device=device) for _ in range(2)]
        if device == "cpu":
            for seed in range(2):
                dist.all_gather_into_tensor(gathered[seed], values(seed=seed))
                dist.reduce_scatter_tensor(scattered[seed], values(seed=seed))
            return gathered + scattered
        sources = [values(seed=seed).to(device) for seed in range(2)]
        with dist._coalescing_manager(device=torch.device(DEVICE, 0), async_ops=True) as work:
            for seed in range(2):
                dist.all_gather_into_tensor(gathered[seed], sources[seed])
        work.wait()
        with dist._coalescing_manager(device=torch.device(DEVICE, 0)):
            for seed in range(2):
                dist.reduce_scatter_tensor(scattered[seed], sources[seed])
        return gathered + scattered

    same_on_both(run)


# ----------------------------------------------------------------------------------------- moves


@case
def broadcast() -> None:
    def run(device: str) -> list[torch.Tensor]:
        results = [values().to(device), values(dtype=torch.uint8).to(device)]
        for root, tensor in enumerate(results):
            dist.broadcast(tensor, root)
        return results

    same_on_both(run)


@case
def all_gather() -> None:
    def run(device: str) -> list[torch.Tensor]:
        source = values().to(device)
        listed = [torch.empty(SIZE, device=device) for _ in range(2)]
        whole = torch.empty(2 * SIZE, device=device)
        in_place = torch.zeros(2 * SIZE, device=device)
        in_place.chunk(2)[rank()].copy_(source)
        dist.all_gather(listed, source)
        dist.all_gather_into_tensor(whole, source)
        dist.all_gather_into_tensor(in_place, in_place.chunk(2)[rank()])
        return [*listed, whole, in_place]

    same_on_both(run)


@case
def values_are_moved_between_tensors_of_other_shapes_as_by_nccl() -> None:
    source = values().to(DEVICE).view(2, -1)
    listed = [torch.empty(SIZE) for _ in range(2)]
    dist.all_gather(listed, values())
    for shape in ((2 * SIZE,), (4, SIZE // 2)):
        dist.all_gather_into_tensor(whole := torch.empty(shape, device=DEVICE), source)
        assert torch.equal(whole.cpu().flatten(), torch.cat(listed))
    dist.reduce_scatter_tensor(part := torch.empty(SIZE // 2, device=DEVICE), source)
    assert torch.equal(part.cpu(), sum(listed).chunk(2)[rank()])
    one = torch.tensor(rank() + 1.0, device=DEVICE)
    dist.all_gather_into_tensor(numbers := torch.empty(2, device=DEVICE), one)
    assert numbers.tolist() == [1.0, 2.0]


@case
def gather_and_scatter() -> None:
    def run(device: str) -> list[torch.Tensor]:
        source = values().to(device)
        parts = [torch.zeros(SIZE, device=device) for _ in range(2)]
        dist.gather(source, parts if rank() == 1 else None, dst=1)
        target = torch.empty(6, device=device)
        dist.scatter(target, list(source.chunk(2)) if rank() == 0 else None, src=0)
        return [*parts, target]

    same_on_both(run)


@case
def all_to_all() -> None:
    def run(device: str) -> list[torch.Tensor]:
        source = values().to(device)
        even = torch.empty(SIZE, device=device)
        dist.all_to_all_single(even, source)
        kept, given = (4, 8) if rank() == 0 else (5, 7)
        sizes = [kept, given] if rank() == 0 else [given, kept]
        received = [4, 7] if rank() == 0 else [8, 5]
        uneven = torch.empty(sum(received), device=device)
        dist.all_to_all_single(uneven, source, received, sizes)
        listed = [torch.empty(6, device=device) for _ in range(2)]
        dist.all_to_all(listed, list(source.chunk(2)))
        return [even, uneven, *listed]

    same_on_both(run)


@case
def send_and_receive() -> None:
    source, target = values(100_000).to(DEVICE), torch.empty(100_000, device=DEVICE)
    expected = torch.empty(100_000)
    peer = 1 - rank()
    works = [dist.isend(source, peer), dist.irecv(target, peer)]  # both send first
    for work in works:
        work.wait()
    works = [dist.isend(source.cpu(), peer), dist.irecv(expected, peer)]
    for work in works:
        work.wait()
    assert torch.equal(target.cpu(), expected)
    target.zero_()
    ops = [dist.P2POp(dist.isend, source, peer), dist.P2POp(dist.irecv, target, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(target.cpu(), expected)
    if rank() == 0:
        dist.send(source, 1)
    else:
        assert dist.recv(target) == 0
        assert torch.equal(target.cpu(), expected)


@case
def barrier_and_objects() -> None:
    dist.barrier()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank()})
    assert found == [{"rank": 0}, {"rank": 1}]


# --------------------------------------------------------------------------------------- streams


@case
def missing_waits() -> None:
    def reduced() -> tuple[Any, torch.Tensor]:
        tensor = values().to(DEVICE)
        return dist.all_reduce(tensor, async_op=True), tensor

    def gathered() -> tuple[Any, torch.Tensor]:
        output = torch.empty(2 * SIZE, device=DEVICE)
        return dist.all_gather_into_tensor(output, values().to(DEVICE), async_op=True), output

    def overwritten() -> tuple[Any, torch.Tensor]:
        source, output = values().to(DEVICE), torch.empty(2 * SIZE, device=DEVICE)
        return dist.all_gather_into_tensor(output, source, async_op=True), source

    def exchanged() -> tuple[Any, torch.Tensor]:
        target = torch.empty(SIZE, device=DEVICE)
        if rank() == 0:
            return dist.irecv(target, 1), target
        return dist.isend(target.zero_(), 0), target

    for start in (reduced, gathered, overwritten, exchanged):
        missing_wait_raises(start)
    work, tensor = reduced()
    other = torch.Stream(device=DEVICE)
    with other:
        work.wait()  # orders the other stream, and that one alone
        tensor.add_(1)
    with pytest.raises(sim.RaceError, match="aten::add"):
        tensor.add_(1)
    torch.accelerator.current_stream().wait_stream(other)


@case
def issuing_sees_finished_inputs() -> None:
    lane = torch.Stream(device=DEVICE)
    tensor = torch.zeros(SIZE, device=DEVICE)
    lane.wait_stream(torch.accelerator.current_stream())
    with lane:
        tensor.add_(rank() + 1)
    with pytest.raises(sim.RaceError, match="'all_reduce'"):
        dist.all_reduce(tensor)
    torch.accelerator.current_stream().wait_stream(lane)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * SIZE


@case
def order_without_waits() -> None:
    """Collectives of one group follow each other, and a synchronisation waits for them all."""
    tensor = torch.ones(SIZE, device=DEVICE)
    for _ in range(5):
        dist.all_reduce(tensor, async_op=True)
    torch.accelerator.synchronize()
    assert tensor.tolist() == [32.0] * SIZE
    for _ in range(20):  # dropped with their tensors: memory is reused without a race
        dist.all_reduce(torch.ones(SIZE, device=DEVICE), async_op=True)
    torch.accelerator.synchronize()


@case
def futures() -> None:
    tensor = torch.full((SIZE,), float(rank()), device=DEVICE)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    (result,) = future.wait()
    assert result.add(1).tolist() == [2.0] * SIZE


# ------------------------------------------------------------------------------------ frameworks


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def train(model: nn.Module, device: str) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    generator = torch.Generator().manual_seed(rank())
    losses = []
    for _ in range(3):
        x = torch.randn(6, 8, generator=generator).to(device)
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in model.parameters()]
    return losses + whole


def sharded(device: str, shape: tuple[int, ...] = (2,), **options: Any) -> nn.Module:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    model = Tiny().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def trains_as_on_the_host(make: Callable[[str], nn.Module]) -> None:
    for ours, hosts in zip(train(make(DEVICE), DEVICE), train(make("cpu"), "cpu"), strict=True):
        assert torch.equal(ours, hosts), (ours - hosts).abs().max()


@case
def dtensor() -> None:
    def run(device: str) -> list[torch.Tensor]:
        mesh = init_device_mesh(device, (2,))
        whole = torch.arange(64.0).reshape(8, 8)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        product = (rows @ columns).redistribute(mesh, [Replicate()])
        return [columns.to_local(), columns.full_tensor(), product.to_local()]

    same_on_both(run)


@case
def fsdp2() -> None:
    trains_as_on_the_host(sharded)


@case
def fsdp2_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    trains_as_on_the_host(lambda device: sharded(device, mp_policy=policy))


@case
def fsdp2_cpu_offload() -> None:
    model = sharded(DEVICE, offload_policy=CPUOffloadPolicy())
    losses = train_offloaded(model)
    expected = train(sharded("cpu"), "cpu")[:3]
    assert all(torch.equal(*pair) for pair in zip(losses, expected, strict=True))


def train_offloaded(model: nn.Module) -> list[torch.Tensor]:
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    return train(model, DEVICE)[:3]


@case
def hsdp() -> None:
    for shape in ((2, 1), (1, 2)):
        trains_as_on_the_host(lambda device, shape=shape: sharded(device, shape))


@case
def ddp() -> None:
    trains_as_on_the_host(lambda device: nn.parallel.DistributedDataParallel(Tiny().to(device)))


@case_of_four
def groups_of_some_ranks() -> None:
    def run(device: str) -> list[torch.Tensor]:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("rows", "columns"))
        results = []
        for name in ("rows", "columns"):
            group = mesh.get_group(name)
            summed = values().to(device)
            dist.all_reduce(summed, group=group)
            gathered = torch.empty(2 * SIZE, device=device)
            dist.all_gather_into_tensor(gathered, values(seed=1).to(device), group=group)
            scattered = torch.empty(SIZE // 2, device=device)
            dist.reduce_scatter_tensor(scattered, values(seed=2).to(device), group=group)
            results += [summed, gathered, scattered]
        return results

    same_on_both(run)


@case_of_four
def dtensor_on_a_mesh() -> None:
    def run(device: str) -> list[torch.Tensor]:
        mesh = init_device_mesh(device, (2, 2))
        blocks = distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(0), Shard(1)])
        columns = blocks.redistribute(mesh, [Shard(1), Shard(1)])
        product = (blocks.t() @ blocks).redistribute(mesh, [Replicate(), Shard(0)])
        return [blocks.to_local(), columns.to_local(), product.to_local(), product.full_tensor()]

    same_on_both(run)


@case_of_four
def four_shards() -> None:
    trains_as_on_the_host(lambda device: sharded(device, (4,)))


@case_of_four
def two_replicas_of_two_shards() -> None:
    trains_as_on_the_host(lambda device: sharded(device, (2, 2)))


@case_of_four
def four_replicas() -> None:
    trains_as_on_the_host(lambda device: nn.parallel.DistributedDataParallel(Tiny().to(device)))


def main(own_rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    sim.enable("1GiB", schedule=SCHEDULE, check_races=True, device=DEVICE)
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group(
        f"cpu:gloo,{DEVICE}:{BACKEND}", store=store, rank=own_rank, world_size=NUM_RANKS
    )
    {2: case, 4: case_of_four}[NUM_RANKS].run(folder / f"outcomes{own_rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[5]))
