"""Probes of a run: saves beside steps, figures, parkings, and graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import residency
from benchmarks.probe.probed import ProbedDevice, milliseconds
from residency import _device
from residency._errors import SimulatorError
from residency._transfer import gate_of
from residency._units import MIB, format_bytes

_NUM_STEPS = 5
_NUM_SAVES = 3
_NUM_PHASES = 50


@dataclass(frozen=True, slots=True)
class _ModelInTraining:
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def steps(self) -> None:
        for _ in range(_NUM_STEPS):
            self.step()

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def is_at(self, values: list[Tensor]) -> bool:
        return all(map(torch.equal, self.model.parameters(), values))


def _begin(bench: ProbedDevice, num_layers: int, *, capturable: bool = False) -> _ModelInTraining:
    torch.manual_seed(0)
    width = bench.pick(2048, 128)
    layers = (nn.Linear(width, width, bias=False) for _ in range(bench.pick(num_layers, 2)))
    model = nn.Sequential(*layers).to(bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True, capturable=capturable)
    run = _ModelInTraining(model, optimizer, torch.randn(width // 2, width, device=bench.device))
    run.step()
    return run


def snapshots(bench: ProbedDevice) -> None:
    """Takes snapshots beside steps: the second takes the first one's pages."""
    run = _begin(bench, 64)
    _, _, alone = bench.timed(run.steps)
    for index in range(_NUM_SAVES):
        values, allocated = run.copy(), _device.memory_allocated()
        _device.reset_peak()
        snapshot, call = bench.called(lambda: residency.snapshot(run.state()))
        extra = _device.max_memory_allocated() - allocated
        _, _, beside = bench.timed(run.steps)
        taken: dict[str, Tensor] = snapshot.tree["model"]
        is_same = all(torch.equal(a.cpu(), b) for a, b in zip(values, taken.values(), strict=True))
        times = f"steps {milliseconds(beside)}, alone {milliseconds(alone)}"
        bench.check(
            is_same,
            f"snapshot {index + 1} has the values",
            f"the call {milliseconds(call)}, {times}",
        )
        bench.check(extra == 0, f"snapshot {index + 1} takes no device memory", format_bytes(extra))
        del snapshot, taken, values
    gc.collect()
    bench.check(not len(gate_of(bench.device)), "no later step waits for a snapshot that is over")


def checkpoints(bench: ProbedDevice) -> None:
    """Saves to the disk beside a step, with an offloaded optimizer, and restores."""
    run = _begin(bench, 32)
    residency.offload_optimizer(run.optimizer, bucket="8MiB")
    run.step()
    with residency.Checkpointer(bench.folder / "saves", keep=1) as checkpointer:
        checkpointer.prepare(run.state())
        for index in range(_NUM_SAVES):
            values = run.copy()
            save, call = bench.called(lambda n=index: checkpointer.save(n, run.state()))  # type: ignore[misc]
            run.step()
            save.wait()
            figures = save.statistics()
            text = f"{format_bytes(figures.written_bytes)} in {figures.write_seconds:.2f} s"
            bench.info(f"save {index + 1}", f"the call {milliseconds(call)}, {text}")
        _, _, seconds = bench.timed(lambda: checkpointer.restore(run.state()))
        bench.check(run.is_at(values), "restore brings the saved values", milliseconds(seconds))


def figures(bench: ProbedDevice) -> None:
    """Holds ``memory_state`` against what ``empty_cache`` gives back, in four situations."""
    gc.collect()
    _device.empty_cache(bench.device)
    held = [_bytes(bench, 3 * MIB), _bytes(bench, MIB // 10)]
    _check_law(bench, "pieces beside live tensors")
    passing = _bytes(bench, 64 * MIB)
    del passing
    _check_law(bench, "a free segment")
    _with_graph(bench, lambda: _check_law(bench, "a captured graph is alive"))
    gc.collect()
    _check_law(bench, "no graph is alive any more")
    held += [_bytes(bench, 4000 * i + 4) for i in range(bench.pick(4000, 400))]
    _, seconds, _ = bench.timed(residency.memory_state)
    bench.info(f"memory_state with {len(held)} tensors", milliseconds(seconds))

    def visit() -> None:
        for _ in range(_NUM_PHASES):
            with residency.phase("step"):
                pass

    _, seconds, _ = bench.timed(visit)
    bench.info("a boundary of a phase", f"{seconds / _NUM_PHASES / 2 * 1e6:.0f} us")


def _bytes(bench: ProbedDevice, num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)


def _check_law(bench: ProbedDevice, when: str) -> None:
    state, seconds, _ = bench.timed(residency.memory_state)
    whole = sum(num_bytes or 0 for num_bytes in state.classes().values())
    free = _device.memory_info()[0]
    torch.accelerator.empty_cache()
    given = _device.memory_info()[0] - free
    # Whole segments of pools that have ended come back, too, and torch does not tell which have.
    most = state.returnable + state.draining + (state.stuck or 0) + state.pooled
    is_lawful = given <= most and (given >= state.returnable or not state.is_returnable_exact)
    text = f"{format_bytes(given)} came back, {format_bytes(state.returnable)} foretold"
    sizes = f"{text}, pooled {format_bytes(state.pooled)}, {milliseconds(seconds)}"
    is_true = is_lawful and whole == state.capacity
    bench.check(
        is_true, f"memory_state: {when}", sizes + "; " * bool(state.notes) + "; ".join(state.notes)
    )


def _with_graph(bench: ProbedDevice, look: Callable[[], None]) -> None:
    """Captures a graph that keeps a pool of its own, and looks while it is alive."""
    source = torch.ones(bench.pick(4096, 512), 4096, device=bench.device)
    try:
        graph = bench.module.CUDAGraph()
    except (AttributeError, SimulatorError) as error:
        return bench.info("graphs", str(error))
    with bench.module.graph(graph):
        passing = source * 2
        total = (passing + 1).sum()
    del passing
    look()
    del graph, total
    return None


def captured_steps(bench: ProbedDevice) -> None:
    """Captures a step into a graph after a snapshot of what it writes."""
    run = _begin(bench, 2, capturable=True)
    side = bench.module.Stream()
    side.wait_stream(bench.module.current_stream())
    with bench.module.stream(side):
        for _ in range(_NUM_SAVES):
            run.optimizer.step()
    bench.module.current_stream().wait_stream(side)
    residency.snapshot(run.state()).wait()
    try:
        graph = bench.module.CUDAGraph()
    except (AttributeError, SimulatorError) as error:
        return bench.info("graphs", str(error))
    values = run.copy()
    with bench.module.graph(graph):
        run.optimizer.step()
    graph.replay()
    return bench.check(not run.is_at(values), "a step is captured after a snapshot, and replayed")


def hand_offs(bench: ProbedDevice) -> None:
    """Frees the device for a block by parking a model and its optimizer."""
    width = 2048  # each parameter has a segment of its own, which parking gives back whole
    layers = (nn.Linear(width, width, bias=False) for _ in range(bench.pick(16, 2)))
    model = nn.Sequential(*layers).to(bench.device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [parameter.detach().cpu() for parameter in model.parameters()]
    num_bytes = sum(value.nbytes for value in values)
    gc.collect()
    _device.clear_workspaces(bench.device)  # from here on only parking frees enough
    _device.empty_cache(bench.device)
    need = _device.memory_info()[0] + num_bytes
    with residency.hand_off(need, park=[optimizer, model]) as reclaimed:
        free = _device.memory_info()[0]
    bench.check(free >= need, "hand_off frees the requested bytes", str(reclaimed.by_means()))
    is_back = all(torch.equal(p.cpu(), v) for p, v in zip(model.parameters(), values, strict=True))
    bench.check(is_back, "it brings everything back")
    optimizer.step()
    _, parked, _ = bench.timed(lambda: residency.park(model))
    _, back, _ = bench.timed(lambda: residency.unpark(model))
    text = f"{milliseconds(parked)} and {milliseconds(back)}"
    bench.info(f"park and unpark {format_bytes(num_bytes)}", text)
