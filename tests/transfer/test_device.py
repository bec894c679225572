"""The seam answers with an accelerator and without one."""

import torch

from residency import _device


def test_the_figures_move_with_an_allocation(device):
    before = _device.memory_allocated(device)
    _device.reset_peak(device)
    tensor = torch.empty(1024, dtype=torch.uint8, device=device)
    assert _device.memory_allocated(device) == before + 1024
    del tensor
    assert _device.max_memory_allocated(device) == before + 1024
    free, total = _device.memory_info(device)
    assert 0 < free <= total


def test_there_is_an_answer_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(_device, "accelerator", lambda: None)
    assert not _device.is_pinning_available()
    assert not _device.allocate_pinned(64).is_pinned()
    assert _device.memory_allocated() == _device.max_memory_allocated() == 0
    assert _device.memory_info() == (0, 0)
    _device.reset_peak()
    _device.synchronize()
    _device.release_pinned_cache()


def test_only_cuda_takes_a_limit(device):
    if device.type != "cuda":
        assert not _device.limit_memory(1 << 30, device)
