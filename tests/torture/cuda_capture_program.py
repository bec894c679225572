"""Programs about captured graphs of the accelerator in CUDA's place, served by ``cuda_program.py``.

A captured program, replayed on new inputs, has the numbers of the same program run eagerly; what
CUDA does not permit during a capture is refused in its words, and the process goes on.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from cuda_bench import Actions, fails
from torch.nn import functional

from residency import sim

FORBIDDEN = "operation not permitted when stream is capturing"

Step = Callable[[list[torch.Tensor]], None]


class Captures(Actions):
    """A program of kernels over a few static buffers, run eagerly and as a graph."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        sim.enable(
            "1GiB",
            device="cuda",
            schedule=self.chance.choice(["late", "overtake", "eager"]),
            context=0,
            workspaces=False,
        )
        self.width = self.chance.choice([3, 64, 257])
        self.buffers = [torch.randn(self.width, self.width, device="cuda") for _ in range(3)]
        self.side = torch.cuda.Stream()

    def steps(self) -> list[Step]:
        """Draws a program."""
        names = [
            "add",
            "mm",
            "dropout",
            "randn",
            "temporary",
            "side",
            "softmax",
            "copy",
            "backward",
        ]
        drawn = []
        for _ in range(self.chance.randrange(1, 7)):
            name = self.chance.choice(names)
            into, source = self.chance.randrange(3), self.chance.randrange(3)
            number = self.chance.random()
            self.note(f"{name} {into} {source}")
            drawn.append(self.step(name, into, source, number))
        return drawn

    def step(self, name: str, into: int, source: int, number: float) -> Step:
        def add(b: list[torch.Tensor]) -> None:
            b[into].add_(b[source], alpha=number)

        def mm(b: list[torch.Tensor]) -> None:
            b[into].copy_((b[into] @ b[source]).tanh())

        def dropout(b: list[torch.Tensor]) -> None:
            b[into].copy_(functional.dropout(b[source], number))

        def randn(b: list[torch.Tensor]) -> None:
            b[into].add_(torch.randn(b[into].shape, device="cuda"))

        def temporary(b: list[torch.Tensor]) -> None:
            kept = [b[source] * i for i in range(4)]
            del kept[1]
            kept.append(b[into].repeat(3, 1).sort(0).values[: self.width])
            b[into].copy_(torch.stack(kept).mean(0))

        def side(b: list[torch.Tensor]) -> None:
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                b[into].mul_(number)
            here.wait_stream(self.side)

        def softmax(b: list[torch.Tensor]) -> None:
            b[into].copy_(b[source].softmax(1))

        def copy(b: list[torch.Tensor]) -> None:
            b[into].copy_(b[source])

        def backward(b: list[torch.Tensor]) -> None:
            leaf = b[source].detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad((leaf.sigmoid() * b[into]).sum(), leaf)
            b[into].copy_(gradient)

        made = locals()[name]
        assert callable(made)
        return made

    def run(self, program: list[Step]) -> None:
        for step in program:
            step(self.buffers)

    def fill(self) -> list[torch.Tensor]:
        values = [torch.randn(self.width, self.width) for _ in range(3)]
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)
        return values

    def held(self) -> list[torch.Tensor]:
        torch.cuda.synchronize()
        return [b.cpu() for b in self.buffers]

    def capture(self, program: list[Step], **options: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **options):
            assert torch.cuda.is_current_stream_capturing()
            self.run(program)
        assert not torch.cuda.is_current_stream_capturing()
        return graph


def captures(request: dict[str, Any], log: object) -> None:
    """Captures programs, alone and on one pool, and replays them in the order of their capture."""
    bench = Captures(request["seed"])
    chance = bench.chance
    with bench.told():
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        programs = [bench.steps() for _ in range(chance.randrange(1, 4))]
        graphs: list[torch.cuda.CUDAGraph] = []
        pool = chance.choice([None, torch.cuda.graph_pool_handle()])
        for program in programs:
            values = bench.fill()
            state = torch.cuda.get_rng_state()
            options: dict[str, Any] = {"pool": pool} if pool else {}
            if graphs and chance.random() < 0.5:
                options = {"pool": graphs[-1].pool()}
            options["capture_error_mode"] = chance.choice(["global", "thread_local", "relaxed"])
            graphs.append(bench.capture(program, **options))
            assert torch.equal(torch.cuda.get_rng_state(), state), "a capture draws nothing"
            assert all(map(torch.equal, bench.held(), values)), "a capture runs nothing"
            if pool:
                assert tuple(graphs[-1].pool()) == tuple(pool) or "pool" in options
        pools = {tuple(graph.pool()) for graph in graphs}
        assert (0, 0) not in pools
        segments = torch.cuda.memory_snapshot()
        private = [s for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
        assert {tuple(s["segment_pool_id"]) for s in private} <= pools
        stats = torch.cuda.memory_stats()
        for one in pools:
            name = f"reserved_bytes_by_private_pools.{one[0]}_{one[1]}.all.current"
            listed = sum(s["total_size"] for s in private if tuple(s["segment_pool_id"]) == one)
            assert stats.get(name, 0) == listed, (name, listed)
        assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved()
        for _ in range(chance.randrange(1, 5)):
            which = range(len(graphs)) if chance.random() < 0.5 else [chance.randrange(len(graphs))]
            values, seed = bench.fill(), chance.randrange(1 << 40)
            torch.cuda.manual_seed(seed)
            bench.note(f"replay {list(which)}")
            before = torch.cuda.memory_allocated()
            for index in which:
                graphs[index].replay()
            after = torch.cuda.memory_allocated()
            assert after <= before, (before, after)  # threads of autograd drop theirs late
            found, state = bench.held(), torch.cuda.get_rng_state()
            for buffer, value in zip(bench.buffers, values, strict=True):
                buffer.copy_(value)
            torch.cuda.manual_seed(seed)
            for index in which:
                bench.run(programs[index])
            assert all(map(same, found, bench.held())), "other numbers than eagerly"
            assert torch.equal(state, torch.cuda.get_rng_state()), "another offset than eagerly"
        for graph in graphs:
            if chance.random() < 0.5:
                graph.reset()
                with fails("replay without a preceding successful capture"):
                    graph.replay()
        graphs.clear()
        del graph
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        wait_for(base[0])
        torch.cuda.empty_cache()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == base
        assert all(tuple(s["segment_pool_id"]) == (0, 0) for s in torch.cuda.memory_snapshot())


def wait_for(num_bytes: int) -> None:
    """Waits until so many bytes are allocated: threads of autograd drop theirs after the call."""
    end = time.monotonic() + 20
    while torch.cuda.memory_allocated() != num_bytes:
        assert time.monotonic() < end, (torch.cuda.memory_allocated(), num_bytes)
        time.sleep(0.001)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def refused_captures(request: dict[str, Any], log: object) -> None:
    """Does in captures what CUDA does not permit; afterwards all works as before."""
    bench = Captures(request["seed"])
    chance, buffers = bench.chance, bench.buffers
    outside = torch.cuda.Event()
    outside.record()
    host, locked = torch.ones(bench.width, bench.width), torch.ones(bench.width).pin_memory()
    other = torch.cuda.Stream()

    def unjoined() -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            buffers[0].add_(1)

    def inside_event() -> None:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()

    def nested() -> None:
        torch.cuda.CUDAGraph().capture_begin()

    def wait_outside() -> None:
        torch.cuda.current_stream().wait_event(outside)
        buffers[0].add_(1)

    bad: dict[str, tuple[Callable[[], Any], str]] = {
        "synchronize": (torch.cuda.synchronize, FORBIDDEN),
        "stream.synchronize": (lambda: torch.cuda.current_stream().synchronize(), FORBIDDEN),
        "stream.query": (lambda: torch.cuda.current_stream().query(), FORBIDDEN),
        "item": (lambda: buffers[0].sum().item(), FORBIDDEN),
        "cpu": (lambda: buffers[0].cpu(), f"{FORBIDDEN}|unless the CPU tensor is pinned"),
        "nonzero": (lambda: buffers[0].nonzero(), FORBIDDEN),
        "mask": (lambda: buffers[0][buffers[1] > 0], FORBIDDEN),
        "pageable": (lambda: buffers[0].copy_(host), "unless the CPU tensor is pinned"),
        "event.synchronize": (inside_event, "capturing"),
        "event outside": (outside.synchronize, FORBIDDEN),
        "unjoined": (unjoined, "unjoined work"),
        "nested": (nested, ""),
        "nested graph": (lambda: bench.capture([]), ""),
        "seed": (lambda: torch.cuda.get_rng_state(), "capture"),
        "seed again": (lambda: torch.cuda.manual_seed(torch.cuda.initial_seed() + 1), "captur"),
        "replay": (lambda: ready.replay(), "Cannot prepare for replay"),
        "wait outside": (wait_outside, "dependency created on uncaptured work|isolation|captur"),
        "raise": (lambda: 1 / 0, ""),
    }
    # What is refused before it reaches the device leaves the capture as it is.
    mild = ("raise", "seed", "seed again", "replay", "pageable", "cpu", "nested", "nested graph")
    with bench.told():
        ready = bench.capture([bench.step("add", 0, 1, 0.5)])
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        with fails("non-default stream"):
            torch.cuda.CUDAGraph().capture_begin()
        with fails("replay without a preceding successful capture"):
            torch.cuda.CUDAGraph().replay()
        for _ in range(chance.randrange(2, 7)):
            name = chance.choice(sorted(bad))
            bench.note(name)
            call, words = bad[name]
            values = bench.fill()
            before, after = bench.steps()[:2], bench.steps()[:2]
            is_caught = chance.random() < 0.4
            graph = torch.cuda.CUDAGraph()
            failed: BaseException | None = None
            inner: BaseException | None = None
            try:
                with torch.cuda.graph(graph):
                    bench.run(before)
                    try:
                        call()
                    except (RuntimeError, ZeroDivisionError) as error:
                        inner = error
                        if not is_caught:
                            raise
                    if is_caught and inner is None:
                        bench.run(after)
            except (RuntimeError, ZeroDivisionError) as error:
                failed = error
            said = f"{inner} / {failed}"
            bench.note(said[:300])
            if name == "unjoined":
                assert failed is not None, "unjoined work was not refused"
                assert "unjoined work" in str(failed), said
            elif name not in mild:
                assert inner is not None, f"{name} was not refused"
                fits(words, inner)
                assert failed is not None, f"{name} did not end the capture"
            elif name != "raise":
                assert inner is not None, f"{name} was not refused"
                fits(words, inner)
            if failed is not None and name not in mild:
                with fails("without a preceding successful capture"):
                    graph.replay()
            inner = failed = None
            del graph
            gc.collect()
            assert not torch.cuda.is_current_stream_capturing()
            torch.cuda.set_stream(torch.cuda.default_stream())  # torch leaves the capture's current
            assert all(map(torch.equal, bench.held(), values)), "something of the capture ran"
            torch.cuda.empty_cache()
            wait_for(base)
            program = bench.steps()
            graph = bench.capture(program)
            torch.cuda.manual_seed(5)
            graph.replay()
            found = bench.held()
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
            torch.cuda.manual_seed(5)
            bench.run(program)
            assert all(map(same, found, bench.held())), "a capture after a refused one"
            del graph, program, before, after, found
        assert torch.equal(locked, torch.ones(bench.width))


def fits(words: str, error: BaseException) -> None:
    with fails(words, type(error)):
        raise error
