"""The two processes of the case "hand-off": one trains, one needs a fixed block after every step.

Each is a real process that takes orders and answers each. They share one device: the real one, or a
simulated one by its name. `obey` is such a process, `Process` is how the case talks to it.
"""

from __future__ import annotations

import importlib
import os
import zlib
from typing import Any

from residency._demo._child import Child, answer, messages
from residency._units import parse_bytes

_SEED_OF_LENGTHS = 7
_NUM_SHORT_STEPS = 4
_GRANULE = parse_bytes("2MiB")  # in which torch's allocator asks for a large block


class Process:
    """One of the two, from the side that gives the orders."""

    def __init__(self, role: str) -> None:
        """Starts it; it makes its imports until it is to begin.

        Args:
            role: ``"trainer"`` or ``"engine"``.
        """
        self._child = Child(__name__, "obey")
        self.send("prepare", role=role)

    def begin(self, **options: Any) -> None:
        """Waits until it has its device.

        Args:
            options: What the class of its role takes.
        """
        self.receive()  # it is prepared
        self.ask("begin", **options)

    def ask(self, order: str, **arguments: object) -> dict[str, Any]:
        """Gives an order and waits for its answer."""
        self.send(order, **arguments)
        return self.receive()

    def send(self, order: str, **arguments: object) -> None:
        """Gives an order."""
        self._child.send(order=order, **arguments)

    def receive(self) -> dict[str, Any]:
        """Waits for the answer to the oldest order."""
        return self._child.receive()

    def end(self) -> None:
        """Lets it end, and waits for that."""
        self._child.end()


class Trainer:
    """A trainer whose batches change their length from step to step."""

    @staticmethod
    def prepare() -> None:
        """Imports what takes its time, and touches no device."""
        importlib.import_module("residency._demo._training")
        importlib.import_module("transformers.models.qwen3.modeling_qwen3")

    def __init__(self, *, share: str, capacity_bytes: int, settings: dict[str, Any]) -> None:
        import torch

        from residency import _device
        from residency._demo._corpus import read_corpus
        from residency._demo._settings import settings_from
        from residency._demo._training import make_model

        self._torch, self._figures = torch, _device
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self._device = take_device(share, capacity_bytes)
        self._settings = settings_from(settings)
        self._corpus = read_corpus()
        columns = self._settings.num_columns
        model = make_model(self._settings.model, seed=self._settings.seed, num_columns=columns)
        self._model = model.to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._losses: list[float] = []
        self._num_flushes = 0
        self._count_flushes()

    def step(self, number: int) -> dict[str, Any]:
        """Trains on one batch."""
        from residency._demo._corpus import training_batch

        settings = self._settings
        length = self._length(number)
        batch = training_batch(
            self._corpus, seed=settings.seed, step=number, rows=settings.num_rows, columns=length
        ).to(self._device)
        loss = self._model(input_ids=batch, labels=batch).loss
        loss.backward()
        self._losses.append(loss.item())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        del loss, batch
        return self.memory()

    def memory(self) -> dict[str, Any]:
        """Returns the figures of this moment."""
        from residency import memory_state

        state = memory_state(self._device)
        peak = state.peak_reserved
        figures = {"held": state.held, "reserved": state.reserved, "free": state.free}
        figures["outside"] = state.outside
        return {**figures, "peak": peak, "num_flushes": self._num_flushes}

    def hand_off(self, peer: str) -> dict[str, Any]:
        """Lets the other process have what it asks for."""
        import time

        import residency

        started, before = time.perf_counter(), self.memory()
        with residency.hand_off(0, peer=peer) as freed:
            seconds = time.perf_counter() - started
            inside = self.memory()
        return {"before": before, "inside": inside, "freed": freed.by_means(), "seconds": seconds}

    def outcome(self) -> dict[str, Any]:
        """Returns what was computed: losses, and sums over the bytes of every parameter."""
        sums = {
            name: zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes())
            for name, value in self._model.named_parameters()
        }
        return {"losses": self._losses, "sums": sums}

    def _length(self, number: int) -> int:
        """Returns the columns of a step's batch: most are short, a few are long."""
        generator = self._torch.Generator().manual_seed(_SEED_OF_LENGTHS + number)
        most = self._settings.num_columns
        share = self._torch.rand(1, generator=generator).item() ** 2
        if number <= _NUM_SHORT_STEPS:
            share = min(share, 0.1)
        return max(1, round(most * (0.1 + 0.9 * share)))

    def _count_flushes(self) -> None:
        real = self._torch.accelerator.empty_cache

        def counted() -> None:
            self._num_flushes += 1
            real()

        self._torch.accelerator.empty_cache = counted


class Engine:
    """A process that needs one block of the device for a moment, as an engine its cache."""

    @staticmethod
    def prepare() -> None:
        """Imports what takes its time, and touches no device."""
        importlib.import_module("torch")

    def __init__(self, *, share: str, capacity_bytes: int) -> None:
        import torch

        self._torch = torch
        self._device = take_device(share, capacity_bytes)
        torch.zeros(1, device=self._device)  # a real device makes the process's context
        torch.accelerator.empty_cache()

    def leave(self, num_bytes: int) -> dict[str, Any]:
        """Takes all of the device but so much, for good: a large one becomes a small one."""
        free, _ = self._torch.accelerator.get_memory_info(self._device)
        rest = max(0, free - num_bytes) // _GRANULE * _GRANULE
        self._ballast = self._torch.empty(rest, dtype=self._torch.uint8, device=self._device)
        return {"num_bytes": rest}

    def allocate(self, num_bytes: int) -> dict[str, Any]:
        """Takes the block and gives it back, as code that trusts the other side does."""
        try:
            block = self._torch.empty(num_bytes, dtype=self._torch.uint8, device=self._device)
        except self._torch.OutOfMemoryError as error:
            return {"is_out_of_memory": True, "message": str(error).partition("\n")[0]}
        block.fill_(1)
        del block
        self._torch.accelerator.empty_cache()
        return {"is_out_of_memory": False}

    def take_over(self, num_bytes: int, peer: str) -> dict[str, Any]:
        """Asks for the block first."""
        import residency

        with residency.take_over(num_bytes, peer=peer):
            return self.allocate(num_bytes)


def take_device(share: str, capacity_bytes: int) -> Any:
    """Returns the accelerator, limited; the simulated one if there is no other."""
    from residency import _device, sim

    # cuBLAS reads this when its first handle is made; deterministic algorithms refuse without.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = _device.accelerator()
    if found is None:
        return sim.enable(capacity_bytes, share=share, workspaces=False)
    return found


def obey() -> None:
    """Carries out what comes until it ends."""
    kind: Any = None
    made: object = None
    for order in messages():
        name, found = order.pop("order"), {}
        try:
            if name == "prepare":
                kind = {"trainer": Trainer, "engine": Engine}[order["role"]]
                kind.prepare()
            elif name == "begin":
                made = kind(**order)
            else:
                found = getattr(made, name)(**order)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"}
        answer(**found)
