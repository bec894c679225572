"""Phases: their figures, their peaks, nesting, threads, exceptions, and what they never disturb."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import residency
from residency import _device
from residency._memory import _phase
from residency._memory._phase import open_phases

pytestmark = [
    pytest.mark.device_memory(limit="256MiB"),
    pytest.mark.sim_device(schedule="late", check_races=False),
]
MIB = 1 << 20


def _empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=torch.accelerator.current_accelerator())


@pytest.fixture(autouse=True)
def measuring() -> Iterator[None]:
    yield
    _phase.boundaries.is_enabled = True


def test_a_phase_has_the_figures_of_both_its_boundaries(device: torch.device) -> None:
    with residency.phase("load") as visit:
        kept = _empty(3 * MIB)
    assert (visit.before.held, visit.after and visit.after.held) == (0, 3 * MIB)
    assert (visit.path, visit.error) == ("load", None)
    assert visit.seconds > 0
    del kept


def test_a_peak_is_exact_when_the_register_rose_in_the_phase(device: torch.device) -> None:
    with residency.phase("first") as visit:
        _empty(40 * MIB)
    assert (visit.peak, visit.is_peak_exact) == (40 * MIB, True)


def test_a_peak_is_an_upper_bound_when_an_earlier_one_hides_it(device: torch.device) -> None:
    _empty(40 * MIB)
    with residency.phase("second") as visit:
        _empty(10 * MIB)
    assert (visit.peak, visit.is_peak_exact) == (40 * MIB, False)


def test_a_peak_that_is_held_at_a_boundary_is_exact(device: torch.device) -> None:
    kept = _empty(40 * MIB)
    with residency.phase("third") as visit:
        _empty(0)
    assert (visit.peak, visit.is_peak_exact) == (40 * MIB, True)
    del kept


def test_a_reset_inside_a_phase_leaves_an_upper_bound(device: torch.device) -> None:
    _empty(40 * MIB)
    with residency.phase("fourth") as visit:
        torch.accelerator.reset_peak_memory_stats()
        _empty(10 * MIB)
    assert (visit.peak, visit.is_peak_exact) == (40 * MIB, False)


def test_the_users_peak_register_is_left_alone(device: torch.device) -> None:
    _empty(40 * MIB)
    with residency.phase("outer"), residency.phase("inner"):
        _empty(10 * MIB)
    assert torch.accelerator.max_memory_allocated() == 40 * MIB


def test_exact_peaks_of_nested_phases_hold_in_both(device: torch.device, tmp_path: Path) -> None:
    _empty(60 * MIB)
    with residency.record(tmp_path / "run.jsonl", peaks="exact"):
        with residency.phase("outer") as outer:
            _empty(40 * MIB)
            with residency.phase("inner") as inner:
                _empty(10 * MIB)
            _empty(20 * MIB)
        with residency.phase("later") as later:
            _empty(5 * MIB)
    found = [(visit.peak, visit.is_peak_exact) for visit in (outer, inner, later)]
    assert found == [(40 * MIB, True), (10 * MIB, True), (5 * MIB, True)]
    assert torch.accelerator.max_memory_allocated() < 60 * MIB  # it was reset, as is said


def test_phases_nest_and_join_their_names(device: torch.device) -> None:
    with residency.phase("step"):
        with residency.phase("forward") as inner:
            assert [visit.name for visit in open_phases()] == ["step", "forward"]
        with residency.phase("forward") as again:
            pass
    assert inner.path == again.path == "step/forward"
    assert open_phases() == ()


def test_a_decorated_function_is_a_visit_a_call_also_when_it_calls_itself(
    device: torch.device,
) -> None:
    paths = []

    @residency.phase("save")
    def save(depth: int, *, name: str = "x") -> str:
        paths.append(open_phases()[-1].path)
        return save(depth - 1) if depth else name

    assert save(1) == "x"
    assert save.__name__ == "save"
    assert paths == ["save", "save/save"]
    assert open_phases() == ()


def test_a_decorated_coroutine_is_in_the_phase_while_it_runs(device: torch.device) -> None:
    order = []

    async def main() -> None:
        ready = asyncio.Event()

        @residency.phase("one")
        async def one() -> None:
            ready.set()
            await asyncio.sleep(0)
            order.append([visit.path for visit in open_phases()])

        @residency.phase("two")
        async def two() -> None:
            await ready.wait()
            order.append([visit.path for visit in open_phases()])
            await asyncio.sleep(0)

        await asyncio.gather(one(), two())

    asyncio.run(main())
    assert sorted(order) == [["one"], ["two"]]


def test_a_generator_is_not_decorated() -> None:
    def generate() -> Iterator[int]:
        yield 1

    with pytest.raises(residency.InvalidArgumentError, match="generator"):
        residency.phase("generate")(generate)


def test_each_thread_has_phases_of_its_own(device: torch.device) -> None:
    paths: list[str] = []

    def work() -> None:
        with residency.phase("writer") as visit:
            paths.append(visit.path)

    with residency.phase("step"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert paths == ["writer"]


def test_an_exception_is_recorded_and_passes_through(device: torch.device) -> None:
    with (
        pytest.raises(ValueError, match="first line"),
        residency.phase("outer") as outer,
        residency.phase("inner") as inner,
    ):
        raise ValueError("first line\nsecond line")
    assert outer.error == inner.error == "ValueError: first line"
    assert open_phases() == ()


def test_out_of_memory_passes_through_with_its_figures(device: torch.device) -> None:
    with pytest.raises(torch.OutOfMemoryError), residency.phase("step") as visit:
        _empty(1 << 30)
    assert visit.error is not None
    assert re.match(r"OutOfMemoryError: \w+ out of memory", visit.error)
    assert visit.after is not None
    assert visit.after.num_out_of_memory == visit.before.num_out_of_memory + 1


@pytest.mark.parametrize("name", ["", "  ", "a/b", 3, None])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="without a slash"):
        residency.phase(name)


def test_an_observer_that_raises_is_disabled_and_logged_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the driver is gone")

    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING, "residency"):
        broken.setattr(_device, "accelerator", fail)
        for _ in range(3):
            with residency.phase("step"):
                pass
    assert [entry.message for entry in caplog.records] == [
        "residency stopped measuring phases; the run goes on without"
    ]


def test_a_boundary_asks_each_source_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("allocator_figures", "device_room"):
        real = getattr(_device, name)

        def ask(at: torch.device, name: str = name, real: Any = real) -> Any:
            asked.append(name)
            return real(at)

        monkeypatch.setattr(_device, name, ask)
    with residency.phase("step"):
        assert asked == ["allocator_figures", "device_room"]
    assert len(asked) == 4


def test_torchs_memory_history_is_tagged_and_put_back(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = ["the user's own"]
    monkeypatch.setattr(_device, "tag_memory_history", lambda at, text: tags.append(text) or "old")
    monkeypatch.setattr(_device, "untag_memory_history", tags.append)
    with residency.phase("outer"), residency.phase("inner"):
        pass
    assert tags == ["the user's own", "outer", "outer/inner", "old", "old"]


@pytest.mark.parametrize(
    ("before", "written"),
    [("old", "save"), ({"user": "x"}, {"user": "x", "phase": "save"})],
)
def test_a_tag_is_text_or_joins_the_users_mapping(
    monkeypatch: pytest.MonkeyPatch, before: Any, written: Any
) -> None:
    current = [before]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # before, no allocator has any
    monkeypatch.setattr(torch._C, "_cuda_getMemoryMetadata", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryMetadata", current.append, raising=False)
    found = _device.tag_memory_history(torch.device("cuda", 0), "save")
    assert current[-1] == written
    _device.untag_memory_history(found)
    assert current[-1] == before


@pytest.mark.timeout(60)
def test_a_generator_in_a_phase_may_be_collected_while_another_phase_ends(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def abandoned() -> Iterator[None]:
        with residency.phase("abandoned"):
            yield

    left = abandoned()
    next(left)
    peak_of = _phase._peak

    def peak(*states: Any) -> tuple[int, bool]:  # a tuple, at which Python may collect
        nonlocal left
        left = iter(())  # type: ignore[assignment]
        return peak_of(*states)

    monkeypatch.setattr(_phase, "_peak", peak)
    with residency.phase("outer") as visit:
        pass
    assert visit.is_over
    with residency.phase("next") as following:
        assert open_phases() == (following,)
    assert following.path == "next"
