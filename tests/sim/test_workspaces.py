"""Scratch memory of CUDA's libraries and kernels: sizes by torch's rules, and as recorded runs show
them.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from allocator import check_empty, take_defaults

from residency import sim
from residency_sim import _backend

pytestmark = pytest.mark.sim

KIB = 1 << 10
MIB = 1 << 20
WORKSPACE = (2 * 4096 + 8 * 16) * KIB  # :4096:2:16:8
BLOCK = 512

accelerator = torch.accelerator


@pytest.fixture(autouse=True)
def empty_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    sim.enable("2GiB")
    check_empty()
    accelerator.reset_peak_memory_stats()
    yield
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    take_defaults()


def _multiply() -> None:
    left = torch.ones(4, 4, device="sim")
    left @ left


def _in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    task = Path(f"/proc/self/task/{thread.native_id}")
    thread.join()
    for _ in range(10_000_000):  # Python's thread is joined before the system's has ended
        if not task.exists():
            return
        os.sched_yield()
    raise AssertionError("the thread has not ended")


# -------------------------------------------------------------------------------------- workspaces


@pytest.mark.parametrize(
    ("config", "capability_major", "num_bytes", "is_understood"),
    [
        (None, 8, 8_519_680, True),
        (None, 9, 32 * MIB, True),
        (None, 10, 32 * MIB, True),
        (None, 7, 8_519_680, True),
        (":4096:8", 8, 32 * MIB, True),
        (":16:8", 9, 128 * KIB, True),
        (":4096:2:16:8", 9, 8_519_680, True),
        (":0:0", 8, 0, True),
        ("4096", 8, 8_519_680, False),
        ("", 9, 32 * MIB, False),
    ],
)
def test_a_workspace_has_the_size_of_torchs_rule(
    config: str | None, capability_major: int, num_bytes: int, is_understood: bool
) -> None:
    found = _backend.core().blas_workspace_bytes(config, capability_major)
    assert found == (num_bytes, is_understood)


def test_the_first_product_of_each_thread_and_stream_takes_a_workspace_for_good() -> None:
    _multiply()
    assert accelerator.memory_allocated() == WORKSPACE
    _multiply()
    assert accelerator.memory_allocated() == WORKSPACE
    with torch.Stream(device="sim"):
        _multiply()
        _multiply()
    assert accelerator.memory_allocated() == 2 * WORKSPACE
    _in_a_thread(_multiply)
    assert accelerator.memory_allocated() == 3 * WORKSPACE
    accelerator.empty_cache()
    assert accelerator.memory_allocated() == 3 * WORKSPACE
    torch.sim.clear_workspaces()
    assert accelerator.memory_allocated() == 0


def test_a_new_thread_gets_the_handle_of_one_that_has_ended() -> None:
    for _ in range(3):
        _in_a_thread(_multiply)
    assert accelerator.memory_allocated() == WORKSPACE


def test_a_backward_pass_takes_a_second_workspace_in_autograds_thread() -> None:
    weight = torch.ones(4, 4, device="sim", requires_grad=True)
    loss = (weight @ weight).sum()
    assert accelerator.memory_stats()["requested_bytes.large_pool.current"] == WORKSPACE
    loss.backward()
    assert accelerator.memory_stats()["requested_bytes.large_pool.current"] == 2 * WORKSPACE


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.mm(x, x),
        lambda x: torch.addmm(x, x, x),
        lambda x: torch.bmm(x[None], x[None]),
        lambda x: torch.baddbmm(x[None], x[None], x[None]),
        lambda x: torch.mv(x, x[0]),
        lambda x: torch.dot(x[0], x[0]),
        lambda x: torch.mm(x, x, out=torch.empty_like(x)),
        lambda x: torch.nn.functional.linear(x, x, x[0]),
        lambda x: torch.einsum("ij,jk->ik", x, x),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_every_kind_of_product_takes_one(
    work: Callable[[torch.Tensor], torch.Tensor], dry: bool
) -> None:
    sim.enable("2GiB", dry=dry)
    work(torch.ones(4, 4, device="sim"))
    assert accelerator.memory_allocated() == WORKSPACE
    sim.enable("2GiB")


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * x,
        lambda x: x.sum(),
        lambda x: torch.mm(x[:0], x),
        lambda x: torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3),
    ],
)
def test_what_needs_no_handle_takes_none(work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    work(torch.ones(4, 4, device="sim"))
    assert accelerator.memory_allocated() == 0


def test_workspaces_can_be_turned_off_and_go_when_settings_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _multiply()
    sim.enable("2GiB", dry=True)  # refused under living tensors, but these are not the user's
    assert accelerator.memory_allocated() == 0
    sim.enable("2GiB", workspaces=False)
    _multiply()
    assert accelerator.memory_allocated() == 0
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    sim.enable("2GiB")
    _multiply()
    assert accelerator.memory_allocated() == 0
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "much")
    with pytest.warns(UserWarning, match="CUBLAS_WORKSPACE_CONFIG is 'much'"):
        sim.enable("2GiB")
    _multiply()
    assert accelerator.memory_allocated() == WORKSPACE


def test_a_workspace_that_does_not_fit_is_an_ordinary_out_of_memory_error() -> None:
    sim.enable("16MiB")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20\.00 MiB"):
        _multiply()
    sim.enable("2GiB")
    _multiply()


@pytest.mark.parametrize("schedule", ["late", "overtake"])
def test_workspaces_are_no_race(schedule: str) -> None:
    sim.enable("2GiB", schedule=schedule, check_races=True)
    lane = torch.Stream(device="sim")
    left = torch.ones(4, 4, device="sim")
    lane.wait_stream(accelerator.current_stream())
    with lane:
        product = left @ left
    accelerator.current_stream().wait_stream(lane)
    assert (product @ left).sum().item() == 4.0**4


# -------------------------------------------------------------------------------------- reductions


def _scratch_of(work: Callable[[], torch.Tensor]) -> int:
    """Bytes that a call takes for a moment, beyond its result."""
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    result = work()
    kept = accelerator.memory_allocated() - before
    del result
    return accelerator.max_memory_allocated() - before - kept


@pytest.mark.parametrize(
    ("rows", "columns", "scratch"),
    [
        # Blocks of 32 x 4 threads, each with four columns: a thread has rows / 4 values. From 256
        # on the rows are split, a block to 16 values a thread, each of which stores the partial
        # sums of its 32 x 4 columns, four bytes each.
        (512, 1024, 0),
        (1024, 1024, 1024 * (256 // 16) * 32 * 4 * 4),
        (2048, 1024, 1024 * (512 // 16) * 32 * 4 * 4),
        (1024, 2048, 2048 * (256 // 16) * 32 * 4 * 4),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_a_sum_over_many_rows_is_split_over_blocks(
    rows: int, columns: int, scratch: int, dry: bool
) -> None:
    sim.enable("2GiB", dry=dry)
    values = torch.ones(rows, columns, device="sim")
    semaphores = BLOCK if scratch else 0  # four bytes for each of at most 16 blocks
    assert _scratch_of(lambda: values.sum(0)) == scratch + semaphores
    assert _scratch_of(lambda: values.mean(0, keepdim=True)) == scratch + semaphores
    assert _scratch_of(lambda: torch.linalg.vector_norm(values, dim=0)) == scratch + semaphores
    assert _scratch_of(lambda: values.sum(1)) == 0  # 1024 values over 32 threads of a row: 32 each
    values = torch.empty(0)
    sim.enable("2GiB")


def test_a_sum_of_everything_keeps_one_partial_sum_for_each_block() -> None:
    values = torch.ones(MIB, device="sim")
    # 512 threads: 2^20 / 512 = 2048 values each, one block to 16 of them, four bytes a block.
    buffer = 2048 // 16 * 4
    assert _scratch_of(values.sum) == buffer + BLOCK


def test_reductions_take_nothing_where_workspaces_are_off() -> None:
    sim.enable("2GiB", workspaces=False)
    values = torch.ones(1024, 1024, device="sim")
    assert _scratch_of(lambda: values.sum(0)) == 0


# ------------------------------------------------------------------------- accumulating index_put


@pytest.mark.parametrize(
    ("count", "sort"),
    [
        (1024, 1),  # one tile, which needs nothing
        # Two passes of eight bits: counts, two tiles' sums, keys and values again, counters, and
        # 255 bytes to align it.
        (4096, 2 * 256 * 8 + 2 * 256 * 4 + 2 * 4096 * 8 + 256 + 255),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_an_accumulating_index_put_sorts_its_positions(count: int, sort: int, dry: bool) -> None:
    sim.enable("2GiB", dry=dry)
    table = torch.zeros(10_000, 4, device="sim")
    rows = torch.zeros(count, dtype=torch.long, device="sim")
    values = torch.ones(count, 4, device="sim")
    positions = 8 * count
    expected = 4 * positions + -(-sort // BLOCK) * BLOCK
    assert _scratch_of(lambda: table.index_put_((rows,), values, accumulate=True)) == expected
    assert _scratch_of(lambda: table.index_put_((rows,), values)) == 0
    table = rows = values = torch.empty(0)
    sim.enable("2GiB")


# ----------------------------------------------------------------------------------- recorded runs


def _trace(path: Path) -> tuple[list[int], list[int]]:
    """Requested bytes of a trace's allocations, and of what is live at its end."""
    with gzip.open(path) as file:
        trace: dict[str, Any] = json.load(file)
    requested = [event[2] for event in trace["events"] if event[0] == "alloc"]
    blocks = [block for segment in trace["final_segments"] for block in segment["blocks"]]
    return requested, [block[2] for block in blocks if block[3].startswith("active")]


@pytest.mark.parametrize(
    ("name", "num_threads"),
    [
        ("w_medium_256_training", 2),
        ("w_medium_1024_training", 2),
        ("w_medium_512_inference", 1),
    ],
)
def test_recorded_runs_hold_one_workspace_for_each_thread(
    trace_files: list[Path], name: str, num_threads: int
) -> None:
    path = next(path for path in trace_files if path.name.startswith(name))
    assert _trace(path)[1].count(WORKSPACE) == num_threads


@pytest.mark.parametrize("context", [256, 1024])
def test_recorded_runs_split_their_sums_as_the_rule_says(
    trace_files: list[Path], context: int
) -> None:
    path = next(path for path in trace_files if f"medium_{context}_training" in path.name)
    requested = _trace(path)[0]
    # The gradients of 49 norms with 1024 weights each: sums over the tokens of 4 sequences.
    values = torch.ones(4 * context, 1024, device="sim")
    buffer = _scratch_of(lambda: values.sum(0)) - BLOCK
    num_blocks = 1024 // 4 // 32  # of columns, with four bytes of semaphore each
    pairs = list(itertools.pairwise(requested))
    assert pairs.count((buffer, 4 * num_blocks)) == 49


@pytest.mark.parametrize("context", [256, 1024])
def test_recorded_runs_sort_the_rows_of_an_embeddings_gradient(
    trace_files: list[Path], context: int
) -> None:
    path = next(path for path in trace_files if f"medium_{context}_training" in path.name)
    requested = _trace(path)[0]
    num_tokens = 4 * context
    table = torch.zeros(10_000, 4, device="sim")
    rows = torch.zeros(num_tokens, dtype=torch.long, device="sim")
    values = torch.ones(num_tokens, 4, device="sim")
    scratch = _scratch_of(lambda: table.index_put_((rows,), values, accumulate=True))
    # Five tensors of positions, one of which goes before the others come, and the sort's.
    five = [8 * num_tokens] * 5
    sorts = [requested[i + 5] for i in range(len(requested) - 5) if requested[i : i + 5] == five]
    assert [4 * five[0] + -(-sort // BLOCK) * BLOCK for sort in sorts] == [scratch]
