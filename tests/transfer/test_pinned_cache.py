"""What torch keeps of freed page-locked memory is everybody's: others find theirs again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import residency
from residency import _device, _pinned, sim
from residency._units import MIB

MOST_LEFT = 64 * MIB


def stats() -> tuple[int, int]:
    """The bytes that torch keeps for whoever asks next, and how often it asked the driver."""
    if torch.accelerator.current_accelerator().type == "cuda":
        # Whoever asks has nothing page-locked by then. Torch 2.11 counts as active what is not.
        found = torch.cuda.host_memory_stats()
        return found.get("allocated_bytes.current", 0), found.get("num_host_alloc", 0)
    found = sim.pinned_memory_stats()
    return found["pinned_bytes.current"] - found["used_bytes.current"], found["num_pinned"]


@pytest.fixture
def kept_bytes(device):
    """The bytes of page-locked memory that torch has for whoever asks next."""
    gc.collect()
    _pinned.release_pinned_cache()
    return lambda: stats()[0]


@contextmanager
def no_wait_for_the_device() -> Iterator[None]:
    def refuse(device=None):
        raise AssertionError("waited for everything on the device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device, "synchronize", refuse)
        yield


def restored(device, tmp_path):
    tree = {"weight": torch.ones(MIB // 4, device=device)}
    checkpointer = residency.Checkpointer(tmp_path)
    checkpointer.save(1, tree).wait()
    return lambda: (checkpointer.restore(tree, rng=False), checkpointer.close())


def onloaded(device, tmp_path):
    parameter = torch.nn.Parameter(torch.ones(MIB // 4, device=device))
    optimizer = residency.offload_optimizer(torch.optim.AdamW([parameter]))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return lambda: residency.onload_optimizer(optimizer)


def followed(device, tmp_path):
    model = torch.nn.Linear(512, 512, device=device)
    optimizer = residency.offload_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 512, device=device)).sum().backward()
    optimizer.step()

    def follow():
        model.to("cpu")
        optimizer.step()

    return follow


@pytest.mark.parametrize("prepare", [restored, onloaded, followed], ids=lambda f: f.__name__)
def test_what_somebody_else_has_freed_stays_for_him(device, tmp_path, prepare, kept_bytes):
    use = prepare(device, tmp_path)
    batch = torch.full((3 * MIB,), 7, dtype=torch.uint8).pin_memory()  # as a DataLoader does
    address = batch.data_ptr()
    del batch
    with no_wait_for_the_device():
        use()
    again = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    assert again.data_ptr() == address
    del again
    assert 4 * MIB <= kept_bytes() <= MOST_LEFT + 4 * MIB


def test_what_is_large_goes_back_to_the_system(device, kept_bytes):
    numel = 10 * MIB  # of which AdamW has two states of 4 bytes
    parameter = torch.nn.Parameter(torch.ones(numel, device=device))
    optimizer = residency.offload_optimizer(torch.optim.AdamW([parameter]), bucket="8MiB")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = parameter.detach().cpu()
    assert optimizer.statistics().pinned_bytes > MOST_LEFT
    with no_wait_for_the_device():
        residency.onload_optimizer(optimizer)
    assert kept_bytes() == 0
    assert torch.equal(parameter.detach().cpu(), state)


def test_restores_one_after_the_other_move_through_the_same_ring(device, tmp_path, kept_bytes):
    tree = {"weight": torch.ones(MIB, device=device)}
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tree).wait()
        checkpointer.restore(tree, rng=False)
        before = stats()
        assert before[0] <= MOST_LEFT
        for _ in range(3):
            checkpointer.restore(tree, rng=False)
        assert stats() == before
