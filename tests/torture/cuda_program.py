"""Programs that judge the simulated accelerator in CUDA's place, each in a fork of a warm process.

Here are contexts and devices; other files have streams, memory and captures. A program is one seed.
It keeps a model of what CUDA's documentation says must be, in plain Python, and asserts it after
each of its actions; an error names the actions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU of this machine is not to be seen

import torch
from cuda_bench import MIB, Actions, fails, in_a_fork, on_thread
from warm_process import Log, serve

from residency import sim


class Neighbour:
    """Another process on the same device, which tells what is free there."""

    def __init__(self, enable: Callable[[], object]) -> None:
        (ask, self._ask), (self._answer, answer) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._ask)
            try:
                enable()
                while os.read(ask, 1):
                    os.write(answer, torch.cuda.mem_get_info()[0].to_bytes(8, "little"))
            finally:
                os._exit(0)
        os.close(ask)
        os.close(answer)
        self.own = self._free()

    def _free(self) -> int:
        os.write(self._ask, b"?")
        found = os.read(self._answer, 8)
        assert len(found) == 8, "the neighbour ended"
        return int.from_bytes(found, "little")

    def taken(self) -> int:
        """Returns the bytes that are gone since it asked first."""
        return self.own - self._free()

    def close(self) -> None:
        os.close(self._ask)
        os.close(self._answer)
        os.waitpid(self._pid, 0)


# Contexts.

QUIET: dict[str, Callable[[], Any]] = {
    "device_count": torch.cuda.device_count,
    "is_initialized": torch.cuda.is_initialized,
    "memory_allocated": torch.cuda.memory_allocated,
    "max_memory_reserved": torch.cuda.max_memory_reserved,
    "memory_stats": torch.cuda.memory_stats,
    "manual_seed": lambda: torch.cuda.manual_seed(3),
    "torch.manual_seed": lambda: torch.manual_seed(3),
    "manual_seed_all": lambda: torch.cuda.manual_seed_all(3),
    "empty_cache": torch.cuda.empty_cache,
    "accelerator.is_available": torch.accelerator.device_count,
    "host tensors": lambda: torch.ones(10).sum(),
    "meta tensors": lambda: torch.ones(10, device="meta").sum(),
    "an event": lambda: torch.cuda.Event(enable_timing=True),
    "a generator's query": lambda: (
        torch.cuda.is_bf16_supported(including_emulation=False)
        if torch.cuda.is_initialized()
        else None
    ),
}
STARTING: dict[str, Callable[[], Any]] = {
    "init": torch.cuda.init,
    "current_device": torch.cuda.current_device,
    "is_available": torch.cuda.is_available,
    "get_rng_state": torch.cuda.get_rng_state,
    "get_device_properties": lambda: torch.cuda.get_device_properties(0),
    "get_device_capability": torch.cuda.get_device_capability,
    "current_device_index": torch.accelerator.current_device_index,
    "set_device": lambda: torch.cuda.set_device(0),
}
USING: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.ones(3, device="cuda"),
    "page-locked": lambda: torch.empty(3, pin_memory=True),
    "pin_memory": lambda: torch.empty(3).pin_memory(),
    "a stream": lambda: torch.cuda.Stream(),
    "a recorded event": lambda: torch.cuda.Event().record(),
    "synchronize": lambda: torch.cuda.synchronize(),
    "mem_get_info": torch.cuda.mem_get_info,
}


def contexts(request: dict[str, Any], log: Log) -> None:
    """Takes what makes a context and what makes none, in any order.

    It forks, or a neighbour sees what it has taken: processes that share do not fork.
    """
    actions = Actions(request["seed"])
    chance = actions.chance
    shares = chance.random() < 0.5
    size = chance.choice([None, 0, 1, 2 * MIB, "300MiB", chance.randrange(1, 900 * MIB)])
    given: dict[str, Any] = {"capacity": "3GiB", "device": "cuda"}
    if shares:
        given["share"] = f"cuda-face-{os.getpid()}"
    neighbour = Neighbour(lambda: sim.enable(**given, context=0)) if shares else None
    sim.enable(**given, context=size)
    torch.cuda.memory_allocated()
    bytes_of = {None: 534 * MIB, "300MiB": 300 * MIB}.get(size) or int(size or 0)
    started = has_context = False
    kept: list[Any] = []

    def child() -> None:
        assert torch.ones(4, device="cuda").sum().item() == 4

    with actions.told():
        for _ in range(chance.randrange(4, 20)):
            table = chance.choices([QUIET, STARTING, USING], [8, 2, 1])[0]
            name = chance.choice(sorted(table))
            actions.note(name)
            if name == "a recorded event" or chance.random() < 0.1:
                before = torch.cuda.is_initialized()
                torch.ones(3).is_pinned()  # of a context where CUDA is initialised, else of none
                started, has_context = started or before, has_context or before
            kept.append(table[name]())
            started = started or table is not QUIET
            has_context = has_context or table is USING
            assert torch._C._cuda_hasPrimaryContext(0) == has_context
            reserved = torch.cuda.memory_reserved()
            if neighbour is not None:
                taken = neighbour.taken()
                assert taken == reserved + (bytes_of if has_context else 0), (taken, reserved, size)
            elif chance.random() < 0.3:
                actions.note("fork")
                status, said = in_a_fork(child)
                if started:
                    assert status == 1, "a forked child used the device"
                    assert "Cannot re-initialize CUDA in forked subprocess" in said, said
                else:
                    assert status == 0, said
        kept.clear()
        torch.cuda.empty_cache()
        if has_context:
            free, total = torch.cuda.mem_get_info()
            assert total == 3 << 30
            held = torch.cuda.memory_reserved()
            assert total - free == held + bytes_of, (total - free, held, bytes_of)
    if neighbour is not None:
        neighbour.close()


# Devices.


class Devices(Actions):
    """Several devices: which is current in which thread, which have a context, and whose bytes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.count = self.chance.randrange(2, 9)
        self.size = self.chance.choice([None, 0, "7MiB"])
        sim.enable("2GiB", device="cuda", devices=self.count, context=self.size)
        self.bytes = {None: 534 * MIB, 0: 0, "7MiB": 7 * MIB}[self.size]
        self.current = 0
        self.contexts: set[int] = set()
        # A guard went back there: the next choice of the device, though it is the thread's, may
        # make one. Work on another device than the thread's is done inside such a guard.
        self.perhaps: set[int] = set()
        self.home: int | None = None  # the device that has the tensors
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def any(self) -> int:
        return self.chance.randrange(self.count)

    def work_on(self, device: int | None) -> None:
        if device not in (None, self.current):
            self.perhaps.add(self.current)

    def set_device(self) -> None:
        device = self.any()
        self.note(f"set {device}")
        torch.cuda.set_device(device)
        if device != self.current:
            self.contexts.add(device)
        self.current = device

    def guard(self, depth: int = 0) -> None:
        device = self.any()
        self.note(f"guard {device}")
        before = self.current
        ending = self.chance.random() < 0.3
        with contextlib.suppress(ZeroDivisionError), torch.cuda.device(device):
            if device != before:
                self.contexts.add(device)
            self.current = device
            self.check()
            for _ in range(self.chance.randrange(3)):
                if depth < 3:
                    self.act(depth + 1)
            if ending:
                raise ZeroDivisionError
        self.current = before
        self.perhaps.add(before)
        self.note(f"back to {before}")

    def thread(self, depth: int = 0) -> None:
        """Runs some actions on a thread, which begins on the first device."""
        if depth > 2:
            return
        self.note("thread")
        before, self.current = self.current, 0

        def run() -> None:
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
            for _ in range(self.chance.randrange(3)):
                self.act(depth + 1)

        on_thread(run)
        self.note("end of thread")
        self.current = before

    def tensor(self) -> None:
        device = self.any() if self.chance.random() < 0.3 else (self.home or 0)
        self.note(f"tensor on {device}")
        value = torch.randn(self.chance.choice([1, 700, 300_000]))
        self.work_on(device)
        if self.home not in (None, device):
            free = set(self.contexts)
            with fails("", RuntimeError):
                value.to(f"cuda:{device}")
            self.contexts |= {d for d in (device,) if torch._C._cuda_hasPrimaryContext(d)} - free
            return
        taken = value.to(f"cuda:{device}")
        self.home = device
        self.contexts.add(device)
        assert taken.device.index == device
        self.tensors.append((taken, value))

    def compute(self) -> None:
        """Computes on tensors whatever device is current."""
        if not self.tensors:
            return
        mine, value = self.chance.choice(self.tensors)
        self.note("compute")
        self.work_on(self.home)
        assert torch.equal((mine * 2 + 1).cpu(), value * 2 + 1)
        pinned = mine.to("cpu", non_blocking=True)
        torch.cuda.synchronize(mine.device)
        assert torch.equal(pinned, value)

    def drop(self) -> None:
        if self.tensors:
            self.note("drop")
            self.tensors.pop(self.chance.randrange(len(self.tensors)))

    def ask(self) -> None:
        """Asks for what makes a context on the device that is named, or on the current one."""
        device = self.chance.choice([None, self.any()])
        named = self.current if device is None else device
        which = self.chance.choice(["mem_get_info", "synchronize"])
        self.note(f"{which} {device}")
        self.work_on(device)
        getattr(torch.cuda, which)(device)
        self.contexts.add(named)

    def beyond(self) -> None:
        """Names a device that is not there."""
        device = self.count + self.chance.randrange(3)
        self.note(f"beyond {device}")
        with fails("invalid device ordinal|[Ii]nvalid device"):
            torch.cuda.set_device(device)
        with fails("[Ii]nvalid device", AssertionError):
            torch.cuda.get_device_properties(device)
        with fails("[Ii]nvalid device|device id|device index"):
            torch.cuda.memory_allocated(device)
        with fails("[Ii]nvalid device|device id|device index|ordinal"):
            torch.ones(1, device=f"cuda:{device}")
        torch.cuda.set_device(-1)  # is documented to do nothing

    def check(self) -> None:
        assert (
            torch.cuda.current_device() == self.current == torch.accelerator.current_device_index()
        )
        assert torch.cuda.device_count() == self.count
        found = {d for d in range(self.count) if torch._C._cuda_hasPrimaryContext(d)}
        assert self.contexts <= found <= self.contexts | self.perhaps, (found, self.contexts)
        self.contexts = found
        live = sum((t.nbytes + 511) // 512 * 512 for t, _ in self.tensors)
        for device in range(self.count):
            allocated, reserved = (
                getattr(torch.cuda, name)(device)
                for name in ("memory_allocated", "memory_reserved")
            )
            if device == self.home:
                assert live <= allocated <= reserved, (live, allocated, reserved)
            else:
                assert (allocated, reserved) == (0, 0), device
            stats = torch.cuda.memory_stats(device)
            assert stats.get("allocated_bytes.all.current", 0) == allocated
            assert stats.get("reserved_bytes.all.current", 0) == reserved
            if device in self.contexts:
                free, total = torch.cuda.mem_get_info(device)
                assert total == 2 << 30
                assert total - free == reserved + self.bytes, (device, total - free, reserved)
        segments = torch.cuda.memory_snapshot()
        assert {s["device"] for s in segments} <= {self.home}
        every = sum(torch.cuda.memory_reserved(d) for d in range(self.count))
        assert sum(s["total_size"] for s in segments) == every

    def act(self, depth: int = 0) -> None:
        names = ["set_device", "tensor", "tensor", "compute", "drop", "ask", "beyond"]
        name = self.chance.choice([*names, "guard", "guard", "thread"])
        if name in ("guard", "thread"):
            getattr(self, name)(depth)
        else:
            getattr(self, name)()
        self.check()


def devices(request: dict[str, Any], log: Log) -> None:
    program = Devices(request["seed"])
    with program.told():
        for _ in range(12):
            program.act()


if __name__ == "__main__":
    from cuda_capture_program import captures, refused_captures
    from cuda_memory_program import memory, page_locked
    from cuda_random_program import generators
    from cuda_stream_program import inputs, lost_devices, streams

    serve(
        {
            "captures": captures,
            "contexts": contexts,
            "devices": devices,
            "generators": generators,
            "inputs": inputs,
            "lost devices": lost_devices,
            "memory": memory,
            "page-locked memory": page_locked,
            "refused captures": refused_captures,
            "streams": streams,
        }
    )
