"""Turning the simulator on: what it refuses, what a second call changes, and what stays lazy."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import residency
from residency import sim

pytestmark = [
    pytest.mark.sim,
    pytest.mark.sim_device(capacity="8GiB", schedule="late", check_races=False),
]

accelerator = torch.accelerator
MIB = 1 << 20


def _run(script: str) -> str:
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("face", ["sim", "cuda"])
def test_a_backward_pass_on_the_host_may_come_first(face: str) -> None:
    script = f"""
import torch
from residency import sim
torch.ones(3, requires_grad=True).sum().backward()  # autograd counts the devices here
sim.enable("1GiB", device={face!r})
x = torch.ones(3, device={face!r}, requires_grad=True)
torch.utils.checkpoint.checkpoint(torch.square, x, use_reentrant=True).sum().backward()
print(x.grad.cpu().tolist())
"""
    assert _run(script) == "[2.0, 2.0, 2.0]\n"


@pytest.mark.parametrize("capacity", ["many", "8 parsecs", "", -1, 0, "0GiB", 1.5])
def test_a_capacity_that_means_nothing_is_refused(capacity: object) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="capacity"):
        sim.enable(capacity)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["", "soon", "Late", None])
def test_an_unknown_schedule_is_refused_with_the_known_ones(schedule: object) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="'late', 'overtake', 'eager'"):
        sim.enable(schedule=schedule)  # type: ignore[arg-type]


def test_a_refused_call_leaves_the_settings_as_they_were() -> None:
    sim.enable("32MiB")
    soon = {"capacity": "1GiB", "schedule": "soon"}
    for options in ({"capacity": 0}, {"capacity": "24"}, soon, {"capacity": "1GiB", "clock": 5}):
        with pytest.raises(residency.InvalidArgumentError):
            sim.enable(**options)  # type: ignore[arg-type]
    assert accelerator.get_memory_info()[1] == 32 * MIB


def test_a_capacity_below_what_is_in_use_is_refused() -> None:
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="sim")
    with pytest.raises(
        residency.InvalidArgumentError, match=r"capacity is 20\.00 MiB, and 30\.00 MiB are in use"
    ):
        sim.enable("20MiB")
    sim.enable("30MiB")
    assert accelerator.get_memory_info() == (0, 30 * MIB)
    del tensor


def test_cached_bytes_make_room_for_a_lower_capacity() -> None:
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="sim")
    del tensor
    assert accelerator.memory_reserved() == 30 * MIB
    sim.enable("20MiB")
    assert accelerator.memory_reserved() == 0


@pytest.mark.parametrize("was_dry", [True, False])
def test_the_dry_mode_does_not_change_under_living_tensors(was_dry: bool) -> None:
    sim.enable(dry=was_dry)
    tensor = torch.zeros(10, device="sim")
    with pytest.raises(residency.InvalidArgumentError, match=f"dry is {not was_dry}, and 512 B"):
        sim.enable(dry=not was_dry)
    del tensor
    sim.enable(dry=not was_dry)
    drawn = torch.empty(99, device="sim").uniform_(2, 3).tolist()
    assert all(2.0 <= each < 3.0 for each in drawn) if was_dry else drawn == [1.0] * 99


def test_memory_that_was_cached_in_dry_mode_is_poisoned_when_it_is_reused() -> None:
    sim.enable(dry=True)
    tensor = torch.zeros(1000, device="sim")
    del tensor
    sim.enable()
    assert torch.empty(1000, device="sim").isnan().all().item()


def test_a_second_call_changes_the_settings_and_keeps_the_tensors() -> None:
    tensor = torch.arange(10, device="sim")
    assert sim.enable("1GiB", schedule="overtake", check_races=True) == torch.device("sim", 0)
    assert accelerator.get_memory_info()[1] == 1 << 30
    assert tensor.sum().item() == 45
    lane = torch.Stream(device="sim")
    tensor.add_(1)
    with pytest.raises(sim.RaceError), lane:
        tensor.add_(1)
    sim.enable()
    with lane:
        tensor.add_(1)
    assert accelerator.get_memory_info()[1] == 8 << 30


def test_the_settings_in_force_can_be_brought_back() -> None:
    clock = sim.Clock(h2d_bytes_per_second="1GiB")
    sim.enable("1GiB", schedule="overtake", check_races=True, dry=True, clock=clock)
    was = sim.settings()
    sim.enable()
    assert sim.settings() != was
    sim.enable(**was)
    assert sim.settings() == was
    assert was["capacity"] == 1 << 30
    assert was["clock"] is clock


def test_queued_work_is_done_before_the_settings_change() -> None:
    lane = torch.Stream(device="sim")
    source, host = torch.ones(1000, device="sim"), torch.zeros(1000).pin_memory()
    lane.wait_stream(accelerator.current_stream())
    with lane:
        host.copy_(source, non_blocking=True)
    assert host.sum().item() == 0.0
    sim.enable(schedule="overtake")
    assert host.sum().item() == 1000.0


def test_torch_knows_the_device_by_its_name() -> None:
    assert sim.is_enabled()
    assert accelerator.current_accelerator() == torch.device("sim")
    assert accelerator.device_count() == 1
    assert torch.get_device_module("sim") is torch.sim
    assert torch.sim.get_device_properties().total_memory == 8 << 30
    tensor = torch.zeros(2).to("sim")
    assert tensor.is_sim
    assert tensor.device == torch.device("sim", 0)
    assert torch.zeros(2).sim().device == tensor.device
    assert "device='sim:0'" in repr(tensor)


def test_there_is_one_device() -> None:
    with pytest.raises(RuntimeError, match="one simulated accelerator"):
        torch.empty(2, device="sim:1")
    with pytest.raises(sim.SimulatorError, match="index 1"):
        torch.sim.set_device(1)


def test_importing_the_package_registers_and_compiles_nothing() -> None:
    output = _run(
        "import sys, torch, residency, residency.sim as sim\n"
        "assert not sim.is_enabled()\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
        "assert torch.accelerator.current_accelerator(check_available=True) is None\n"
        "assert 'residency_sim_core' not in sys.modules and not hasattr(torch, 'sim')\n"
        "assert 'torch.utils.cpp_extension' not in sys.modules\n"
        "try:\n    sim.pinned_memory_stats()\n"
        "except sim.SimulatorError as error:\n    print(error)\n"
        "try:\n    sim.enable(schedule='soon')\n"
        "except residency.InvalidArgumentError:\n    print(sim.is_enabled())\n"
    )
    assert "call residency.sim.enable() first" in output
    assert output.splitlines()[-1] == "False"


def test_a_process_with_another_such_device_is_refused() -> None:
    output = _run(
        "import torch\n"
        "torch.utils.rename_privateuse1_backend('other')\n"
        "from residency import sim\n"
        "try:\n    sim.enable()\n"
        "except sim.SimulatorError as error:\n    print(error, sim.is_enabled())\n"
    )
    assert "'other' is registered" in output
    assert output.strip().endswith("False")


def test_a_process_that_ends_with_work_and_tensors_left_ends_quietly(patient_ends: None) -> None:
    output = _run(
        "import torch\n"
        "from residency import sim\n"
        "sim.enable('1GiB', schedule='late', check_races=True)\n"
        "lane = torch.Stream(device='sim')\n"
        "weight = torch.ones(100, device='sim', requires_grad=True)\n"
        "host = torch.ones(100).pin_memory()\n"
        "(weight * 2).sum().backward()\n"
        "lane.wait_stream(torch.accelerator.current_stream())\n"
        "with lane:\n    host.copy_(weight.detach(), non_blocking=True)\n"
        "print('end')\n"
    )
    assert output == "end\n"
