"""The two processes of the case "hand-off": one trains, one needs a fixed block after every step.

Each is a real process that takes orders and answers each. They share one device: the real one, or a
simulated one by its name. `trainer` and `engine` are such processes, from their first line to the
last; orders that come before the imports are over wait in the pipe.
"""

from __future__ import annotations

import importlib
import os
import zlib
from typing import Any

import torch

import residency
from residency import _device, sim
from residency._demo._child import answer, messages
from residency._demo._corpus import read_corpus, training_batch
from residency._demo._model import make_model, train_on
from residency._demo._settings import settings_from
from residency._units import parse_bytes

_SEED_OF_LENGTHS = 7
_NUM_SHORT_STEPS = 4
_GRANULE = parse_bytes("2MiB")  # in which torch's allocator asks for a large block


class Trainer:
    """A trainer whose batches change their length from step to step."""

    def __init__(self, *, share: str, capacity_bytes: int, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self._device = take_device(share, capacity_bytes)
        self._settings = settings_from(settings)
        self._corpus = read_corpus()
        model = make_model(self._settings.model, seed=self._settings.seed)
        self._model = model.to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._losses: list[float] = []
        self._num_flushes = 0
        self._count_flushes()

    def step(self, number: int) -> dict[str, Any]:
        """Trains on one batch."""
        seed, rows, columns = self._settings.seed, self._settings.num_rows, self._length(number)
        batch = training_batch(self._corpus, seed=seed, step=number, rows=rows, columns=columns)
        train_on(self._model, self._optimizer, batch.to(self._device), self._losses)
        return self.memory()

    def memory(self) -> dict[str, Any]:
        """Returns the figures of this moment."""
        state = residency.memory_state(self._device)
        return {
            "reserved": state.reserved,
            "free": state.free,
            "outside": state.outside,
            "peak": state.peak_reserved,
            "num_flushes": self._num_flushes,
        }

    def hand_off(self, peer: str) -> dict[str, Any]:
        """Lets the other process have what it asks for."""
        before = self.memory()
        with residency.hand_off(0, peer=peer):
            inside = self.memory()
        return {"before": before, "inside": inside}

    def outcome(self) -> dict[str, Any]:
        """Returns what was computed: losses, and sums over the bytes of every parameter."""
        sums = {
            name: zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes())
            for name, value in self._model.named_parameters()
        }
        return {"losses": self._losses, "sums": sums}

    def _length(self, number: int) -> int:
        """Returns the columns of a step's batch: most are short, a few are long."""
        generator = torch.Generator().manual_seed(_SEED_OF_LENGTHS + number)
        share = torch.rand(1, generator=generator).item() ** 2
        if number <= _NUM_SHORT_STEPS:
            share = min(share, 0.1)
        return max(1, round(self._settings.num_columns * (0.1 + 0.9 * share)))

    def _count_flushes(self) -> None:
        real = torch.accelerator.empty_cache

        def counted() -> None:
            self._num_flushes += 1
            real()

        torch.accelerator.__dict__["empty_cache"] = counted


class Engine:
    """A process that needs one block of the device for a moment, as an engine its cache."""

    def __init__(self, *, share: str, capacity_bytes: int) -> None:
        self._device = take_device(share, capacity_bytes)
        torch.zeros(1, device=self._device)  # a real device makes the process's context
        torch.accelerator.empty_cache()

    def leave(self, num_bytes: int) -> dict[str, Any]:
        """Takes all of the device but so much, for good: a large one becomes a small one."""
        free, _ = torch.accelerator.get_memory_info(self._device)
        rest = max(0, free - num_bytes) // _GRANULE * _GRANULE
        self._ballast = torch.empty(rest, dtype=torch.uint8, device=self._device)
        return {}

    def allocate(self, num_bytes: int) -> dict[str, Any]:
        """Takes the block and gives it back, as code that trusts the other side does."""
        try:
            block = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return {"is_out_of_memory": True}
        block.fill_(1)
        del block
        torch.accelerator.empty_cache()
        return {"is_out_of_memory": False}

    def take_over(self, num_bytes: int, peer: str) -> dict[str, Any]:
        """Asks for the block first."""
        with residency.take_over(num_bytes, peer=peer):
            return self.allocate(num_bytes)


def take_device(share: str, capacity_bytes: int) -> torch.device:
    """Returns the accelerator, limited; the simulated one if there is no other."""
    # cuBLAS reads this when its first handle is made; deterministic algorithms refuse without.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = _device.accelerator()
    if found is None:
        return sim.enable(capacity_bytes, share=share, workspaces=False)
    return found


def trainer() -> None:
    """Runs the process of the trainer."""
    importlib.import_module("transformers.models.qwen3.modeling_qwen3")  # takes its time
    _obey(Trainer)


def engine() -> None:
    """Runs the process of the engine."""
    _obey(Engine)


def _obey(kind: type[Trainer] | type[Engine]) -> None:
    """Carries out what comes until it ends; the first order is what the object is made of."""
    made: object = None
    for order in messages():
        name, found = order.pop("order"), {}
        try:
            if name == "begin":
                made = kind(**order)
            else:
                found = getattr(made, name)(**order)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"}
        answer(**found)
