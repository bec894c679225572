"""Fixtures of every test: the device under test, and what it holds.

The same tests run on the simulated accelerator (late and overtaking work, races checked, memory
poisoned) and, with ``RESIDENCY_TEST_DEVICE=cuda``, on a real one; with ``sim-as-cuda``, on the
simulated one in CUDA's place.

[Note: threads] One thread computes, in the whole session. A kernel's last bits depend on how many
share its work, each of torch's own threads keeps the number that held when it began, and tests
compare bits that different threads computed. Tiny tensors are quicker so, too.

[Note: tiers] `make test` is the first tier, and takes minutes; `make test-all` is the rest. A test
is in one of them. In the second are those marked ``whole``, those of ``data/costly_tests.txt``,
which were measured to take long, and every test under the schedule "overtake" that is not about the
order of work itself. Marked are most tests with a framework, phases of four ranks, and of a large
matrix all but a few pairs, which name each of its rows and columns. "late" shows a missing wait
every time; what "overtake" shows beyond it, work that comes too early on another lane, is what
these files are for.

[Note: frameworks] They are imported by fixtures, and the tests that do so, in folders named
``stacks`` and ``integrations`` and of the docs, run last, for which the Makefile lets xdist keep
the order: a framework has hundreds of thousands of objects, which a search for holders goes
through. Garbage collections do not: they pass by what was imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import limits
import parts
import pytest
import torch
from torch import Tensor, nn

from residency.sim import BuildError
from residency.testing import simulated_device_type
from residency_sim._build import build_extension

pytest_plugins = [
    "residency.testing.plugin",
    "pytester",
    "costs",
    "hangs",
]  # the first also where not installed

# [Note: ends of processes] A thread of autograd's that meets the end of the interpreter sleeps for
# good (python.cpp), and torch waits ten seconds for it. Tests start hundreds of processes, and each
# takes a backward pass; those that are about the end of one leave torch its ten seconds.
AUTOGRADS_LAST_WAIT = "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"
_FACE = simulated_device_type()
_REAL = _FACE is None
# The tests have stand-ins of XTuner and prime-rl, which are on no package index, and of torchtitan,
# Axolotl and LLaMA-Factory where they are not installed.
_FRAMEWORKS = (
    "torch",
    "lightning",
    "pytorch-lightning",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "axolotl",
    "llamafactory",
    "verl",
    "trinity-rft",
    "torchtitan",
    "xtuner",
    "prime-rl",
)
_MANY_OBJECTS = 30_000  # a collection passes by so many in milliseconds
_ABOUT_ORDER = {  # [Note: tiers]
    "test_fixtures.py",
    "test_races.py",
    "test_streams.py",
    "test_waits.py",
}


def pytest_configure(config: pytest.Config) -> None:
    """Sets what processes have from their beginning, and how long tests wait for them."""
    limits.follow(config.getoption("timeout", None))  # None where pytest-timeout is not installed
    torch.set_num_threads(1)  # [Note: threads]
    os.environ.setdefault(AUTOGRADS_LAST_WAIT, "0.1")  # seconds [Note: ends of processes]
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # As a shell's background jobs have it. Processes of the tests would inherit that, and
        # those that are to be interrupted would go on for good.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Says which frameworks the integrations are tested with, and in which versions."""
    found = {}
    for name in _FRAMEWORKS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = f"{name} {importlib.metadata.version(name)}"
    absent = [name for name in _FRAMEWORKS if name not in found]
    return f"frameworks: {', '.join(found.values())}; not installed: {', '.join(absent) or 'none'}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Builds the simulated accelerator before the time of any test begins to count, where
    pytest-xdist runs them all (`-n`); its processes find it built.
    """
    option = session.config.option
    is_xdists = getattr(option, "numprocesses", None) is not None
    if _REAL or not is_xdists or option.collectonly or hasattr(session.config, "workerinput"):
        return
    with contextlib.suppress(BuildError):  # the tests that need it fail by its name
        build_extension()


@pytest.hookimpl(tryfirst=True)  # before the marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the stacks last; leaves out what the device under test cannot run, with the reason, and
    what is in no part that was asked for.
    """
    folder, part = Path(__file__).parent, parts.part_of_now()
    items[:] = [i for i in items if parts.is_in_part(str(i.path.relative_to(folder)), part)]
    late = {"stacks", "integrations", "test_docs.py"}  # [Note: frameworks]
    items.sort(key=lambda item: not late.isdisjoint(item.path.parts))
    for item in items:
        is_about_order = item.path.parent.name == "transfer" or item.path.name in _ABOUT_ORDER
        if "overtake" in _parameters(item) and not is_about_order:
            item.add_marker(pytest.mark.whole)  # [Note: tiers]
        if item.path.parent.name == "handoff":
            item.add_marker(pytest.mark.alone)
        if _REAL and item.get_closest_marker("sim"):
            item.add_marker(pytest.mark.skip(reason="tests the simulated accelerator itself"))
        if _REAL and item.get_closest_marker("races"):
            item.add_marker(pytest.mark.skip(reason="torch's list kernels race over shared bytes"))
        if _REAL and item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs the device alone: -m alone, without -n"))
        if _FACE == "cuda" and item.path.parent.name == "sim":
            item.add_marker(pytest.mark.skip(reason="tests the simulated accelerator as 'sim'"))
        if not _REAL and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs silicon: RESIDENCY_TEST_DEVICE=cuda"))


def _parameters(item: pytest.Item) -> list[object]:
    """Returns the values that a test's name ends with in brackets."""
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []


@pytest.fixture
def device(
    tested_device: torch.device, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[torch.device]:
    """The accelerator under test, empty, once for every schedule that it has.

    A test that passes must leave no more of its memory, or page-locked, than it found: what only
    the garbage collector could free counts as freed.
    """
    num_failed = request.session.testsfailed  # a failed test's traceback keeps its tensors
    _end_reads(tested_device)
    before = _held_bytes()
    yield tested_device
    request.node.funcargs.clear()  # what the other fixtures made, which pytest keeps until later
    if request.session.testsfailed == num_failed and _held_bytes() != before:
        for when in ("setup", "call"):
            caplog.get_records(when).clear()  # a record may keep an exception, and its frames
        gc.collect()
        torch.accelerator.synchronize()
        # A thread of autograd's lets go a moment later, or another thread was collecting.
        deadline = time.monotonic() + 30
        while _stays(before) and time.monotonic() < deadline:
            time.sleep(0.01)
            gc.collect()
        assert not _stays(before)


def _stays(before: tuple[int, int]) -> dict[str, int]:
    """Returns how much more is held than before, page-locked and on the device."""
    more = {
        what: now - then
        for what, now, then in zip(("page-locked", "device"), _held_bytes(), before, strict=True)
    }
    return {what: num_bytes for what, num_bytes in more.items() if num_bytes > 0}


def _held_bytes() -> tuple[int, int]:
    from residency import _device

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return 0, 0
    _device.clear_workspaces(accelerator)
    return _pinned_bytes(), torch.accelerator.memory_allocated()


def _end_reads(device: torch.device) -> None:
    """Ends the reads of lanes that tests before have left to no thread, as an interrupt does."""
    from residency._transfer import gate_of

    if len(gate_of(device)):
        torch.accelerator.synchronize()
        gate_of(device)._prune()
        assert not len(gate_of(device))


def _pinned_bytes() -> int:
    from residency import _pinned, sim

    _pinned.release_pinned_cache()
    if _REAL:
        # None before CUDA begins.
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    return sim.pinned_memory_stats()["pinned_bytes.current"]


@pytest.fixture
def patient_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets processes end as torch lets them. [Note: ends of processes]"""
    monkeypatch.delenv(AUTOGRADS_LAST_WAIT, raising=False)


@pytest.fixture
def pinned_bytes(device: torch.device) -> Callable[[], int]:
    """Pinned host bytes that are in use: what torch only keeps for reuse is given back first."""
    gc.collect()
    return _pinned_bytes


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Keeps what was imported before a file's tests out of their collections, which are many.

    Not while a tensor is on the device, or bytes are page-locked, that a later collection may have
    to give back.
    """
    if len(gc.get_objects()) < _MANY_OBJECTS:
        return
    gc.collect()
    # Of a subclass either the inner tensor is plain, or there is no memory, as of a fake one.
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    if all(each.is_cpu or each.is_meta for each in tensors) and not any(_held_bytes()):
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_watch_stays() -> Iterator[None]:
    """Demands that a file's tests leave no watch over imports: the files that come next in this
    process would have modules that it has changed.
    """
    before = _watches()
    yield
    assert _watches() == before


def _watches() -> list[object]:
    return [finder for finder in sys.meta_path if type(finder).__name__ == "ImportWatch"]


@pytest.fixture(scope="session")
def framework() -> Callable[..., Any]:
    """Imports a package, or skips; the parts that are named are those that it would load later."""

    def load(name: str, *parts: str) -> Any:
        package = pytest.importorskip(name)
        for part in parts:
            getattr(package, part)
        gc.collect()
        gc.freeze()
        return package

    return load


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads that take turns a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def trace_files() -> list[Path]:
    """Recorded allocator traces: those of ``tests/data``, and ``$RESIDENCY_TRACE_DIR``'s."""
    files = sorted((Path(__file__).parent / "data" / "cuda_traces").glob("*.json.gz"))
    if "RESIDENCY_TRACE_DIR" in os.environ:
        found = sorted(Path(os.environ["RESIDENCY_TRACE_DIR"]).glob("*.json.gz"))
        assert found, "RESIDENCY_TRACE_DIR has no *.json.gz"
        files += found
    return files
