"""Programs about streams, events, lost devices and bad settings of the accelerator in CUDA's place.

``cuda_program.py`` serves them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch
from cuda_bench import MIB, Actions, fails, on_thread

import residency
from residency import sim

LOST = "CUDA error: device-side assert triggered"

# Streams and events.


class Streams(Actions):
    """Buffers that streams write in turn, each turn ordered by events as CUDA documents them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        chance = self.chance
        self.clock = sim.Clock(h2d_bytes_per_second=10**9, d2h_bytes_per_second=2 * 10**9)
        self.has_clock = chance.random() < 0.5
        sim.enable(
            "1GiB",
            device="cuda",
            schedule=chance.choice(["late", "overtake", "eager"]),
            check_races=chance.random() < 0.7,
            clock=self.clock if self.has_clock else None,
        )
        self.streams = [torch.cuda.default_stream()]
        self.streams += [torch.cuda.Stream(priority=chance.choice([0, -1])) for _ in range(3)]
        self.buffers = [torch.zeros(200_000, device="cuda") for _ in range(3)]
        self.truth = [torch.zeros(200_000) for _ in range(3)]
        torch.cuda.synchronize()
        self.last: list[torch.cuda.Event | None] = [None] * 3

    def write(self) -> None:
        """Writes a buffer from another one, on a stream that waits for both."""
        stream = self.chance.choice(self.streams)
        into, source = self.chance.randrange(3), self.chance.randrange(3)
        number = self.chance.randrange(1, 9)
        self.note(f"write {into} from {source} on {stream.cuda_stream}")
        for index in {into, source}:
            event = self.last[index]
            if event is not None:
                self.wait(stream, event)
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() == stream
            self.buffers[into].mul_(0.5).add_(self.buffers[source], alpha=number)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.truth[into].mul_(0.5).add_(self.truth[source], alpha=number)
        self.last[into] = self.last[source] = event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        if self.chance.random() < 0.3:
            event.synchronize()
            assert event.query()
        elif self.chance.random() < 0.5:
            stream.wait_event(event)
        else:
            event.wait(stream)

    def look(self) -> None:
        """Reads a buffer, after its event alone."""
        index = self.chance.randrange(3)
        self.note(f"look {index}")
        event, stream = self.last[index], self.chance.choice(self.streams)
        if event is not None:
            self.wait(stream, event)
        home = torch.empty(200_000, pin_memory=True)
        with torch.cuda.stream(stream):
            home.copy_(self.buffers[index], non_blocking=True)
            done = stream.record_event()
        self.chance.choice([done.synchronize, stream.synchronize, torch.cuda.synchronize])()
        assert done.query()
        assert torch.equal(home, self.truth[index])
        self.last[index] = done

    def poll(self) -> None:
        """Asks again and again; what has ended stays ended."""
        event = next((e for e in self.last if e is not None), None)
        if event is None:
            return
        self.note("poll")
        for _ in range(100_000):
            if event.query():
                break
        else:
            raise AssertionError("a loop over query never ends")
        assert event.query()
        event.synchronize()

    def events(self) -> None:
        """Looks at what an event is before, while and after it is recorded."""
        self.note("events")
        stream = self.chance.choice(self.streams)
        fresh = torch.cuda.Event(enable_timing=True)
        assert fresh.query()  # as cudaEventQuery: nothing was recorded
        fresh.synchronize()
        fresh.wait(stream)
        stream.wait_event(fresh)
        plain, other = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
        with fails("must be recorded"):
            fresh.elapsed_time(other)
        other.record(stream)
        with fails("must be recorded"):
            fresh.elapsed_time(other)
        plain.record(stream)
        with fails("enable_timing"):
            other.elapsed_time(plain)
        other.synchronize()
        assert other.elapsed_time(other) == 0

    def times(self) -> None:
        """Takes the times of copies, which the rates of the clock give."""
        self.note("times")
        stream = self.chance.choice(self.streams)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        host = torch.ones(self.chance.randrange(1, 300_000), dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            marks[0].record()
            taken = host.to("cuda", non_blocking=True)
            marks[1].record()
            host.copy_(taken, non_blocking=True)
            marks[2].record()
        torch.cuda.synchronize()
        there, back = marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])
        whole = marks[0].elapsed_time(marks[2])
        assert there >= 0, there
        assert back >= 0, back
        assert abs(whole - there - back) <= 1e-3 * max(1.0, whole)
        assert marks[2].elapsed_time(marks[0]) == -whole
        if self.has_clock:
            assert abs(there - len(host) / 1e6) < 2e-6 + there * 1e-5, (there, len(host))
            assert abs(back - len(host) / 2e6) < 2e-6 + back * 1e-5, (back, len(host))

    def nested(self) -> None:
        """Nests streams; the current one is of a thread, and comes back."""
        self.note("nested")
        before = torch.cuda.current_stream()
        stream, inner = self.chance.choice(self.streams), self.chance.choice(self.streams)
        with contextlib.suppress(ZeroDivisionError), torch.cuda.stream(stream):
            with torch.cuda.stream(inner):
                assert torch.cuda.current_stream() == inner
                there = on_thread(torch.cuda.current_stream)
                assert there == torch.cuda.default_stream()
            assert torch.cuda.current_stream() == stream
            with torch.cuda.stream(None):
                assert torch.cuda.current_stream() == stream
            raise ZeroDivisionError
        assert torch.cuda.current_stream() == before

    def pool(self) -> None:
        """Streams come from a pool of 32 in turn."""
        self.note("pool")
        taken = [torch.cuda.Stream() for _ in range(33)]
        assert len({s.cuda_stream for s in taken[:32]}) == 32
        assert taken[0] == taken[32]
        assert all(s.cuda_stream for s in taken)
        assert torch.cuda.default_stream().cuda_stream == 0

    def idle(self) -> None:
        """After a synchronisation every stream is idle."""
        self.note("idle")
        torch.cuda.synchronize()
        assert all(stream.query() for stream in self.streams)
        assert all(event is None or event.query() for event in self.last)
        for mine, value in zip(self.buffers, self.truth, strict=True):
            assert torch.equal(mine.cpu(), value)

    def act(self) -> None:
        names = ["write"] * 6 + ["look"] * 2
        names += ["poll", "events", "times", "nested", "pool", "idle"]
        getattr(self, self.chance.choice(names))()


def streams(request: dict[str, Any], log: object) -> None:
    program = Streams(request["seed"])
    with program.told():
        for _ in range(25):
            program.act()
        program.idle()


# Devices that an index out of bounds loses.


def lost_devices(request: dict[str, Any], log: object) -> None:
    """Loses the device by an index, sees that every call says so, and begins anew."""
    actions = Actions(request["seed"])
    with actions.told():
        for _ in range(actions.chance.randrange(1, 4)):
            lose(actions)


def lose(actions: Actions) -> None:
    chance = actions.chance
    sim.enable("1GiB", device="cuda", schedule=chance.choice(["late", "overtake", "eager"]))
    count, width = chance.randrange(1, 50), chance.randrange(1, 6)
    host = torch.randn(count, width)
    mine, kept = host.cuda(), torch.arange(9.0, device="cuda")
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    locked = torch.ones(9).pin_memory()
    inside = torch.tensor([chance.randrange(count) for _ in range(4)])
    low = torch.tensor([chance.randrange(-count, count) for _ in range(4)])
    beyond = torch.tensor([0, chance.choice([count, count + 7, -count - 1, 1 << 40])])
    actions.note(f"{count} rows, {beyond.tolist()}")
    assert torch.equal(mine[low.cuda()].cpu(), host[low])
    assert torch.equal(mine.index_select(0, inside.cuda()).cpu(), host[inside])
    torch.cuda.synchronize()
    wrong = beyond.cuda()
    bad: dict[str, Callable[[], Any]] = {
        "index": lambda: mine[wrong],
        "index_put": lambda: mine.index_put_((wrong,), mine.new_ones(1)),
        "index_select": lambda: mine.index_select(0, wrong),
        "embedding": lambda: torch.nn.functional.embedding(wrong, mine),
        "gather": lambda: mine.gather(0, wrong[1:, None]),
        "scatter": lambda: mine.scatter_(0, wrong[1:, None], 1.0),
        "index_add": lambda: mine.index_add_(0, wrong, mine.new_ones(2, width)),
        "take": lambda: mine.take(wrong * max(1, width)),
        "nll_loss": lambda: torch.nn.functional.nll_loss(
            mine.T.contiguous(), wrong[1:].expand(width)
        ),
    }
    name = chance.choice(sorted(bad))
    actions.note(name)
    allocated = torch.cuda.memory_allocated()
    result = bad[name]()  # its launch is no error
    del result
    waits: dict[str, Callable[[], Any]] = {
        "synchronize": torch.cuda.synchronize,
        "item": lambda: kept[3].item(),
        "cpu": kept.cpu,
        "stream": torch.cuda.current_stream().synchronize,
    }
    after: dict[str, Callable[[], Any]] = waits | {
        "kernel": lambda: kept + 1,
        "new": lambda: torch.ones(9, device="cuda"),
        "copy": lambda: kept.copy_(locked, non_blocking=True),
        "record": lambda: event.record(),
        "other stream": stream.synchronize,
        "mem_get_info": torch.cuda.mem_get_info,
        "empty_cache": torch.cuda.empty_cache,
        "page-locked": lambda: torch.empty(100 * MIB, pin_memory=True),
    }
    first = chance.choice(sorted(waits))
    actions.note(first)
    with fails(LOST, torch.AcceleratorError):
        waits[first]()
    for _ in range(8):
        name = chance.choice(sorted(after))
        actions.note(name)
        with fails(LOST, torch.AcceleratorError):
            after[name]()
    with contextlib.suppress(RuntimeError):
        locked.add_(1)
    torch.cuda.memory_stats()  # are the host's
    actions.note("anew")
    sim.enable("1GiB", device="cuda")
    torch.cuda.synchronize()
    assert torch.equal(kept.cpu(), torch.arange(9.0)), "bytes that nothing touched"
    assert (host.cuda() * 2).cpu().equal(host * 2)
    assert torch.cuda.memory_allocated() <= allocated


# Inputs that mean nothing.


def inputs(request: dict[str, Any], log: object) -> None:
    """Gives settings that mean nothing: each is refused, and leaves everything as it was."""
    actions = Actions(request["seed"])
    chance = actions.chance
    bad: list[tuple[dict[str, Any], str]] = [
        ({"devices": 0}, "devices|1 to 8"),
        ({"devices": 9}, "devices|1 to 8"),
        ({"devices": -1}, "devices|1 to 8"),
        ({"devices": "2"}, "devices"),
        ({"devices": 1.5}, "devices"),
        ({"devices": True}, "devices"),
        ({"context": "three"}, "three"),
        ({"context": -1}, "-1"),
        ({"context": "1XB"}, "1XB"),
        ({"context": 1.5}, "1.5"),
        ({"context": "4GiB"}, ""),
        ({"capacity": "0GiB"}, ""),
        ({"capacity": -5}, "-5"),
        ({"capacity": "much"}, "much"),
        ({"gpu": "voodoo2"}, "rtx4090"),
        ({"capacity": "100MiB"}, "context"),
        ({"schedule": "soon"}, "soon"),
        ({"schedule": None}, "None"),
        ({"share": "a b"}, "a b"),
        ({"share": "x" * 65}, "64"),
        ({"share": "two", "devices": 2}, ""),
        ({"device": "xpu"}, "xpu"),
        ({"device": "cuda:0"}, "cuda:0"),
        ({"clock": 5}, "[Cc]lock"),
    ]
    good = {"capacity": "1GiB", "device": "cuda"}
    later: list[tuple[dict[str, Any], str]] = [
        ({"device": "sim"}, "cuda"),
        ({"devices": 3}, ""),
        ({"dry": True}, ""),
        ({"capacity": "540MiB"}, ""),
    ]
    kinds = (residency.InvalidArgumentError, sim.SimulatorError)
    with actions.told():
        for settings, words in chance.sample(bad, 6):
            actions.note(f"before: {settings}")
            with fails(
                re.escape(words) if "|" not in words and "[" not in words else words, *kinds
            ):
                sim.enable(**(good | settings))
            assert not sim.is_enabled()
        sim.enable(**good)
        host = torch.randn(50_000)
        mine = host.cuda()
        filler = torch.zeros(20 * MIB, dtype=torch.uint8, device="cuda")
        was, free = sim.settings(), torch.cuda.mem_get_info()
        for settings, words in chance.sample(bad, 8) + chance.sample(later, 3):
            actions.note(f"after: {settings}")
            with fails(
                re.escape(words) if "|" not in words and "[" not in words else words, *kinds
            ):
                sim.enable(**(good | settings))
            assert sim.settings() == was
            assert torch.cuda.mem_get_info() == free
            assert torch.equal(mine.cpu(), host)
        del filler
        sim.enable(**was)
        assert sim.settings() == was
        assert torch.equal(mine.cpu(), host)
