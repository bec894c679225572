"""What an offloaded optimizer says of itself: bytes, rates, exposed time, and its repr."""

from dataclasses import fields

import pytest
import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state

import residency
from residency import sim
from residency._optim._statistics import OffloadStatistics
from residency._units import format_bytes


def two_steps(lab, **settings):
    parameters = lab.parameters(shapes=((256, 64),) * 6)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    residency.offload_optimizer(optimizer, bucket=2 * 256 * 64 * 4 + 512, slots=2, **settings)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    return optimizer, parameters


def test_bytes_of_a_step_are_those_of_the_state_and_rates_are_positive(lab):
    optimizer, parameters = two_steps(lab)
    figures = optimizer.statistics()
    state = sum(2 * p.numel() * 4 + 4 for p in parameters)  # `step` is a tensor of four bytes
    padding = 512 * 3 * len(parameters)
    assert state <= figures.step_to_device_bytes <= state + padding
    assert state <= figures.step_to_host_bytes <= state + padding
    assert figures.copied_to_device_bytes == figures.step_to_device_bytes  # none in the first step
    assert figures.to_device_bytes_per_second > 0
    assert figures.to_host_bytes_per_second > 0
    assert figures.exposed_seconds >= 0


@pytest.mark.sim
def test_rates_and_exposed_time_are_those_of_the_simulated_clock(lab):
    rates = sim.Clock(h2d_bytes_per_second=10**9, d2h_bytes_per_second=2 * 10**9)
    sim.enable("1GiB", schedule="late", clock=rates)
    optimizer, _ = two_steps(lab)
    figures = optimizer.statistics()
    assert figures.to_device_bytes_per_second == pytest.approx(1e9, rel=0.2)
    assert figures.to_host_bytes_per_second == pytest.approx(2e9, rel=0.2)
    # The link to the device is busy throughout, and next to nothing hides it.
    whole = figures.step_to_device_bytes / 1e9
    assert 0.5 * whole <= figures.exposed_seconds <= 2 * whole


def test_figures_print_in_units_of_people_with_simulated_rates_marked(lab):
    optimizer, parameters = two_steps(lab)
    lines = str(optimizer.statistics()).splitlines()
    printed = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:]}
    assert list(printed) == [f.name for f in fields(OffloadStatistics) if f.name != "is_simulated"]
    state_bytes = sum(2 * p.numel() * 4 + 4 for p in parameters)
    assert printed["home_bytes"] == f"{format_bytes(state_bytes)}  of state that lives on the host"
    assert printed["num_steps"] == "2  steps since the offload"
    is_marked = [name for name, text in printed.items() if "on the simulated accelerator" in text]
    timed = ["to_device_bytes_per_second", "to_host_bytes_per_second", "exposed_seconds"]
    assert is_marked == (timed if sim.is_enabled() else [])
    assert all(
        printed[name].split()[1].startswith(("B/s", "KiB/s", "MiB/s", "GiB/s"))
        for name in timed[:2]
    )


def test_nothing_is_timed_before_the_first_step(lab):
    optimizer, _ = lab.adamw(offload=True)
    figures = optimizer.statistics()
    assert figures.exposed_seconds is None
    assert figures.to_device_bytes_per_second is None
    assert figures.step_to_host_bytes == 0


def test_the_repr_shows_what_stays_and_what_streams(lab):
    optimizer, _ = two_steps(lab, resident="300KiB")
    text = repr(optimizer)
    assert text.startswith("AdamW (\nParameter Group 0\n")
    assert "2 of 6 parameters have resident state (at most 300.00 KiB)" in text
    assert "2 slots of 128.50 KiB" in text
    assert "offloaded" not in repr(residency.onload_optimizer(optimizer))


def test_unpinned_homes_count_as_no_pinned_bytes(lab):
    optimizer, parameters = two_steps(lab, pin=False)
    assert optimizer.statistics().pinned_bytes == 0
    assert "not pinned" in repr(optimizer)
    plain = torch.optim.AdamW(lab.parameters(shapes=((256, 64),) * 6), lr=1e-2, fused=True)
    others = plain.param_groups[0]["params"]
    lab.take_steps(plain, others, range(2), missing=False)
    lab.assert_equal(lab.read(optimizer, parameters), lab.read(plain, others))


@pytest.mark.parametrize("fused", [True, False])
def test_the_template_step_of_a_distributed_load_takes_one_bucket(lab, fused):
    bucket = 64 * 1024
    parameters = lab.parameters(shapes=((64, 64),) * 12)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=fused)
    residency.offload_optimizer(optimizer, bucket=bucket, slots=3)
    gradients = sum(p.numel() * 4 for p in parameters)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    values = [p.detach().clone().cpu() for p in parameters]
    _init_optim_state(optimizer)
    assert torch.accelerator.max_memory_allocated() - before <= gradients + bucket
    assert all(torch.equal(p.detach().cpu(), v) for p, v in zip(parameters, values, strict=True))
    assert len(optimizer.state) == len(parameters)


def test_steps_are_counted_where_the_parameters_are_on_the_host(lab):
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = residency.offload_optimizer(torch.optim.AdamW([parameter]))
    for count in (1, 2):
        parameter.grad = torch.ones(8)
        optimizer.step()
        assert optimizer.statistics().num_steps == count
