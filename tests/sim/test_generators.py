"""The device's generators: two numbers are their whole state, as on CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, randn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from residency import sim

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    yield sim.enable("1GiB", schedule="late")
    torch.accelerator.synchronize()


def _draw(generator: torch.Generator | None = None) -> list[list[float]]:
    x = torch.randn(300, device="sim", generator=generator)
    return [
        x.tolist(),
        torch.empty(3, device="sim").normal_(generator=generator).tolist(),
        torch.randperm(9, device="sim", generator=generator).tolist(),
        torch.multinomial(x.abs(), 4, generator=generator).tolist(),
    ]


def test_a_state_is_a_seed_and_an_offset() -> None:
    torch.sim.manual_seed(5)
    state = torch.sim.get_rng_state()
    assert state.view(torch.int64).tolist() == [5, 0]
    torch.randn(7, device="sim")
    assert torch.sim.get_rng_state().view(torch.int64).tolist() == [5, 4]


def test_the_same_state_gives_the_same_numbers_whatever_was_drawn_before() -> None:
    generator = torch.Generator("sim").manual_seed(3)
    torch.randn(5, device="sim", generator=generator)
    state = generator.get_state()
    first = _draw(generator)
    assert _draw(generator) != first
    generator.set_state(state)
    assert torch.equal(generator.get_state(), state)
    assert _draw(generator) == first
    other = torch.Generator("sim").manual_seed(3)
    other.set_offset(generator.get_offset())
    assert _draw(other) == _draw(generator)


def test_every_operation_moves_the_offset_in_fours() -> None:
    generator = torch.Generator("sim").manual_seed(3)
    seen = [generator.get_offset()]
    for num_elements in (1, 5, 100_000, 2_000_000):
        torch.rand(num_elements, device="sim", generator=generator)
        seen.append(generator.get_offset())
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert steps == [4, 4, 4, 12]  # as CUDA's do: the last fill takes three rounds of its threads
    with pytest.raises(RuntimeError, match="multiple of 4"):
        generator.set_offset(2)


def test_neighbouring_offsets_and_seeds_have_numbers_of_their_own() -> None:
    drawn = set()
    for seed in range(8):
        generator = torch.Generator("sim").manual_seed(seed)
        for _ in range(8):
            drawn.add(torch.rand(1, device="sim", generator=generator).item())
    assert len(drawn) == 64


def test_a_state_of_another_size_is_refused_and_changes_nothing() -> None:
    before = torch.sim.get_rng_state()
    with pytest.raises(RuntimeError, match="found 5056 bytes, expected 16"):
        torch.sim.set_rng_state(torch.get_rng_state())
    assert torch.equal(torch.sim.get_rng_state(), before)


def test_generators_can_share_a_state() -> None:
    first, second = torch.Generator("sim").manual_seed(1), torch.Generator("sim")
    second.graphsafe_set_state(first.graphsafe_get_state())
    a = torch.rand(4, device="sim", generator=first).tolist()
    b = torch.rand(4, device="sim", generator=second).tolist()
    assert a != b
    assert first.get_offset() == second.get_offset() == 8
    copy = first.clone_state()
    torch.rand(4, device="sim", generator=first)
    assert copy.get_offset() == 8


def test_attention_drops_the_same_weights_in_its_backward() -> None:
    def gradient() -> torch.Tensor:
        torch.manual_seed(2)
        q = torch.ones(1, 2, 6, 8, device="sim", requires_grad=True)
        values = torch.arange(96.0, device="sim").reshape(1, 2, 6, 8)
        output = nn.functional.scaled_dot_product_attention(q, q, values, dropout_p=0.5)
        torch.randn(100, device="sim")  # what comes between changes nothing
        output.sum().backward()
        assert q.grad is not None
        return torch.cat([output.detach(), q.grad]).cpu()

    assert torch.equal(gradient(), gradient())


@pytest.mark.parametrize(
    ("kernel", "steps"),
    [
        ("FLASH_ATTENTION", 2 * 3 * 32),  # a number for each lane of a warp, for each head
        ("EFFICIENT_ATTENTION", 2 * 3 * 7 * 7 + 2),  # for each weight, in fours
        ("CUDNN_ATTENTION", 2 * 3 * 7 * 7 + 2),
    ],
)
def test_attention_moves_the_generator_as_far_as_its_kernel_does(kernel: str, steps: int) -> None:
    query = torch.ones(2, 3, 7, 8, device="sim", dtype=torch.float16)
    torch.sim.manual_seed(1)
    with sdpa_kernel(SDPBackend.__members__[kernel]):
        nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert torch.sim.get_rng_state()[8:].view(torch.int64).item() == steps


def test_a_fork_of_the_random_state_leaves_it_where_it_was() -> None:
    before = torch.sim.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.randn(100, device="sim")
        assert not torch.equal(torch.sim.get_rng_state(), before)
    assert torch.equal(torch.sim.get_rng_state(), before)


def test_dropout_draws_from_the_device_and_not_from_the_hosts_generator() -> None:
    ones, host = torch.ones(5000, device="sim"), torch.get_rng_state()
    torch.sim.manual_seed(3)
    first = nn.functional.dropout(ones, 0.25)
    assert torch.sim.get_rng_state().view(torch.int64).tolist() == [3, 4]
    second = nn.functional.dropout(ones, 0.25)
    assert not torch.equal(first, second)
    torch.sim.manual_seed(3)
    output, mask = torch.native_dropout(ones, 0.25, True)
    assert torch.equal(output, first)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, output > 0)
    state = torch.sim.get_rng_state()
    for probability, train in ((0.5, False), (1.0, True)):  # draw nothing, as on CUDA
        output, mask = torch.native_dropout(ones, probability, train)
        assert torch.equal(output, ones * (1 - probability if train else 1))
        assert torch.equal(mask, output.bool())
    assert torch.equal(torch.sim.get_rng_state(), state)
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(3)
    assert torch.equal(nn.functional.dropout(ones.cpu(), 0.25), first.cpu())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_dropout_drops_the_same(use_reentrant: bool) -> None:
    outputs = []

    def run(x: torch.Tensor) -> torch.Tensor:
        outputs.append(nn.functional.dropout(x, 0.5) + torch.rand(64, device="sim"))
        return outputs[-1] * x

    x = torch.ones(64, device="sim", requires_grad=True)
    result = checkpoint(run, x, use_reentrant=use_reentrant)
    torch.randn(100, device="sim")  # what comes between changes nothing
    result.sum().backward()
    first, second = (output.detach().cpu() for output in outputs)
    assert torch.equal(first, second)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("cpu:gloo,sim:simccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("sim", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_draw_random_numbers(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    first = randn(8, 8, device_mesh=mesh, placements=[Shard(0)])
    second = randn(8, 8, device_mesh=mesh, placements=[Shard(0)])
    torch.manual_seed(0)
    again = randn(8, 8, device_mesh=mesh, placements=[Shard(0)])
    assert torch.equal(first.to_local().cpu(), again.to_local().cpu())
    assert not torch.equal(first.to_local().cpu(), second.to_local().cpu())
    weight = distribute_tensor(torch.zeros(64, 64, device="sim"), mesh, [Shard(0)])
    nn.init.normal_(weight)
    assert 0.9 < weight.to_local().std().item() < 1.1
    dropped = nn.functional.dropout(distribute_tensor(torch.ones(64, device="sim"), mesh), 0.5)
    assert isinstance(dropped, DTensor)
    assert set(dropped.to_local().tolist()) == {0.0, 2.0}


def test_a_sharded_model_is_initialised_on_the_device(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        layer = nn.Linear(32, 32)
    fully_shard(layer, mesh=mesh)
    layer.to_empty(device="sim")
    torch.manual_seed(0)
    layer.reset_parameters()
    first = layer.weight.full_tensor().cpu()
    layer.reset_parameters()
    assert not torch.equal(layer.weight.full_tensor().cpu(), first)
    torch.manual_seed(0)
    layer.reset_parameters()
    assert torch.equal(layer.weight.full_tensor().cpu(), first)
    assert 0 < first.abs().max() <= 32**-0.5
