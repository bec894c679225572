"""The copy streams of a device: each is one for all threads, and leaves each on its own stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import residency
from residency import _device, sim
from residency._transfer import Slab, _lanes, copy_on, copy_out, lanes_of

SECONDS = 60


def test_lanes_are_made_once_per_device(device):
    assert lanes_of(device) is lanes_of(device)
    assert lanes_of(device).h2d.stream_id != lanes_of(device).d2h.stream_id


# What uses a lane: each makes what it needs, and returns the use.


def _step(device, tmp_path) -> Callable[[], Any]:
    parameter = torch.nn.Parameter(torch.ones(512, device=device))
    optimizer = residency.offload_optimizer(torch.optim.AdamW([parameter]))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.step


def _snapshot(device, tmp_path) -> Callable[[], Any]:
    tree = {"weight": torch.ones(512, device=device)}
    return lambda: residency.snapshot(tree)


def _save(device, tmp_path) -> Callable[[], Any]:
    tree = {"weight": torch.ones(512, device=device)}
    checkpointer = residency.Checkpointer(tmp_path / threading.current_thread().name)

    def save() -> None:
        with checkpointer:
            checkpointer.save(1, tree)

    return save


def _restore(device, tmp_path) -> Callable[[], Any]:
    tree = {"weight": torch.ones(512, device=device)}
    checkpointer = residency.Checkpointer(tmp_path / threading.current_thread().name)
    checkpointer.save(1, tree)
    checkpointer.wait()

    def restore() -> None:
        with checkpointer:
            checkpointer.restore(tree, rng=False)

    return restore


def _park(device, tmp_path) -> Callable[[], Any]:
    module = torch.nn.Linear(64, 8, device=device)
    return lambda: residency.park(module)


def _unpark(device, tmp_path) -> Callable[[], Any]:
    module = torch.nn.Linear(64, 8, device=device)
    residency.park(module)
    return lambda: residency.unpark(module)


def _unpark_of_what_is_not_where_it_was(device, tmp_path) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(
        [torch.nn.Parameter(torch.ones(64, device=device))], lr=0.1, momentum=0.9
    )
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    residency.park(optimizer)
    optimizer.state[parameter]["momentum_buffer"].data = torch.ones(64)
    return lambda: residency.unpark(optimizer)


USES = (_step, _snapshot, _save, _restore, _park, _unpark, _unpark_of_what_is_not_where_it_was)


@pytest.mark.parametrize("prepare", USES, ids=lambda use: use.__name__.strip("_"))
def test_threads_that_are_in_a_lane_at_once_leave_on_their_own_streams(
    device, tmp_path, monkeypatch, prepare
):
    """The thread that enters last leaves last, and has another stream than the first."""
    lanes = {lanes_of(device).h2d.stream_id, lanes_of(device).d2h.stream_id}
    ready, is_first_in, is_second_in, is_first_out = (threading.Event() for _ in range(4))
    found: dict[str, tuple[int, int]] = {}
    errors = []
    copy = torch._foreach_copy_

    def copy_together(*args: Any, **options: Any) -> None:
        if ready.is_set() and _device.current_stream(device).stream_id in lanes:
            if threading.current_thread().name == "first":
                is_first_in.set()
                assert is_second_in.wait(SECONDS)
            else:
                is_second_in.set()
                assert is_first_out.wait(SECONDS)
        copy(*args, **options)

    def run(is_first: bool) -> None:
        own = _device.new_stream(device)
        torch.accelerator.set_stream(own)
        use = prepare(device, tmp_path)
        torch.accelerator.synchronize()
        if is_first:
            assert prepared.wait(SECONDS)
            ready.set()
        else:
            prepared.set()
            assert is_first_in.wait(SECONDS)
        use()
        found[threading.current_thread().name] = (
            own.stream_id,
            _device.current_stream(device).stream_id,
        )
        torch.accelerator.set_stream(own)
        torch.accelerator.synchronize()

    def run_and_tell(is_first: bool) -> None:
        try:
            run(is_first)
        except BaseException as error:
            errors.append(str(error))
        finally:
            (is_first_out if is_first else is_second_in).set()

    prepared = threading.Event()
    monkeypatch.setattr(torch, "_foreach_copy_", copy_together)
    threads = [
        threading.Thread(target=run_and_tell, args=(name == "first",), name=name)
        for name in ("first", "second")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert all(after == own for own, after in found.values())
    assert (len(found), errors) == (2, [])


def test_an_error_in_a_lane_leaves_the_thread_on_its_own_stream(device):
    before = _device.current_stream(device).stream_id
    slot, slab = torch.empty(512, dtype=torch.uint8, device=device), Slab(512, pin=True)
    with pytest.raises(RuntimeError):
        copy_on(lanes_of(device).h2d, [(slot, slab.data[:256])])
    assert _device.current_stream(device).stream_id == before


MIB = 1 << 20


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lanes, "_IS_IN_TURN", True)


@pytest.mark.parametrize("sizes", [[1], [0, 5, 0], [100, 3, 700], [1000], [2048, 1, 2047, 4096]])
def test_copies_that_take_turns_bring_all_bytes_and_come_before_what_follows(
    device, in_turn, monkeypatch, sizes
):
    monkeypatch.setattr(_lanes, "_CHUNK_BYTES", 512)
    lanes = lanes_of(device)
    sources = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    there = [source.to(device) for source in sources]
    found = [torch.zeros(n, dtype=torch.uint8, pin_memory=True) for n in sizes]
    _device.wait_event(lanes.d2h, lanes.mark(_device.current_stream(device)))
    copy_out(lanes, zip(found, there, strict=True))
    lanes.mark(lanes.d2h).synchronize()
    assert all(map(torch.equal, found, sources))
    lanes.synchronize()


@pytest.mark.sim
@pytest.mark.parametrize("serves_ready", [False, True])
@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_number_that_is_read_waits_for_one_chunk_where_the_engine_serves_what_is_ready(
    monkeypatch, serves_ready, takes_turns
):
    rate = 1 << 30
    clock = sim.Clock(d2h_bytes_per_second=rate, serves_ready=serves_ready)
    device = sim.enable("1GiB", clock=clock)
    monkeypatch.setattr(_lanes, "_IS_IN_TURN", takes_turns)
    source = torch.zeros(256 * MIB, dtype=torch.uint8, device=device)
    target = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    number = torch.ones((), device=device)
    number.item()
    lanes = lanes_of(device)
    _device.wait_event(lanes.d2h, lanes.mark(_device.current_stream(device)))
    before = torch.Event(device=device, enable_timing=True)
    after = torch.Event(device=device, enable_timing=True)
    before.record()
    copy_out(lanes, [(target, source)])
    number.item()
    after.record()
    milliseconds = before.elapsed_time(after)
    lanes.synchronize()
    chunk, whole = (1e3 * size / rate for size in (_lanes._CHUNK_BYTES, 256 * MIB))
    if serves_ready and takes_turns:
        assert milliseconds <= 1.01 * chunk
    else:
        assert milliseconds >= whole
