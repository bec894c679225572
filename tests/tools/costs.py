"""Measures the processor time of each test, and lists the tests that the first tier leaves out.

``make test-costs`` runs all tests of the first tier with this plug-in, those on the list, too, and
writes the list anew: ``tests/data/costly_tests.txt``. Processor time of a test and of the processes
that it waited for, which a busy machine stretches little.

[Note: costs] A file keeps its cheapest test in the first tier, if that takes less than five
seconds, so that whatever starts processes or imports a framework is tried there once. Files that
read the sources, to hold them to rules, are left as they are.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

FOLDER = "TEST_COSTS"  # where the measured times go; while it is set, the list leaves out nothing
LIST = Path(__file__).resolve().parents[1] / "data" / "costly_tests.txt"
MOST_SECONDS = 0.5  # of a test that is not listed
MOST_OF_THE_CHEAPEST = 5.0


def listed() -> frozenset[str]:
    """Returns the tests that the first tier leaves out, but for a run that measures all."""
    if FOLDER in os.environ or not LIST.exists():
        return frozenset()
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return frozenset(line.partition(" ")[2] for line in lines if not line.startswith("#"))


def costly(seconds: dict[str, float]) -> list[tuple[float, str]]:
    """Returns the tests to list with their seconds, those of a file side by side."""
    files = defaultdict(list)
    for name, cost in seconds.items():
        files[name.partition("::")[0]].append((cost, name))
    found = []
    for file, tests in sorted(files.items()):
        if _reads_the_sources(file):
            continue
        cheapest = min(tests)
        kept = {cheapest} if cheapest[0] < MOST_OF_THE_CHEAPEST else set()
        found += [each for each in sorted(set(tests) - kept, key=_name) if each[0] > MOST_SECONDS]
    return found


def _reads_the_sources(file: str) -> bool:
    path = LIST.parents[2] / file
    return path.is_file() and bool(re.search(r"source_rules|headless", path.read_text("utf-8")))


def _name(test: tuple[float, str]) -> str:
    return test[1]


def _used() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@pytest.hookimpl(tryfirst=True)  # before the marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the listed tests to the second tier."""
    left_out = listed()
    for item in items:
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.whole)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes what a test took, with its fixtures."""
    if FOLDER not in os.environ:
        return (yield)
    before = _used()
    result = yield
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
        print(json.dumps([item.nodeid, round(_used() - before, 2)]), file=file)
    return result


def measured(folder: Path) -> dict[str, float]:
    """Returns the seconds of each test that a run has noted in a folder."""
    return {
        name: cost
        for path in sorted(folder.glob("*.jsonl"))
        for name, cost in map(json.loads, path.read_text(encoding="utf-8").splitlines())
    }


def write(tests: Iterable[tuple[float, str]]) -> None:
    """Writes the list."""
    lines = [f"{cost:.1f} {name}" for cost, name in tests]
    head = "# Seconds of processor time, and the test. tools/costs.py says what for.\n"
    LIST.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    seconds = measured(Path(sys.argv[1]))
    if not seconds:
        sys.exit(f"{sys.argv[1]} holds no measured test; the list stays as it is")
    left_out = costly(seconds)
    write(left_out)
    left = sum(seconds.values()) - sum(cost for cost, _ in left_out)
    print(f"{len(seconds)} tests: {sum(seconds.values()):.0f} s of processor time")
    print(f"without the {len(left_out)} that are listed: {left:.0f} s")
