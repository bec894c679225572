"""Sparse gradients on the device: stock torch on the host is the judge, and dry mode's memory."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from residency import sim
from residency_sim import dry_run

# Torch warns once a process, on the host, too, that it does not check what it is given.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS, WIDTH = 50, 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "sparse adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}


def trained(device: str, seed: int) -> torch.Tensor:
    """Trains a random embedding with sparse gradients, and returns its weights."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    if chance.random() < 0.5:
        mode = chance.choice(["sum", "mean"])
        layer: Any = torch.nn.EmbeddingBag(ROWS, WIDTH, mode=mode, sparse=True)
    else:
        padding = chance.choice([None, 3])
        layer = torch.nn.Embedding(ROWS, WIDTH, padding_idx=padding, sparse=True)
    layer = layer.to(device)
    optimizer = OPTIMIZERS[chance.choice(list(OPTIMIZERS))](layer.parameters())
    num_passes, keeps = chance.randint(1, 2), chance.random() < 0.5
    for _ in range(3):
        optimizer.zero_grad(set_to_none=keeps)
        for _ in range(num_passes):
            ids = torch.randint(ROWS, (4, chance.randint(1, 9))).to(device)
            layer(ids).square().sum().backward()
        if chance.random() < 0.3:
            layer.weight.grad.mul_(0.5)
        optimizer.step()
    weights: torch.Tensor = layer.weight.detach().cpu()
    return weights


@pytest.mark.parametrize("seed", range(24))
def test_random_trainings_with_sparse_gradients_are_those_of_the_host(seed: int) -> None:
    sim.enable("1GiB")
    torch.testing.assert_close(trained("sim", seed), trained("cpu", seed))


@pytest.mark.parametrize("shape", [(6,), (4, 5), (3, 2, 4)])
def test_coalescing_adding_and_multiplying_are_those_of_the_host(shape: tuple[int, ...]) -> None:
    sim.enable("1GiB")
    torch.manual_seed(0)
    indices = torch.stack([torch.randint(size, (9,)) for size in shape])
    host = torch.sparse_coo_tensor(indices, torch.randn(9, 3), (*shape, 3))
    device = torch.sparse_coo_tensor(indices.to("sim"), host._values().to("sim"), host.shape)
    dense = torch.randn(*shape, 3)
    pairs = [
        (device.coalesce(), host.coalesce()),
        (device + device, host + host),
        (device * 3, host * 3),
        (device.coalesce() * dense.to("sim"), host.coalesce() * dense),
        (dense.to("sim").sparse_mask(device.coalesce()), dense.sparse_mask(host.coalesce())),
    ]
    for ours, right in pairs:
        assert ours.device.type == "sim"
        assert ours.is_coalesced() == right.is_coalesced()
        torch.testing.assert_close(ours.to_dense().cpu(), right.to_dense())
    moved = dense.to("sim").add(device, alpha=2)
    torch.testing.assert_close(moved.cpu(), dense.add(host, alpha=2))


def test_what_is_not_modelled_is_refused_by_name() -> None:
    sim.enable("1GiB")
    sparse = torch.eye(4).to_sparse()
    device = torch.sparse_coo_tensor(sparse.indices().to("sim"), sparse.values().to("sim"), (4, 4))
    with pytest.raises(NotImplementedError, match="of sparse tensors"):
        torch.sparse.mm(device, torch.ones(4, 4, device="sim"))


@pytest.mark.parametrize("optimizer", ["sgd", "sparse adam"])
def test_a_step_in_dry_mode_holds_what_one_with_values_holds(optimizer: str) -> None:
    def peak(dry: bool) -> int:
        sim.enable("1GiB", dry=dry)
        layer = torch.nn.Embedding(100_000, 64, sparse=True).to("sim")
        stepped = OPTIMIZERS[optimizer](layer.parameters())
        ids = torch.randperm(100_000)[:2000].to("sim")  # no row twice: dry mode's upper bound
        torch.accelerator.reset_peak_memory_stats()
        layer(ids).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad._nnz() == 2000
        stepped.step()
        most: int = torch.accelerator.max_memory_allocated()
        return most

    assert peak(dry=True) == peak(dry=False)


def test_unknown_values_are_one_where_they_alone_are_asked_for() -> None:
    sim.enable("1GiB", dry=True)
    labels = torch.randn(64, 10, device="sim").argmax(1)
    assert torch.unique(labels).tolist() == [1]
    values, inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    assert (values.numel(), inverse.numel(), counts.numel()) == (64, 64, 64)
    known = (torch.arange(4000) % 19).to("sim")
    assert torch.unique(known).tolist() == list(range(19))
    assert torch.unique(torch.empty(0, device="sim")).numel() == 0


def test_an_observer_hears_of_what_was_guessed_and_not_of_what_is_known() -> None:
    sim.enable("1GiB", dry=True)
    heard: list[tuple[str, int]] = []
    dry_run.attach_guess_observer(lambda what, numel: heard.append((what, numel)))
    try:
        known = torch.arange(64).to("sim")
        known.sum().item()
        assert known[known > 5].cpu()[0] == 6
        assert not heard
        unknown = torch.randn(64, device="sim")
        unknown[unknown > 0].sum().item()
        unknown.cpu()
        torch.unique(unknown)
        torch.repeat_interleave(unknown.long())
        assert {what for what, _ in heard} == {"mask", "1", "one", "repeats"}
    finally:
        dry_run.attach_guess_observer(None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_whole_numbers_have_a_histogram(dtype: torch.dtype) -> None:
    sim.enable("1GiB")
    given = torch.randint(0, 8, (100,), dtype=dtype)
    made = torch.histc(given.to("sim"), 8, 0, 7)
    assert made.dtype == dtype
    assert made.tolist() == torch.bincount(given, minlength=8).tolist()
