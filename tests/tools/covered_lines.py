"""Records which test runs which line of the library, and how long each test takes.

``python tests/tools/covered_lines.py lines.db`` runs the tests once, two processes at a time (what
follows ``--`` goes to pytest), and writes the file that ``mutations.py --lines`` reads. Lines that
a test runs in processes of its own count as that test's. A test that sets a trace function of its
own stops the record until the next test.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[2]
_MEMORY_BYTES = 64 << 30  # of addresses, most of which nothing is behind
_FILE_BYTES = 4 << 30
_FOLDER = "COVERED_LINES_FOLDER"
_LEFT_OUT = ("tests/sim", "tests/torture", "tests/verl", "tests/test_mutations.py")

# What a process that a test starts records, until it ends by itself.
_SITE = """
import os
def _record():
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test:
        import atexit, covered_lines
        record = covered_lines.recorder(test)
        record.start()
        atexit.register(lambda: (record.stop(), record.save()))
_record()
"""


def recorder(context: str | None = None) -> coverage.Coverage:
    """Returns a recorder that writes a file of its own process into the folder of this run."""
    record = coverage.Coverage(
        data_file=str(Path(os.environ[_FOLDER]) / "lines"),
        data_suffix=True,
        config_file=False,
        source_pkgs=["residency"],
        context=context,
    )
    kinds = ["trace-changed", "no-data-collected", "module-not-measured", "module-not-imported"]
    record.set_option("run:disable_warnings", [*kinds, "already-imported", "couldnt-parse"])
    return record


class _Plugin:
    """Gives each test's lines its name, and writes down its seconds."""

    def __init__(self) -> None:
        self._record = recorder()
        self._seconds: dict[str, float] = {}
        self._others: set[str] = set()
        self._file = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        file = item.nodeid.partition("::")[0]
        if self._file and file != self._file:  # a process that dies loses one file's lines
            self._save()
        self._file = file
        self._record.start()
        self._record.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._record.stop()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._others.add(report.nodeid)
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self._save()

    def _save(self) -> None:
        self._record.save()
        passed = {test: s for test, s in self._seconds.items() if test not in self._others}
        path = Path(os.environ[_FOLDER]) / f"seconds-{os.getpid()}.json"
        path.write_text(json.dumps(passed))


def pytest_configure(config: pytest.Config) -> None:
    """Records in the process that runs the tests, not in the one that hands them out."""
    if _FOLDER in os.environ and getattr(config.option, "dist", "no") == "no":
        config.pluginmanager.register(_Plugin())


class Lines:
    """What the record says: the tests of a line that passed, the quickest first."""

    def __init__(self, path: Path) -> None:
        self._data = coverage.CoverageData(str(path))
        self._data.read()
        self._seconds: dict[str, float] = json.loads(path.with_suffix(".json").read_text())
        self._files = {
            name.rpartition("/residency/")[2]: name for name in self._data.measured_files()
        }

    def tests(self, file: str, lines: range) -> list[str]:
        """Returns the tests that ran any of ``lines`` of a file of the library."""
        if file not in self._files:
            return []
        contexts = self._data.contexts_by_lineno(self._files[file])
        found = {test for line in lines for test in contexts.get(line, []) if test}
        return sorted(found & self._seconds.keys(), key=lambda test: (self._seconds[test], test))

    def passed(self, test: str) -> bool:
        """Returns whether a test ran, and did not fail."""
        return test in self._seconds

    def seconds(self, test: str) -> float:
        """Returns what a test took, alone in its process."""
        return self._seconds[test]


def limit() -> None:
    """Keeps this process, in which a mutant may run, from taking all memory or all of the disk; a
    test that wants more than that fails, and so is no judge.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))


def record(root: Path, out: Path, arguments: Sequence[str] = ()) -> int:
    """Runs the tests of a checkout, and writes ``out`` and the seconds beside it.

    Returns:
        The exit code of pytest.
    """
    with tempfile.TemporaryDirectory(prefix="lines-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SITE)
        paths = [folder, str(root / "src"), str(Path(__file__).parent)]
        environment = os.environ | {_FOLDER: folder, "PYTHONPATH": os.pathsep.join(paths)}
        left_out = [f"--ignore={path}" for path in _LEFT_OUT]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "covered_lines", *left_out]
        options = ["-p", "no:cacheprovider", "--timeout=900", "-n", "2", "--dist", "loadfile"]
        code = subprocess.call(
            [*command, *options, *arguments], cwd=root, env=environment, preexec_fn=limit
        )
        data = coverage.CoverageData(str(out))
        data.erase()
        for part in sorted(Path(folder).glob("lines.*")):
            one = coverage.CoverageData(str(part))
            one.read()
            data.update(one)
        data.write()
        seconds: dict[str, float] = {}
        for part in Path(folder).glob("seconds-*.json"):
            seconds |= json.loads(part.read_text())
        out.with_suffix(".json").write_text(json.dumps(seconds))
    return code


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    options = parser.parse_args()
    sys.exit(record(ROOT, options.out.absolute(), options.arguments))


if __name__ == "__main__":
    main()
