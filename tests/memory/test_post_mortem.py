"""An out-of-memory error tells what filled the device and what would have fitted."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from notes import megabytes, note_of

import residency
from residency import _device
from residency._memory import _post_mortem, asked_bytes
from residency._memory._post_mortem import explain
from residency._units import MIB, format_bytes

pytestmark = [
    pytest.mark.device_memory(limit="64MiB"),
    pytest.mark.sim_device(schedule="late", workspaces=False),
    pytest.mark.usefixtures("search_to_its_end"),
]
# What would have fitted follows from what the device has free; on a real one the limit of a test
# is torch's alone, and the device has far more.
of_a_full_device = pytest.mark.sim


@of_a_full_device
def test_an_error_in_a_phase_has_one_note_with_table_phase_holders_and_a_remedy(
    device: torch.device,
) -> None:
    def fill() -> None:
        batch = {"images": megabytes(40, device)}
        batch["labels"] = megabytes(30, device)

    with pytest.raises(torch.OutOfMemoryError) as caught:  # noqa: SIM117 - one inside the other
        with residency.phase("epoch"), residency.phase("forward"):
            fill()
    (note,) = caught.value.__notes__
    lines = note.splitlines()
    assert (
        lines[0] == "residency: the device's memory when this failed, in the phase 'epoch/forward':"
    )
    assert lines[1] == f"memory of {device}"
    here = "test_an_error_in_a_phase_has_one_note_with_table_phase_holders_and_a_remedy"
    path = f"OutOfMemoryError traceback -> {here}.<locals>.fill() local 'batch' ['images']"
    assert f"     40.00 MiB  {path}" in lines
    assert "     40.00 MiB  other tensors in 1" in lines
    assert "30.00 MiB were asked for, and 6.00 MiB more were needed." in lines


@of_a_full_device
def test_optimizer_states_that_would_have_fitted_on_the_host_are_offered(
    device: torch.device,
) -> None:
    model = torch.nn.Linear(1024, 2048, bias=False, device=device)  # 8 MiB
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    note = note_of(lambda: megabytes(36, device), "update_actor")
    assert "this would have made room:" in note
    assert (
        "     13.00 MiB  of optimizer state: residency.offload_optimizer(optimizer, "
        'bucket="1MiB", slots=3) keeps it on the host'
    ) in note
    assert "local 'optimizer'.state['weight']['exp_avg']" in note


@of_a_full_device
@pytest.mark.parametrize("width", [1080, pytest.param(1040, marks=pytest.mark.whole)])
def test_an_offload_that_is_offered_fits_when_it_is_taken_by_the_letter(
    device: torch.device, width: int
) -> None:
    def train(**options: Any) -> None:
        layers = [torch.nn.Linear(width, width, device=device) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        if options:
            residency.offload_optimizer(optimizer, **options)
        for _ in range(2):
            model(torch.ones(8, width, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    note = note_of(train, "update_actor")
    gc.collect()  # the model's frame went with the error
    (offer,) = (line for line in note.splitlines() if "offload_optimizer" in line)
    options = re.search(r'bucket="(\w+)", slots=(\d)', offer)
    assert options is not None
    train(bucket=options[1], slots=int(options[2]))


@of_a_full_device
def test_a_clone_for_a_save_is_offered_before_the_optimizers_states(device: torch.device) -> None:
    model = torch.nn.Linear(1024, 2048, bias=False, device=device)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    note = note_of(lambda: megabytes(30, device), "update_actor")
    assert "      8.00 MiB  in copies of parameters or states, a clone for a save perhaps, " in note
    assert "local 'saved' ['weight']" in note
    assert saved


def layers(number: int, **options: Any) -> torch.nn.Module:  # of 4 MiB each
    return torch.nn.Sequential(
        *(torch.nn.Linear(1024, 1024, bias=False, **options) for _ in range(number))
    )


@of_a_full_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_error_amid_a_move_counts_what_is_still_on_the_host(
    dtype: torch.dtype, device: torch.device
) -> None:
    trained = layers(4, device=device)
    other = layers(40)
    num_bytes = 4 * MIB if dtype is torch.float32 else 2 * MIB
    note = note_of(lambda: other.to(device, dtype), "validate")
    moved = sum(each.device == device for each in other.parameters())
    assert 0 < moved < 40
    free = _device.memory_info(device)[0]
    (line,) = [each for each in note.splitlines() if "more were needed" in each]
    short, rest = (float(each) for each in re.findall(r"([0-9.]+) MiB (?:more|for)", line))
    assert round(short + rest) == ((40 - moved) * num_bytes - free) // MIB
    assert line.endswith(" for the rest of this module.")
    assert "a second model" not in note
    assert trained


@of_a_full_device
def test_a_second_model_amid_its_move_is_known_by_all_of_its_shapes(device: torch.device) -> None:
    trained, again = layers(8, device=device), layers(8)
    note = note_of(lambda: again.to(device), "validate")
    assert "this would have made room:" in note
    assert "     32.00 MiB  in a second model of the same shapes, " in note
    assert trained


@of_a_full_device
def test_cycles_and_pieces_between_live_tensors_are_offered(device: torch.device) -> None:
    class Node:
        pass

    gc.disable()
    try:
        node: Any = Node()
        node.itself, node.tensor = node, megabytes(40, device)
        del node
        note = note_of(lambda: megabytes(60, device), "update_actor")
    finally:
        gc.enable()
        gc.collect()
    assert "     40.00 MiB  in reference cycles: gc.collect() frees it" in note


def test_another_error_gets_no_note(device: torch.device) -> None:
    with pytest.raises(ValueError, match="other") as caught, residency.phase("epoch"):
        raise ValueError("other")
    assert not hasattr(caught.value, "__notes__")


def test_an_explanation_that_fails_leaves_the_error_as_it_is(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(_post_mortem, "find_holders", fail)
    note = note_of(lambda: megabytes(100, device), "update_actor")
    assert note.endswith("could not be written: RuntimeError: broken")
    assert "could not explain" in caplog.text


def test_an_explanation_takes_nothing_on_a_full_device_and_keeps_nothing(
    device: torch.device,
) -> None:
    kept = megabytes(40, device)
    before = torch.accelerator.memory_stats()
    error = torch.OutOfMemoryError("Tried to allocate 1.00 GiB")
    explain(error)
    assert torch.accelerator.memory_stats() == before
    assert "40.00 MiB" in error.__notes__[0]
    explain(error)
    assert len(error.__notes__) == 1
    del kept
    assert torch.accelerator.memory_allocated() == 0


def test_a_recording_explains_too(device: torch.device, tmp_path: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, residency.record(tmp_path / "run.jsonl"):
        megabytes(100, device)
    assert caught.value.__notes__[0].startswith("residency: the device's memory when this failed:")


@of_a_full_device
def test_an_uncaught_error_of_a_recorded_process_is_explained_in_what_it_prints(
    run_python: Callable[..., str], tmp_path: Any
) -> None:
    program = """
import sys
from residency import sim
from residency._memory._post_mortem import explain_uncaught
explain_uncaught()
sys.stderr = sys.stdout
device = sim.enable("16MiB")
import torch
kept = [torch.empty(12 << 20, dtype=torch.uint8, device=device)]
torch.empty(8 << 20, dtype=torch.uint8, device=device)
"""
    printed = run_python(program, status=1)
    assert "torch.OutOfMemoryError: sim out of memory" in printed
    assert "12.00 MiB  __main__.kept[0]" in printed


def test_the_command_line_shows_the_explanation(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from residency._cli import _main

    def run(arguments: Any) -> int:
        megabytes(100, device)
        return 0

    monkeypatch.setattr(_main._demo_verb, "run", run)
    assert _main.main(["demo"]) == 2
    assert "residency: the device's memory when this failed" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["1.13", "2.30", "4.35"])  # times 100 a little less than whole
def test_a_size_in_a_message_is_read_to_its_last_decimal(size: str) -> None:
    num_bytes = asked_bytes(f"CUDA out of memory. Tried to allocate {size} GiB.")
    assert format_bytes(num_bytes or 0) == f"{size} GiB"
