"""A call that is over has freed its memory: none waits for Python's garbage collector.

A model that is dropped after a restore, and stays on the device until the collector comes, is the
very peak that this library is to take away.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import residency


class Training:
    """A model and its offloaded optimizer, which have made a step and a save."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.model = nn.Linear(64, 64, device=device)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters())
        residency.offload_optimizer(self.optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def save(self, state: dict[str, Any] | None = None, **options: Any) -> None:
        with residency.Checkpointer(self.folder, **options) as checkpointer:
            checkpointer.save(1, self.state if state is None else state).wait()

    def restore(self, state: dict[str, Any] | None = None) -> None:
        with residency.Checkpointer(self.folder) as checkpointer:
            checkpointer.restore(self.state if state is None else state)

    def damage(self) -> None:
        path = max(self.folder.rglob("*.safetensors"), key=lambda each: each.stat().st_size)
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)


def _save_and_restore(it: Training) -> None:
    it.save()
    it.restore()


def _save_with_sums(it: Training) -> None:
    it.save(verify="full")
    it.save(verify="read")


def _restore_plain(it: Training) -> None:
    it.save()
    residency.onload_optimizer(it.optimizer)
    it.restore()


def _refused_save(it: Training) -> None:
    it.save({**it.state, "odd": object()})


def _refused_restore(it: Training) -> None:
    it.save()
    it.restore({"model": nn.Linear(64, 65, device=it.model.weight.device)})


def _damaged_restore(it: Training) -> None:
    it.save()
    it.damage()
    it.restore()


def _load_into(it: Training) -> None:
    it.save()
    residency.load_into(it.model, it.folder / "step-00000001" / "model.safetensors")


def _damaged_load(it: Training) -> None:
    it.save()
    path = it.folder / "step-00000001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    residency.load_into(it.model, path)


def _snapshot(it: Training) -> None:
    taken = residency.snapshot(it.state)
    it.step()
    taken.wait()


def _refused_snapshot(it: Training) -> None:
    residency.snapshot({**it.state, "odd": object()})


def _state_dicts(it: Training) -> None:
    it.optimizer.load_state_dict(it.optimizer.state_dict())
    it.step()


def _refused_load(it: Training) -> None:
    it.optimizer.load_state_dict({"state": {}, "param_groups": []})


def _on_and_off(it: Training) -> None:
    residency.onload_optimizer(it.optimizer)
    it.step()
    residency.offload_optimizer(it.optimizer, resident="1MiB", master_weights=False)
    it.step()


def _refused_offload(it: Training) -> None:
    residency.offload_optimizer(torch.optim.AdamW(it.model.parameters()), bucket="-1B")


def _failed_step(it: Training) -> None:
    it.model.weight.grad = torch.ones_like(it.model.weight).to_sparse()
    it.optimizer.step()


def _park(it: Training) -> None:
    residency.park(it.model)
    residency.unpark(it.model)


def _hand_off(it: Training) -> None:
    with residency.hand_off("1MiB", park=[it.optimizer, it.model]):
        pass


def _refused_hand_off(it: Training) -> None:
    with residency.hand_off("6GiB", park=[it.optimizer], timeout=0.1):
        pass


def _look(it: Training) -> None:
    residency.memory_state()
    residency.holders()


def _phases(it: Training) -> None:
    with residency.record(it.folder / "run.jsonl"), residency.phase("step"):
        it.step()


CALLS = {
    _save_and_restore: None,
    _save_with_sums: None,
    _restore_plain: None,
    _refused_save: residency.RefusedError,
    _refused_restore: residency.RefusedError,
    _damaged_restore: residency.CorruptSaveError,
    _load_into: None,
    _damaged_load: residency.CorruptSaveError,
    _snapshot: None,
    _refused_snapshot: residency.RefusedError,
    _state_dicts: None,
    _refused_load: ValueError,
    _on_and_off: None,
    _refused_offload: residency.InvalidArgumentError,
    _failed_step: RuntimeError,
    _park: None,
    _hand_off: None,
    _refused_hand_off: residency.HandOffError,
    _look: None,
    _phases: None,
}


@pytest.fixture
def collector_is_off(device: torch.device) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sim
@pytest.mark.sim_device(schedule="late")
@pytest.mark.parametrize(("call", "error"), CALLS.items())
def test_what_a_call_took_waits_for_no_garbage_collection(
    device: torch.device,
    tmp_path: Path,
    pinned_bytes: Callable[[], int],
    collector_is_off: None,
    call: Callable[[Training], None],
    error: type[Exception] | None,
) -> None:
    def held() -> tuple[int, int]:
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated(), pinned_bytes()

    def act(number: int) -> None:
        training = Training(device, tmp_path / str(number))
        with nullcontext() if error is None else suppress(error):
            call(training)
            assert error is None

    act(1)  # the first call also makes what the process keeps
    gc.collect()
    before = held()
    act(2)
    assert held() == before
