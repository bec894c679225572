"""What an offload saves is said once in the log, and is what the device measures."""

import logging
import math
import re

import pytest
import torch

import residency
from residency._units import format_bytes

SHAPES = ((512, 512),) * 8  # 16 MiB of AdamW's state


def told(caplog):
    """Returns the level and the text of what the log has of an offload's savings."""
    (record,) = (r for r in caplog.records if "residency: offloading this" in r.getMessage())
    return record.levelname, record.getMessage()


def saved_by(text):
    """Returns what a text says that a step saves, and the bucket and the saving that it offers."""
    size = r"([\d.]+ \w+)"
    in_step = re.search(rf"saves {size} of device memory in a step", text)[1]
    offer = re.search(rf'bucket="(\w+)" would save {size}\.', text)
    return in_step, *(offer.groups() if offer else (None, None))


def peak_of_a_step(lab, **settings):
    """Returns the most that the second step holds beyond parameters and gradients."""
    parameters = lab.parameters(shapes=SHAPES)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    if settings:
        residency.offload_optimizer(optimizer, **settings)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    lab.set_gradients(parameters, 1, missing=False)
    torch.accelerator.synchronize()
    held = sum(2 * p.numel() * p.element_size() for p in parameters)
    torch.accelerator.reset_peak_memory_stats()
    optimizer.step()
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated() - held
    optimizer.zero_grad()
    del optimizer, parameters
    return peak


@pytest.fixture(autouse=True)
def at_info(caplog):
    caplog.set_level(logging.INFO, logger="residency")


@pytest.mark.parametrize("slots", [1, 3])
def test_the_figure_is_the_difference_of_both_peaks(lab, caplog, slots):
    offloaded = peak_of_a_step(lab, bucket="1MiB", slots=slots)
    level, text = told(caplog)
    plain = peak_of_a_step(lab)
    saved, bucket, _ = saved_by(text)
    assert level == "INFO"
    assert bucket is None
    assert saved == format_bytes(plain - offloaded)


def test_a_state_that_the_slots_hold_is_a_warning_with_a_bucket_that_saves_what_it_says(
    lab, caplog
):
    offloaded = peak_of_a_step(lab, bucket="128MiB", slots=3)
    level, text = told(caplog)
    assert level == "WARNING"
    saved, bucket, offered = saved_by(text)
    plain = peak_of_a_step(lab)
    assert saved == "0 B"
    assert plain - offloaded <= 0
    caplog.clear()
    better = peak_of_a_step(lab, bucket=bucket)
    assert offered == format_bytes(plain - better)
    assert saved_by(told(caplog)[1]) == (offered, None, None)


@pytest.mark.parametrize("slots", [1, 3])
def test_the_bucket_that_nobody_gives_fits_the_state(lab, caplog, slots):
    offloaded = peak_of_a_step(lab, slots=slots)
    level, text = told(caplog)
    plain = peak_of_a_step(lab)
    assert level == "INFO"
    assert saved_by(text) == (format_bytes(plain - offloaded), None, None)
    assert plain - offloaded >= sum(2 * 4 * math.prod(shape) for shape in SHAPES) // 2


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon", "Adafactor", "Adagrad"])
@pytest.mark.parametrize(
    "shapes", [((512, 512),), ((512, 512), (512, 480), (3, 2)), ((96, 96),) * 9, ((2, 3),)]
)
def test_an_offload_without_settings_takes_no_more_than_stock(lab, name, shapes):
    options = {"lr": 1e-3} | ({"momentum": 0.9} if name == "SGD" else {})
    peaks = []
    for is_offloaded in (False, True):
        parameters = lab.parameters(shapes=shapes)
        optimizer = getattr(torch.optim, name)(parameters, **options)
        if is_offloaded:
            residency.offload_optimizer(optimizer)
        for step in range(2):
            lab.set_gradients(parameters, step, missing=False)
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            optimizer.step()
            torch.accelerator.synchronize()
            peaks.append(torch.accelerator.max_memory_allocated())
        optimizer.zero_grad()
        del optimizer, parameters
    assert peaks[2] <= peaks[0]
    assert peaks[3] <= peaks[1]


def test_slots_that_take_more_than_the_state_are_told_as_they_are(lab, caplog):
    offloaded = peak_of_a_step(lab, bucket="14MiB")  # two slots, and a quarter of one in the second
    level, text = told(caplog)
    assert level == "WARNING"
    assert (
        f"saves 0 B of device memory in a step, whose slots have {format_bytes(offloaded)}" in text
    )
    assert offloaded > peak_of_a_step(lab)


def test_a_model_on_the_host_is_a_warning(caplog):
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = residency.offload_optimizer(torch.optim.AdamW([parameter]))
    for _ in range(2):
        parameter.grad = torch.ones(64)
        optimizer.step()
    level, text = told(caplog)
    assert level == "WARNING"
    assert "saves 0 B: the parameters are on the host" in text


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (torch.optim.SGD, {}, "the optimizer has no state"),
        (torch.optim.AdamW, {"resident": "1GiB"}, "resident= has room for all of the state"),
        (torch.optim.AdamW, {}, "less than a hundredth of the device, as LoRA's mostly is"),
    ],
)
def test_an_offload_without_use_is_a_warning_with_its_reason(lab, caplog, make, settings, reason):
    parameters = lab.parameters()
    optimizer = residency.offload_optimizer(make(parameters, lr=1e-3), **settings)
    optimizer.step()  # without gradients: nothing is known yet
    assert not caplog.records
    lab.take_steps(optimizer, parameters, range(2))
    level, text = told(caplog)
    assert level == "WARNING"
    assert "saves 0 B" in text
    assert reason in text


def test_a_class_that_moves_whole_parameters_is_offered_no_bucket_that_does_not_help(lab, caplog):
    parameters = lab.parameters(shapes=((512, 512),))
    optimizer = residency.offload_optimizer(torch.optim.Muon(parameters))
    lab.take_steps(optimizer, parameters, range(2))
    level, text = told(caplog)
    assert level == "WARNING"
    assert saved_by(text) == ("0 B", None, None)
