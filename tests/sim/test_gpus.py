"""The simulated accelerator as a GPU of a name."""

import pytest
import torch

from residency import InvalidArgumentError, sim

pytestmark = [pytest.mark.sim, pytest.mark.sim_device(capacity="1GiB")]


def test_a_named_gpu_has_its_capacity_capability_and_kernels(sim_device: torch.device) -> None:
    was = sim.settings()
    try:
        sim.enable(gpu="L4", dry=False)
        assert sim.settings()["capacity"] == sim.gpu_named("l4")[1].capacity
        assert sim.settings()["gpu"] == "L4"
        assert torch.sim.get_device_capability() == (8, 9)
        assert torch.sim.get_device_properties().multi_processor_count == 58
        sim.enable("2GiB", gpu="h200")
        assert sim.settings()["capacity"] == 2 << 30
        assert torch.sim.get_device_capability() == (9, 0)
    finally:
        sim.enable(**was)
    assert torch.sim.get_device_capability() == (8, 0)


@pytest.mark.parametrize("gpu", ["voodoo2", "", "rtx"])
def test_an_unknown_gpu_is_refused_with_those_that_are_known(
    sim_device: torch.device, gpu: str
) -> None:
    with pytest.raises(InvalidArgumentError, match="rtx4090"):
        sim.enable(gpu=gpu)


def test_a_split_sum_takes_the_scratch_of_its_multiprocessors(sim_device: torch.device) -> None:
    peaks = {}
    was = sim.settings()
    for gpu in ("l4", "h100"):
        sim.enable("1GiB", gpu=gpu, dry=False)
        numbers = torch.ones(1 << 24, device=sim_device)
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        numbers.sum()
        peaks[gpu] = torch.accelerator.max_memory_allocated() - before
        del numbers
    sim.enable(**was)
    assert 0 < peaks["l4"] < peaks["h100"]
