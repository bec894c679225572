"""The plugin's fixtures, from inside a test that uses them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from residency import sim
from residency.testing import QueuedWorkError, settle
from residency.testing._settings import SCHEDULES
from residency_sim import _enable

pytestmark = pytest.mark.sim

MIB = 1 << 20
accelerator = torch.accelerator
kept: list[torch.Tensor] = []


def _settings(*names: str) -> tuple[Any, ...]:
    return tuple(sim.settings()[name] for name in names)


def test_the_simulated_device_checks_races_and_is_empty(sim_device: torch.device) -> None:
    assert sim_device == torch.device("sim", 0)
    assert _settings("check_races", "dry", "clock") == (True, False, None)
    assert accelerator.memory_reserved() == 0
    assert accelerator.max_memory_allocated() == 0
    pinned = sim.pinned_memory_stats()  # other tests of the process may keep some
    assert pinned["pinned_bytes.peak"] == pinned["pinned_bytes.current"]


def test_the_projects_defaults_hold_without_a_marker(sim_device: torch.device) -> None:
    assert sim.settings()["capacity"] == 6 << 30
    assert sim.settings()["schedule"] in ("late", "overtake")


def test_the_tested_device_is_the_simulated_one_by_default(tested_device: torch.device) -> None:
    assert tested_device == torch.device("sim", 0)


@pytest.mark.sim_device(
    capacity="40MiB", schedule="eager", check_races=False, dry=True, clock=sim.Clock()
)
def test_a_marker_alone_brings_the_device_with_its_settings() -> None:
    names = ("capacity", "schedule", "check_races", "dry", "clock")
    assert _settings(*names) == (40 * MIB, "eager", False, True, sim.Clock())


@pytest.mark.sim_device(capacity="40MiB", schedule="eager")
class TestMarkersThatMeet:
    @pytest.mark.sim_device(schedule="late")
    def test_the_closer_marker_wins_option_by_option(self, sim_device: torch.device) -> None:
        assert _settings("capacity", "schedule") == (40 * MIB, "late")

    @pytest.mark.parametrize("sim_device", [{"schedule": "overtake"}], indirect=True)
    def test_a_parameter_wins_over_markers(self, sim_device: torch.device) -> None:
        assert _settings("capacity", "schedule") == (40 * MIB, "overtake")

    @pytest.mark.parametrize(
        "capacity", [pytest.param(20 * MIB, marks=pytest.mark.sim_device(capacity="20MiB"))]
    )
    def test_a_marker_on_a_parameter_counts(self, capacity: int) -> None:
        assert _settings("capacity", "schedule") == (capacity, "eager")


@pytest.mark.parametrize(
    "limit", [pytest.param(20 * MIB, marks=pytest.mark.device_memory(limit="20MiB"))]
)
def test_a_limit_on_a_parameter_counts(limit: int) -> None:
    assert sim.settings()["capacity"] == limit


@pytest.mark.device_memory(limit="32MiB", growth="0B")
def test_a_limit_is_the_capacity_of_the_device(request: pytest.FixtureRequest) -> None:
    assert accelerator.get_memory_info() == (32 * MIB, 32 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 32\.00 MiB"):
        torch.empty(33 * MIB, dtype=torch.uint8, device="sim")


@pytest.mark.device_memory(limit="32MiB")
def test_a_limit_and_a_fixture_go_together(tested_device: torch.device) -> None:
    assert accelerator.get_memory_info()[1] == 32 * MIB


@pytest.fixture(scope="module")
def seen() -> Iterator[list[str]]:
    schedules: list[str] = []
    yield schedules
    assert sorted(schedules) == sorted(SCHEDULES)


@pytest.mark.sim_device(schedule="all")
def test_one_test_runs_under_every_schedule(seen: list[str]) -> None:
    seen.append(sim.settings()["schedule"])


def test_the_plugin_knows_every_schedule_of_the_simulator() -> None:
    assert set(SCHEDULES) == set(_enable._SCHEDULES)


@pytest.fixture
def model(sim_device: torch.device) -> torch.nn.Module:
    return torch.nn.Linear(1000, 1000, device=sim_device)


@pytest.mark.device_memory(growth="0B")
def test_what_a_fixture_holds_is_no_growth(model: torch.nn.Module) -> None:
    model(torch.ones(3, 1000, device="sim")).sum().backward()
    model.zero_grad()


@pytest.mark.device_memory(growth="0B")
def test_garbage_is_no_growth(sim_device: torch.device) -> None:
    cycle: dict[str, Any] = {"tensor": torch.ones(MIB, device=sim_device)}
    cycle["itself"] = cycle


@pytest.mark.device_memory(growth="4MiB")
def test_growth_up_to_the_size_given_is_allowed() -> None:
    kept.append(torch.empty(4 * MIB, dtype=torch.uint8, device="sim"))


def test_bytes_that_an_earlier_test_left_do_not_count_for_the_next(
    sim_device: torch.device,
) -> None:
    kept.clear()
    assert accelerator.memory_allocated() == 0


@pytest.fixture(scope="class")
def surroundings() -> Iterator[None]:
    """What was set before a test that takes the device must be there after it."""
    sim.enable("1GiB", schedule="eager")
    lane = torch.Stream(device="sim")
    accelerator.set_stream(lane)
    yield
    assert _settings("capacity", "schedule", "check_races") == (1 << 30, "eager", False)
    assert accelerator.current_stream() == lane
    accelerator.set_stream(torch.sim.default_stream())  # type: ignore[attr-defined]
    sim.enable()


@pytest.mark.usefixtures("surroundings")
class TestWhatIsThereBeforeATest:
    @pytest.mark.sim_device(capacity="64MiB", schedule="late", clock=sim.Clock(), dry=True)
    def test_settings_and_the_current_stream_come_back(self) -> None:
        accelerator.set_stream(torch.Stream(device="sim"))
        sim.enable("2GiB", dry=True)


@pytest.mark.sim_device(schedule="late", check_races=False)
def test_kernels_are_queued_though_no_test_has_made_a_stream(sim_device: torch.device) -> None:
    bad = torch.tensor([1_000_000], device=sim_device)
    target = torch.zeros(10, device=sim_device)
    target.index_fill_(0, bad, 1.0)  # fails when it runs: were it not queued, here
    with pytest.raises(IndexError):
        accelerator.synchronize()


@pytest.mark.sim_device(schedule="late", check_races=False)
def test_settling_finishes_work_past_its_failures_and_frees_what_is_free(
    sim_device: torch.device,
) -> None:
    pinned = sim.pinned_memory_stats()["pinned_bytes.current"]  # by other tests of the process
    held = torch.zeros(MIB, device=sim_device)
    target, bad = torch.zeros(10, device=sim_device), torch.tensor([99], device=sim_device)
    for _ in range(3):
        target.index_fill_(0, bad, 1.0)
    held.add_(1.0)
    host = torch.empty(MIB).pin_memory()
    del target, bad, host
    with pytest.raises(QueuedWorkError, match=r"the first of 3 failures\): IndexError"):
        settle()
    assert settle() == held.nbytes
    assert accelerator.memory_reserved() == 20 * MIB  # the segment of the tensor that is held
    assert accelerator.max_memory_allocated() == held.nbytes
    assert sim.pinned_memory_stats()["pinned_bytes.current"] == pinned
    assert held.min().item() == 1.0


def test_settling_drops_garbage_that_has_a_private_pool_and_no_tensor(
    sim_device: torch.device,
) -> None:
    module = torch.get_device_module(sim_device)
    cycle: list[Any] = [module.MemPool()]
    cycle.append(cycle)
    with module.use_mem_pool(cycle[0]):
        torch.empty(4 * MIB, device=sim_device)
    del cycle
    assert accelerator.memory_reserved() > 0
    gc.disable()
    try:
        assert settle() == 0
    finally:
        gc.enable()
    assert accelerator.memory_reserved() == 0


@pytest.mark.whole
def test_contexts_and_workspaces_are_charged_where_the_settings_say_so(run_tests) -> None:
    run_tests(
        """
        import pytest
        import torch
        import residency

        def used(device):
            square = torch.ones(64, 64, device=device)
            square @ square
            state = residency.memory_state()
            return state.outside, state.held - square.nbytes

        def test_a_default(sim_device):
            assert used(sim_device) == (64 << 20, 8519680)

        @pytest.mark.sim_device(workspaces=False, context="1MiB")
        def test_of_its_own(sim_device):
            assert used(sim_device) == (1 << 20, 0)

        @pytest.mark.sim_device(capacity="64MiB")
        def test_a_capacity_is_for_tensors(sim_device):
            assert used(sim_device) == (0, 8519680)

        @pytest.mark.device_memory(limit="64MiB")
        def test_a_limit_is_for_tensors(sim_device):
            assert used(sim_device) == (0, 8519680)
        """,
        ini="residency_context = 64MiB\nresidency_workspaces = true",
    ).assert_outcomes(passed=4)
