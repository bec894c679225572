"""The classes of device memory: each against what it claims, on random and on recorded traces."""

from __future__ import annotations

import gc
import gzip
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import residency
from residency import _device, memory_state
from residency.types import MemoryState

KIB = 1 << 10
MIB = 1 << 20
CAPACITY = 512 * MIB  # of the simulated device; a real one has its own
LARGE_SEGMENT = 20 * MIB
SMALL_SEGMENT = 2 * MIB

pytestmark = pytest.mark.alone
with_room = pytest.mark.sim_device(capacity=CAPACITY, schedule="late", check_races=False)


def _empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=torch.accelerator.current_accelerator())


def _capacity() -> int:
    """Returns the bytes that the device itself says that it has."""
    return torch.accelerator.get_memory_info()[1]


def _reserved() -> int:
    return torch.accelerator.memory_reserved()


def _given_back() -> int:
    """Empties the cache, and returns by how much the device's own free figure rose."""
    free, reserved = torch.accelerator.get_memory_info()[0], _reserved()
    torch.accelerator.empty_cache()
    given = torch.accelerator.get_memory_info()[0] - free
    assert given == reserved - _reserved()
    return given


def _assert_law(state: MemoryState) -> None:
    """States what `empty_cache` gives back. Frees that drain may also free what lay beside them."""
    given = _given_back()
    if state.draining == 0:
        assert given == state.returnable
    assert state.returnable <= given
    assert state.stuck is not None
    assert given <= state.returnable + state.draining + state.stuck


# ------------------------------------------------------------------------------------ each class


@with_room
def test_the_classes_are_a_partition_of_the_capacity(device: torch.device) -> None:
    tensors = [_empty(3 * MIB), _empty(100 * KIB), _empty(40 * MIB)]
    del tensors[2]
    state = memory_state()
    assert state.held == 3 * MIB + 100 * KIB
    assert state.returnable == 40 * MIB
    assert state.stuck == (LARGE_SEGMENT - 3 * MIB) + (SMALL_SEGMENT - 100 * KIB)
    assert (state.draining, state.pooled) == (0, 0)
    assert state.reserved == _reserved()
    assert state.free == torch.accelerator.get_memory_info()[0]
    assert state.outside == _capacity() - state.free - _reserved()
    assert state.capacity == _capacity() == sum(state.classes().values())  # type: ignore[arg-type]
    assert state.is_returnable_exact
    assert state.notes == ()
    assert state.device == str(device)
    assert state.peak_held == 43 * MIB + 100 * KIB
    _assert_law(state)


@with_room
def test_what_a_stream_still_reads_is_draining_until_it_has_been_read(device: torch.device) -> None:
    lane = torch.Stream(device=device)
    source, sink = _empty(30 * MIB), _empty(30 * MIB)
    with lane:
        sink.copy_(source)
    source.record_stream(lane)
    del source
    state = memory_state()
    assert (state.held, state.draining, state.returnable) == (30 * MIB, 30 * MIB, 0)
    assert _given_back() == 30 * MIB  # which waited for the lane
    assert memory_state().draining == 0


@with_room
def test_what_drains_may_take_what_lies_beside_it_along(device: torch.device) -> None:
    lane = torch.Stream(device=device)
    source, sink = _empty(3 * MIB), _empty(30 * MIB)
    with lane:
        sink[: 3 * MIB].copy_(source)
    source.record_stream(lane)
    del source
    state = memory_state()
    assert state.stuck == LARGE_SEGMENT - 3 * MIB
    assert (state.draining, state.returnable) == (3 * MIB, 0)
    assert _given_back() == LARGE_SEGMENT == state.draining + state.stuck


@with_room
def test_what_private_pools_keep_is_not_returnable(device: torch.device) -> None:
    pool = torch.get_device_module().MemPool()
    with torch.get_device_module().use_mem_pool(pool):
        kept, dropped = _empty(3 * MIB), _empty(40 * MIB)
    del dropped
    cached = _empty(30 * MIB)
    del cached
    state = memory_state()
    assert state.held == 3 * MIB
    assert state.pooled == 40 * MIB + LARGE_SEGMENT - 3 * MIB
    assert (state.returnable, state.stuck) == (30 * MIB, 0)
    assert sum(n or 0 for n in state.classes().values()) == _capacity()
    assert "pooled" in str(state)
    _assert_law(state)
    del kept, pool
    gc.collect()
    assert memory_state().pooled == 0


@with_room
def test_with_expandable_segments_stuck_is_unknown_and_the_table_says_why(
    device: torch.device,
) -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        tensors = [_empty(10 * MIB), _empty(40 * MIB), _empty(10 * MIB)]
        del tensors[1]
        state = memory_state()
        assert state.stuck is None
        assert not state.is_returnable_exact
        assert state.returnable == 40 * MIB  # of which 20 MiB are whole granules
        assert state.reserved == _reserved()
        assert _given_back() == 20 * MIB <= state.returnable
        text = str(memory_state())
        assert "expandable_segments" in text
        assert "unknown" in text
        assert "<=" in text
        del tensors
    finally:
        torch.accelerator.empty_cache()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert memory_state().stuck == 0


@with_room
@pytest.mark.skipif(not _device.tells_settings(), reason="this torch does not tell its settings")
def test_segments_from_before_a_change_of_the_setting_hide_no_expandable_ones(
    device: torch.device,
) -> None:
    plain = [_empty(30 * MIB), _empty(KIB)]
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        grown = _empty(30 * MIB)
        assert memory_state().stuck is None
        del grown
    finally:
        torch.accelerator.empty_cache()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    del plain


SOURCE = str(Path(residency.__file__).parents[1])
NEIGHBOUR = """
import sys, torch
from residency import sim
sim.enable("512MiB", share=sys.argv[1])
held = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device="sim")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.sim
@pytest.mark.sim_device(
    capacity=CAPACITY, schedule="late", check_races=False, share=(NAME := f"t{uuid.uuid4().hex}")
)
def test_outside_is_what_another_process_has_reserved(device: torch.device) -> None:
    ours = _empty(10 * MIB)
    process = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, NAME, str(33 * MIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        state = memory_state()
        assert state.outside == 34 * MIB  # its segment: 33 MiB, rounded up to 2 MiB
        assert state.held == ours.numel()
        assert state.free == CAPACITY - 10 * MIB - 34 * MIB
    finally:
        process.communicate(timeout=60)
    assert memory_state().outside == 0


# ----------------------------------------------------------------------------------- random traces

SIZES = st.one_of(
    st.integers(1, MIB), st.integers(MIB + 1, 10 * MIB), st.integers(10 * MIB, 40 * MIB)
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), SIZES),
        st.tuples(st.just("hold beside"), SIZES),
        st.tuples(st.just("hold in a pool"), SIZES),
        st.tuples(st.just("drop"), st.integers(0, 99)),
        st.tuples(st.just("drop while read"), st.integers(0, 99)),
        st.tuples(st.just("wait"), st.just(0)),
        st.tuples(st.just("measure"), st.just(0)),
    ),
    min_size=2,
    max_size=40,
)


def _play(steps: list[tuple[str, int]], lane: torch.Stream, pool: Any) -> None:
    held: list[torch.Tensor] = []
    for action, number in steps:
        if action.startswith("hold") and sum(t.numel() for t in held) + number > CAPACITY // 4:
            continue
        if action == "hold":
            held.append(_empty(number))
        elif action == "hold beside":
            with lane:
                held.append(_empty(number))
        elif action == "hold in a pool":
            with torch.get_device_module().use_mem_pool(pool):
                held.append(_empty(number))
        elif action.startswith("drop") and held:
            tensor = held.pop(number % len(held))
            if action == "drop while read":
                with lane:
                    tensor.fill_(1)
                tensor.record_stream(lane)
            del tensor
        elif action == "wait":
            torch.accelerator.synchronize()
        elif action == "measure":
            state = memory_state()
            assert sum(n or 0 for n in state.classes().values()) == _capacity()
            _assert_law(state)
    _assert_law(memory_state())


@with_room
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
def test_empty_cache_gives_back_what_is_returnable_on_random_traces(
    lent: tuple[torch.Stream, Any], steps: list[tuple[str, int]]
) -> None:
    _play(steps, *lent)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


@pytest.fixture
def lent(tested_device: torch.device) -> tuple[torch.Stream, Any]:
    """A stream and a private pool for all traces."""
    return torch.Stream(device=tested_device), torch.get_device_module(tested_device).MemPool()


# --------------------------------------------------------------------------------- recorded traces


@pytest.mark.sim
@pytest.mark.sim_device(
    capacity="80GiB", schedule="late", check_races=False, dry=True, workspaces=False
)
def test_empty_cache_gives_back_what_is_returnable_on_recorded_traces(
    device: torch.device, trace_files: list[Path]
) -> None:
    for path in trace_files:
        with gzip.open(path) as file:
            events = json.load(file)["events"]
        held: dict[int, torch.Tensor] = {}
        num_checks = 0
        for number, (action, address, size, _) in enumerate(events):
            if action == "alloc":
                held[address] = _empty(size)
            elif action == "free_completed":
                held.pop(address, None)
            if number % (len(events) // 8) == 0 or number == len(events) - 1:
                state = memory_state()
                assert state.draining == 0
                assert state.held == torch.accelerator.memory_allocated()
                _assert_law(state)
                num_checks += 1
        assert num_checks >= 8, path.name
        held.clear()
        torch.accelerator.empty_cache()


# ---------------------------------------------------------------------------------------- bad input


@with_room
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("xpu:0", "expected an accelerator: this machine's is"),
        ("{type}:77", r"this machine has \d+"),
        ("no such thing", "Invalid device string"),
        ("cpu", "expected an accelerator"),
    ],
)
def test_a_device_that_is_not_there_is_named_in_the_error(
    device: torch.device, name: str, message: str
) -> None:
    with pytest.raises(residency.InvalidArgumentError, match=message):
        memory_state(name.format(type=device.type))


@with_room
@pytest.mark.parametrize("name", ["{type}", "{type}:0", 0])
def test_a_device_may_be_given_as_torch_takes_it(device: torch.device, name: Any) -> None:
    given = name if isinstance(name, int) else name.format(type=device.type)
    assert memory_state(given).device == str(device)


def test_without_an_accelerator_every_figure_is_zero(run_python: Callable[..., str]) -> None:
    text = run_python(
        "import residency\n"
        "state = residency.memory_state()\n"
        "assert set(state.classes().values()) == {0} and state.device is None\n"
        "print(state)\n",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "there is no accelerator" in text


def test_a_search_without_an_accelerator_says_once_why_it_lists_nothing(
    run_python: Callable[..., str],
) -> None:
    text = run_python(
        "import logging, sys, residency\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "assert residency.holders() == residency.holders() == []\n",
        CUDA_VISIBLE_DEVICES="",
    )
    assert text.count("there is no accelerator, so holders() lists nothing") == 1


@pytest.mark.sim
@with_room
def test_the_table_of_a_state_is_aligned(device: torch.device) -> None:
    tensor = _empty(3 * MIB)
    lines = str(memory_state()).splitlines()
    assert lines[0] == f"memory of {device}"
    assert lines[1] == "  held             3.00 MiB    0.6%  allocated to live tensors"
    assert lines[-1] == "  capacity       512.00 MiB  100.0%"
    del tensor
