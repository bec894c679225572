"""Forward and backward passes as phases: one visit each a step, of whatever modules are called."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import residency
from residency._memory import open_phases
from residency._report import read_run

pytestmark = pytest.mark.sim_device(capacity=256 << 20, schedule="late", check_races=False)
MIB = 1 << 20


class Recorded:
    """A recording, and what its file says when it has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def running(self) -> Iterator[None]:
        with residency.record(self.path):
            yield
        assert open_phases() == ()
        assert read_run(self.path).warnings == []

    def ends(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in lines if line["kind"] == "end"]

    def phases(self) -> list[str]:
        return [line["phase"] for line in self.ends()]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "run.jsonl")


@pytest.fixture
def model(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8))).to(device)


def batch(device: torch.device) -> torch.Tensor:
    return torch.ones(2, 8, device=device)


def test_a_step_has_one_forward_and_one_backward_whatever_modules_it_calls(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    optimizer, criterion = torch.optim.SGD(model.parameters()), nn.MSELoss()
    with recorded.running():
        for _ in range(3):
            hidden = model[0](batch(device))
            criterion(model[1](hidden), batch(device)).backward()
            optimizer.step()
    assert recorded.phases() == ["forward", "backward", "optimizer_step"] * 3


def test_the_loss_belongs_to_the_forward_pass(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    with recorded.running():
        loss = model(batch(device)).sum()
        torch.empty(40 * MIB, dtype=torch.uint8, device=device)  # as of logits in float32
        loss.backward()
    forward, _ = recorded.ends()
    assert forward["is_peak_exact"]
    assert forward["peak"] >= 40 * MIB


def test_a_call_without_gradients_is_no_phase(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    with recorded.running(), torch.no_grad():
        model(batch(device))
    assert recorded.phases() == []


def test_passes_are_inside_the_phases_that_a_script_names(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    with recorded.running():
        with residency.phase("update"):
            model(batch(device)).sum().backward()
        with residency.phase("update"):
            model(batch(device))  # which the end of the phase ends
        with residency.phase("forward"):
            loss = model(batch(device)).sum()
        with residency.phase("backward"):
            loss.backward()
    update = ["update/forward", "update/backward", "update", "update/forward", "update"]
    assert recorded.phases() == [*update, "forward", "backward"]
    assert not any(line["error"] for line in recorded.ends())


def test_passes_of_a_closure_are_inside_the_step(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    def closure() -> torch.Tensor:
        loss = model(batch(device)).sum()
        loss.backward()
        return loss

    with recorded.running():
        torch.optim.SGD(model.parameters()).step(closure)
    inside = ["optimizer_step/forward", "optimizer_step/backward"]
    assert recorded.phases() == [*inside, "optimizer_step"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_activations_are_part_of_the_backward_pass(
    device: torch.device, model: nn.Module, recorded: Recorded, use_reentrant: bool
) -> None:
    given = batch(device).requires_grad_()
    with recorded.running():
        hidden = model[0](given)
        checkpoint(model[1], hidden, use_reentrant=use_reentrant).sum().backward()
    assert recorded.phases() == ["forward", "backward"]


def test_gradients_that_are_asked_for_are_a_backward_pass(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    with recorded.running():
        loss = model(batch(device)).sum()
        torch.autograd.grad(loss, list(model.parameters()))
    assert recorded.phases() == ["forward", "backward"]


class Broken(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")


def test_an_error_ends_the_pass_and_the_next_one_is_recorded(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    with recorded.running():
        with pytest.raises(ValueError, match="broken"):
            nn.Sequential(model, Broken())(batch(device))
        with pytest.raises(RuntimeError, match="does not require grad"):
            batch(device).backward()
        model(batch(device)).sum().backward()
    assert recorded.phases() == ["forward", "backward"] * 2
    first, second, *others = [line["error"] for line in recorded.ends()]
    assert first == "ValueError: broken"
    assert second.startswith("RuntimeError: element 0 of tensors does not require grad")
    assert others == [None, None]


class BrokenStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ValueError("broken step")


def test_a_step_that_fails_ends_its_phase_though_the_script_goes_on(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    broken, optimizer = (kind(model.parameters()) for kind in (BrokenStep, torch.optim.SGD))
    with recorded.running():
        for each in (broken, optimizer):
            model(batch(device)).sum().backward()
            with suppress(ValueError):
                each.step()
    assert recorded.phases() == ["forward", "backward", "optimizer_step"] * 2
    errors = [line["error"] for line in recorded.ends()]
    assert errors[2] is not None  # which one is not known, as the script caught it
    assert errors[:2] + errors[3:] == [None] * 5


def test_a_pass_without_an_end_ends_with_the_recording_in_whichever_thread(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    with recorded.running():
        thread = threading.Thread(target=model, args=(batch(device),))
        thread.start()
        thread.join()
        model(batch(device))  # the other thread's pass goes on
    assert recorded.phases() == ["forward"]


def test_a_backward_pass_ends_the_forward_pass_of_another_thread(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    with recorded.running():
        loss = model(batch(device)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        model(batch(device)).sum().backward()
    assert recorded.phases() == ["forward", "backward"] * 2


def test_a_compiled_model_has_the_same_phases_and_no_break_in_its_graph(
    device: torch.device, model: nn.Module, recorded: Recorded
) -> None:
    num_graphs = 0

    def backend(graph: Any, examples: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    with recorded.running():
        whole = torch.compile(model, backend=backend, fullgraph=True)

        @torch.compile(backend=backend, fullgraph=True)
        def step(given: torch.Tensor) -> torch.Tensor:
            return model(given).sum()

        for _ in range(2):
            whole(batch(device)).sum().backward()
            step(batch(device)).backward()
    assert num_graphs == 2
    assert recorded.phases() == ["forward", "backward", "backward"] * 2
