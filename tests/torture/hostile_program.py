"""Lets every public reader read hostile files, and measures what that does.

Runs in a fork of a warm process, which can be ended where it hangs.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import runpy
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kill_program
import torch
import torch.distributed.checkpoint as dcp
from hostile_files import change, small_net, write_foreign
from kill_program import digest
from torch.distributed.checkpoint.api import CheckpointException
from warm_process import Log, serve

import residency
from residency.integrations.dcp import ResidencyStorageReader

MIB = 1 << 20
MEMORY_BYTES = 64 * MIB
CPU_SECONDS = 2.0
ADDRESS_BYTES = 2 << 30  # what a reader may at the most reserve, so that the machine goes on
KEPT = b"nobody reads or writes this"


class Watch:
    """Sees which files Python's own calls name, and those outside of what they may touch."""

    def __init__(self, outside: Path) -> None:
        self._outside = str(outside)
        self.is_on = False
        self.found: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event.partition(".")[0] not in {"open", "os", "shutil"}:
            return
        for value in arguments:
            name = os.fsdecode(value) if isinstance(value, (bytes, str, Path)) else ""
            if name.startswith(self._outside) or "../" in name or name in {"canary", "new"}:
                self.found.append(f"{event} {name}")


def resident_bytes(peak: bool = False) -> int:
    key = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


@contextlib.contextmanager
def measured(said: str) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin = resident_bytes(), time.process_time()
    yield
    seconds, peak = time.process_time() - begin, resident_bytes(peak=True)
    assert seconds < CPU_SECONDS, f"{said} took {seconds:.2f} s"
    assert peak - before <= MEMORY_BYTES, f"{said} took {(peak - before) / MIB:.0f} MiB"


class Bench:
    """The files as they were written, what is right, and a state to read them into."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.root = Path(request["folder"])
        self.base, self.outside = self.root / "base", self.root / "outside"
        self.base.mkdir()
        self.keep_out()
        chance = random.Random(request["seed"])
        self.device = torch.device("cpu")
        if chance.random() < 0.5:
            self.device = kill_program.device_of(request)
        self.is_offloaded = self.device.type != "cpu" and chance.random() < 0.5
        torch.manual_seed(request["seed"])
        self.make()
        self.right: dict[int, Any] = {}
        self.weights: dict[int, Any] = {}
        with residency.Checkpointer(self.base / "saves") as checkpointer:
            for step in range(3):
                self.step()
                self.right[step], self.weights[step] = digest(self.state), digest({"": self.net})
                checkpointer.save(step, self.state, metrics={"loss": step * 0.5}).wait()
        write_foreign(self.net, self.base)
        with residency.record(self.base / "run.jsonl"):
            for _ in range(3):
                with residency.phase("outer"), residency.phase("inner"):
                    pass
        self.watch = Watch(self.outside)

    def make(self) -> None:
        """Makes the state anew: what a hostile save was restored into may be of any kind."""
        self.net = small_net().to(self.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        if self.is_offloaded:
            residency.offload_optimizer(self.optimizer)
        self.progress: dict[str, Any] = {"seen": 0, "text": "x", "list": [1, 2.5, None, (3,), b"4"]}
        self.state = {
            "model": self.net,
            "optimizer": self.optimizer,
            "progress": self.progress,
            "host": torch.arange(600.0),
        }

    def keep_out(self) -> None:
        self.outside.mkdir()
        (self.outside / "canary").write_bytes(KEPT)

    def step(self) -> None:
        value = torch.randn(4, 33).to(self.device)
        self.net(value).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["seen"] += 1

    def command(self, *words: str) -> int:
        """Runs the command line here; returns its status."""
        output, errors = io.StringIO(), io.StringIO()
        sys.argv = ["residency", *words]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                runpy.run_module("residency", run_name="__main__")
                status: Any = 0
            except SystemExit as error:
                status = error.code or 0
        assert status in {0, 1, 2}, (words, status, errors.getvalue())
        assert "Traceback" not in errors.getvalue(), errors.getvalue()
        assert "\x1b" not in output.getvalue() + errors.getvalue(), "control characters"
        return int(status)

    # Readers; each ends in an error that is documented, or with what is right.

    def restore(self, saves: Path, chance: random.Random, resealed: bool) -> None:
        step = chance.choice([None, 2])
        self.make()
        before = digest(self.state)
        try:
            with residency.Checkpointer(saves) as checkpointer:
                checkpointer.steps()
                found = checkpointer.restore(self.state, step=step)
        except (residency.CorruptSaveError, residency.CheckpointError):
            return
        except residency.RefusedError:
            assert step is None or digest(self.state) == before, "refused, and changed"
            return
        assert resealed or digest(self.state) == self.right[found], "other bytes"

    def load(self, path: Path, chance: random.Random, right: list[Any]) -> None:
        net = small_net().to(self.device)
        before = digest({"": net})
        strict = chance.random() < 0.7
        try:
            residency.load_into(net, path, strict=strict, staging="1MiB")
        except (residency.CorruptSaveError, residency.CheckpointError):
            return
        except residency.RefusedError:
            assert digest({"": net}) == before, "refused, and changed"
            return
        found = digest({"": net})
        assert not right or found in right or not strict, "other bytes"

    def load_dcp(self, path: Path) -> None:
        names = self.net.state_dict().items()
        state = {"model": {name: torch.zeros_like(tensor) for name, tensor in names}}
        try:
            dcp.load(state, storage_reader=ResidencyStorageReader(path), no_dist=True)
        except residency.ResidencyError:
            return
        except CheckpointException as error:
            for problem, _ in error.failures.values():
                self.of_torch(problem)
        except Exception as error:
            self.of_torch(error)

    @staticmethod
    def of_torch(problem: BaseException) -> None:
        """Lets errors of ours pass, and those that torch's own planner raises."""
        last = traceback.extract_tb(problem.__traceback__)[-1:]
        is_ours = isinstance(problem, residency.ResidencyError)
        if not is_ours and not (last and "/torch/distributed/" in last[0].filename):
            raise problem

    def save(self, saves: Path, chance: random.Random) -> None:
        """Saves into a hostile directory: done right, or refused."""
        self.make()
        self.step()
        number = chance.choice([1, 2, 9])
        try:
            with residency.Checkpointer(saves, keep=chance.choice([None, 1, 2])) as checkpointer:
                checkpointer.save(number, self.state).wait()
                now = digest(self.state)
                self.step()
                assert number in checkpointer.steps()
                checkpointer.restore(self.state, step=number)
        except (residency.CheckpointError, residency.RefusedError, OSError):
            return
        assert digest(self.state) == now, "other bytes"

    def read(self, target: Path, chance: random.Random, resealed: bool) -> Iterator[Any]:
        """Yields the readers of a target, with their names."""
        name, path = target.name, str(target)
        if name == "saves":
            save = target / "step-00000002"
            latest = [] if resealed else list(self.weights.values())
            yield "restore", lambda: self.restore(target, chance, resealed)
            yield "load_into a save", lambda: self.load(save, chance, latest)
            yield "load_into saves", lambda: self.load(target, chance, latest)
            yield "dcp.load", lambda: self.load_dcp(chance.choice([save, target]))
            yield "list", lambda: self.command("checkpoint", "list", path, *json_or_not(chance))
            yield "verify", lambda: self.command("checkpoint", "verify", path, *json_or_not(chance))
            dry = chance.choice([["--dry-run"], []])
            best = chance.choice([["--best", "1", "--metric", "loss"], []])
            words = ["checkpoint", "prune", path, "--keep", "1", *best, *dry, *json_or_not(chance)]
            yield "prune", lambda: self.command(*words)
            yield "save", lambda: self.save(target, chance)
        elif name == "run.jsonl":
            more = chance.choice([[], [], ["--trace"], ["--tensorboard"], ["--html"], ["after"]])
            if more == ["after"]:
                more = [str(self.base / "run.jsonl")]
            elif more:
                more.append(str(target.parent / "made"))
            yield f"report {more}", lambda: self.command("report", path, *more)
        else:
            yield "load_into", lambda: self.load(target, chance, [])

    def case(self, number: int, log: Log) -> None:
        chance = random.Random(number)
        place = self.root / "place"
        place.mkdir()
        names = ["saves"] * 5 + ["one.safetensors", "index", "zip.pt", "legacy.pt", "dcp"]
        names += ["run.jsonl"] * 2
        target = place / chance.choice(names)
        source = self.base / target.name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy(source, target)
        said, resealed = change(chance, target, self.outside)
        with contextlib.suppress(Exception):  # what is hostile may not be changed once more
            if chance.random() < 0.3:
                more, again = change(chance, target, self.outside)
                said, resealed = f"{said}, {more}", resealed or again
        log("case", number=number, said=said)
        for reader, call in self.read(target, chance, resealed):
            log("reader", reader=reader)
            self.judge(f"{reader} of {said}", call)
        shutil.rmtree(place)

    def judge(self, said: str, call: Callable[[], Any]) -> None:
        self.watch.found.clear()
        with measured(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.watch.is_on = True
            try:
                call()
            finally:
                self.watch.is_on = False
        is_link = "link" in said or "dangling" in said  # a link is read where it leads
        assert is_link or not self.watch.found, (said, self.watch.found)
        assert os.listdir(self.outside) == ["canary"], said
        assert (self.outside / "canary").read_bytes() == KEPT, said


def json_or_not(chance: random.Random) -> list[str]:
    return chance.choice([["--json"], []])


def read_hostile(request: dict[str, Any], log: Log) -> None:
    """Reads so many hostile cases, after each reader read what is right."""
    bench = Bench(request)
    for target in sorted(bench.base.iterdir()):
        copy = bench.root / "warm" / target.name
        copy.parent.mkdir(exist_ok=True)
        (shutil.copytree if target.is_dir() else shutil.copy)(target, copy)
        for _, call in bench.read(copy, random.Random(0), True):
            call()
    pages = Path("/proc/self/statm").read_text().split()[0]
    limit = int(pages) * resource.getpagesize() + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(request["first"], request["first"] + request["count"]):
        try:
            bench.case(number, log)
        except BaseException:
            log("found", number=number, trace=traceback.format_exc())
            shutil.rmtree(bench.root / "place", ignore_errors=True)
            shutil.rmtree(bench.outside)
            bench.keep_out()
            if not request["many"]:
                raise
    log("over")


if __name__ == "__main__":
    serve({"read": read_hostile})
