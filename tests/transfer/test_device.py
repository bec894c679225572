"""The seam answers with an accelerator and without one."""

import pytest
import torch

from residency import _device, _pinned
from residency._transfer import _slab


def test_the_figures_move_with_an_allocation(device):
    before = _device.memory_allocated(device)
    _device.reset_peak(device)
    tensor = torch.empty(1024, dtype=torch.uint8, device=device)
    assert _device.memory_allocated(device) == before + 1024
    del tensor
    assert _device.max_memory_allocated(device) == before + 1024
    free, total = _device.memory_info(device)
    assert 0 < free <= total


def test_memory_is_read_when_backward_has_let_go_of_it(device):
    held = set()
    for _ in range(2000):  # without the wait, up to 5 % of the readings have a tensor more
        x = torch.ones(64, device=device, requires_grad=True)
        gradient = torch.autograd.grad((x * 2).sum(), [x])
        del x, gradient
        _device.finish_backward(device)
        held.add(_device.memory_allocated(device))
    assert len(held) == 1


def test_there_is_an_answer_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(_device, "accelerator", lambda: None)
    assert not _device.is_pinning_available()
    assert not _pinned.allocate_pinned(64).is_pinned()
    assert _device.memory_allocated() == _device.max_memory_allocated() == 0
    assert _device.memory_info() == (0, 0)
    _device.reset_peak()
    _device.synchronize()
    _pinned.release_pinned_cache()


def test_only_cuda_takes_a_limit(device):
    if device.type != "cuda":
        assert not _device.limit_memory(1 << 30, device)


@pytest.fixture
def deterministic():
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_host_memory_of_our_own_is_not_filled_in_deterministic_mode(device, deterministic):
    for pages in (lambda: _pinned.allocate_pinned(1 << 16), lambda: _slab.Slab(1 << 16).data):
        pages().fill_(7)
        assert (pages() == 7).all()  # the block that was just freed, as it was
    loose = _slab.Slab(1 << 16, pin=False).data  # new pages, which the system has cleared
    assert loose.tolist() != [255] * (1 << 16)
    assert torch.utils.deterministic.fill_uninitialized_memory  # the caller's, of all threads


def test_what_nobody_fills_is_a_tensor_like_others(device):
    before = _device.memory_allocated(device)
    for num_bytes in (0, 1, 4096):
        for place in (torch.device("cpu"), device):
            made = _device.unfilled_bytes(num_bytes, place)
            assert (made.shape, made.dtype, made.device) == ((num_bytes,), torch.uint8, place)
            assert made.untyped_storage().nbytes() == num_bytes
            assert not made.is_pinned()
    assert _device.unfilled_bytes(64, torch.device("cpu"), pin=True).is_pinned()
    made = _device.unfilled_bytes(4096, device)
    assert _device.memory_allocated(device) == before + 4096
    with pytest.raises(torch.OutOfMemoryError):
        _device.unfilled_bytes(1 << 60, device)
    assert _device.memory_allocated(device) == before + 4096
