"""Runs every case of tests/transfer/test_page_locking.py in one process, on CUDA or the simulated
accelerator in its place: for CUDA alone memory is mapped and registered here.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from worker_cases import Cases, take_device

import residency
from residency import _device, _pinned
from residency._transfer import SlabArena, copy_on, lanes_of

case = Cases()
MIB = 1 << 20
SIZE = 4 * MIB
_pinned._LEAST_MAPPED_BYTES = MIB  # so that a test's memory is
device = torch.device("cuda", 0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def load(there: torch.Tensor, data: torch.Tensor) -> None:
    """Queues a copy to the device, for which the current stream waits."""
    lanes, current = lanes_of(device), _device.current_stream(device)
    _device.wait_event(lanes.h2d, lanes.mark(current))
    copy_on(lanes.h2d, [(there, data)])
    _device.wait_event(current, lanes.mark(lanes.h2d))


@case
def a_range_begins_at_a_large_page_and_is_page_locked() -> None:
    data = _pinned.allocate_pinned(SIZE)
    assert data.shape == (SIZE,)
    assert data.data_ptr() % (2 * MIB) == 0
    assert data.is_pinned()
    assert data[SIZE // 2 :].is_pinned()
    with mock.patch.object(_device, "register_host", side_effect=AssertionError):
        assert _pinned.allocate_pinned(MIB // 2).is_pinned()  # torch's


@case
def copies_through_it_bring_the_bytes_and_do_not_wait() -> None:
    data = _pinned.allocate_pinned(SIZE)
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    data.copy_(source)
    there = torch.empty(SIZE, dtype=torch.uint8, device=device)
    back = _pinned.allocate_pinned(SIZE)
    lanes = lanes_of(device)
    _device.wait_event(lanes.h2d, lanes.mark(_device.current_stream(device)))
    copy_on(lanes.h2d, [(there, data)])
    _device.wait_event(lanes.d2h, lanes.mark(lanes.h2d))
    copy_on(lanes.d2h, [(back, there)])
    lanes.synchronize()
    assert torch.equal(back, source)


@case
def a_range_that_a_queued_copy_uses_is_not_had_again_before_it_ended() -> None:
    _pinned.release_pinned_cache()
    there = torch.zeros(SIZE, dtype=torch.uint8, device=device)
    data = _pinned.allocate_pinned(SIZE)
    address = data.data_ptr()
    data.fill_(7)
    load(there, data)
    del data
    again = _pinned.allocate_pinned(SIZE)
    assert again.data_ptr() == address
    again.fill_(9)
    torch.accelerator.synchronize()
    assert there.unique().tolist() == [7]


@case
def a_range_that_a_queued_copy_uses_is_not_given_back_before_it_ended() -> None:
    there = torch.zeros(SIZE, dtype=torch.uint8, device=device)
    data = _pinned.allocate_pinned(SIZE)
    data.fill_(7)
    load(there, data)
    del data
    other = _pinned.allocate_pinned(2 * SIZE)  # of another size: the first one goes
    assert other.is_pinned()
    torch.accelerator.synchronize()
    assert there.unique().tolist() == [7]


@case
def what_is_freed_goes_back_to_the_system() -> None:
    _pinned.release_pinned_cache()
    before = resident_bytes()
    data = _pinned.allocate_pinned(64 * MIB)
    data.fill_(1)
    assert resident_bytes() - before > 60 * MIB
    del data
    _pinned.give_back_pinned(64 * MIB)
    assert resident_bytes() - before < 4 * MIB


@case
def a_tensor_over_a_part_keeps_the_range() -> None:
    data = _pinned.allocate_pinned(SIZE)
    part = data[MIB : MIB + 100]
    part.fill_(3)
    del data
    gc.collect()
    _pinned.release_pinned_cache()
    assert part.is_pinned()
    assert part.unique().tolist() == [3]


@case
def a_forked_child_ends_and_leaves_the_range_to_its_parent() -> None:
    data = _pinned.allocate_pinned(SIZE)
    data.fill_(5)
    child = os.fork()
    if child == 0:
        try:
            del data
            gc.collect()
            _pinned.give_back_pinned(0)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    there = torch.empty(SIZE, dtype=torch.uint8, device=device)
    there.copy_(data, non_blocking=True)
    torch.accelerator.synchronize()
    assert there.unique().tolist() == [5]


@case
def where_the_driver_refuses_torch_page_locks() -> None:
    _pinned.release_pinned_cache()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("residency").addHandler(handler)
    try:
        with mock.patch.object(_device, "register_host", return_value=False):
            data = _pinned.allocate_pinned(SIZE)
    finally:
        logging.getLogger("residency").removeHandler(handler)
    assert data.is_pinned()
    assert "did not page-lock 4.00 MiB in large pages" in heard[0]


@case
def a_range_that_is_registered_already_is_refused_and_leaves_no_error() -> None:
    data = _pinned.allocate_pinned(SIZE)
    assert not _device.register_host(data.data_ptr(), SIZE)
    assert torch.ones(3, device=device).sum().item() == 3


@case
def without_another_thread_the_caller_touches_all_pages() -> None:
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread")):
        data = _pinned.allocate_pinned(SIZE)
    assert data.is_pinned()


@case
def where_nothing_can_be_mapped_the_error_is_that_of_torch() -> None:
    _pinned.release_pinned_cache()
    with (
        mock.patch("mmap.mmap", side_effect=OSError("no memory")),
        mock.patch.object(_device, "unfilled_bytes", side_effect=RuntimeError("torch, too")),
        pytest.raises(residency.RefusedError, match="could not be page-locked"),
    ):
        SlabArena().reserve([SIZE])


@case
def an_optimizer_whose_state_lies_there_steps_as_the_plain_one() -> None:
    results = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_offloaded:
            residency.offload_optimizer(optimizer, bucket="1MiB")
        for seed in range(4):
            data = torch.randn(8, 512, generator=torch.Generator().manual_seed(seed))
            model(data.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if is_offloaded:
            residency.park(model)
            residency.unpark(model)
            residency.onload_optimizer(optimizer)
        results.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


@case
def a_save_through_it_holds_the_moment_of_the_call() -> None:
    weights = torch.randn(1 << 20, device=device)
    right = weights.cpu()
    with tempfile.TemporaryDirectory() as folder:
        with residency.Checkpointer(folder) as checkpointer:
            for step in range(3):
                save = checkpointer.save(step, {"weights": weights})
                with residency.mutating(weights):
                    weights.add_(1)
                save.wait()
        found = {"weights": torch.zeros_like(weights)}
        residency.Checkpointer(folder).restore(found, step=0, rng=False)
    assert torch.equal(found["weights"].cpu(), right)


def main(folder: Path) -> None:
    take_device("1GiB", face="cuda", check_races=True, schedule="late")
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
