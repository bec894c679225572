"""Measures how blind the tests are: changes one place of the library at a time, and runs the tests.

``python tests/tools/covered_lines.py lines.db`` records once which test runs which line. Then
``python tests/tools/mutations.py --lines lines.db --seed 1 --count 40 --table mutations.md`` draws
40 mutants (the kinds are in ``mutants.py``), runs for each the tests that run its line, the
quickest first, until one fails or their time is over, and writes a line per mutant as it goes. It
never writes to the checkout: each mutant lives in a copy of ``src`` that stands first on the path.

With ``--torture 60`` the judges of its package look for 60 seconds each at what no test found;
``--again`` runs what survived in an earlier call, as with more ``--seconds``.

A mutant is *found* where a test that passes on the real code fails, hangs or takes the process
down; it *survives* where none does so in the time given. It is *reached* where the statement around
the change ran in any process of these tests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import mutants
from covered_lines import Lines, limit
from mutants import KINDS, PACKAGES, Mutant

ROOT = Path(__file__).resolve().parents[2]
_HANG_SECONDS = 180  # on a busy machine, too

_JUDGES = {
    "_transfer": ("test_programs.py", "test_saves.py"),
    "_optim": ("test_programs.py", "test_master_programs.py"),
    "_checkpoint": ("test_saves.py", "test_save_trees.py", "test_save_damage.py"),
    "_handoff": ("test_transitions.py",),
    "_memory": ("test_transitions.py",),
}

# Stops between two tests when the time is over, so that a hang is one test that takes too long.
_BUDGET = """
import os, time
_end = time.monotonic() + float(os.environ["MUTANT_SECONDS"])
_session = None
def pytest_sessionstart(session):
    global _session
    _session = session
def pytest_runtest_logfinish(nodeid, location):
    if time.monotonic() > _end and not _session.shouldstop:
        _session.shouldstop = "the time is over"
"""
_SITE = """
import atexit, os, sys
def _tell():
    if getattr(sys, "mutant_was_reached", False):
        open(os.environ["MUTANT_REACHED"], "w").close()
atexit.register(_tell)
"""


@dataclasses.dataclass
class Result:
    """What became of one mutant: ``found``, ``survived`` or ``invalid``, and by what."""

    name: str
    package: str
    file: str
    line: int
    kind: str
    was: str
    now: str
    state: str
    how: str = ""
    test: str = ""
    reached: bool = False
    seconds: float = 0.0


def chosen_tests(lines: Lines, mutant: Mutant, seconds: float) -> list[str]:
    """Returns tests that run the lines of a mutant and take ``seconds`` together, the quickest
    first; of each function its quickest arguments come before all others.
    """
    tests = lines.tests(mutant.file, mutant.lines)
    if not tests:  # a line that runs on import, or never: whoever runs the file
        tests = lines.tests(mutant.file, range(1, 10_000))
    functions: dict[str, list[str]] = {}
    for test in tests:
        functions.setdefault(test.partition("[")[0], []).append(test)
    chosen = []
    for test in mutants.in_turn(list(functions.values())):
        seconds -= lines.seconds(test)
        if seconds < 0 and chosen:
            break
        chosen.append(test)
    return chosen


@contextlib.contextmanager
def _tree(root: Path) -> Iterator[Path]:
    """Gives a folder with a copy of ``src``, and what a run of tests needs besides."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(root / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / "mutant_budget.py").write_text(_BUDGET)
        (source / "sitecustomize.py").write_text(_SITE)
        yield Path(folder)


class Runner:
    """Runs mutants, each in a copy of ``src``."""

    def __init__(
        self, root: Path, lines: Lines, seconds: float, torture_seconds: float, options: list[str]
    ) -> None:
        self._root = root
        self._lines = lines
        self._seconds = seconds
        self._torture_seconds = torture_seconds
        self._options = options

    def run(self, mutant: Mutant) -> Result:
        """Makes the mutant, runs its tests, and returns what became of it."""
        begin = time.monotonic()
        result = _undecided(mutant)
        with _tree(self._root) as folder:
            path = folder / "src" / "residency" / mutant.file
            content = mutants.apply(path.read_bytes(), mutant)
            try:
                compile(content, mutant.file, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                result.state, result.how = "invalid", str(error)
                return result
            path.write_bytes(content)
            tests = chosen_tests(self._lines, mutant, self._seconds)
            if tests:
                self._test(folder, result, tests, 2 * self._seconds, {})
            for name in _JUDGES[mutant.package] if self._torture_seconds else ():
                if result.state == "survived":
                    variables = {"TORTURE_SECONDS": str(self._torture_seconds)}
                    judge = f"tests/torture/{name}"
                    self._test(folder, result, [judge], self._torture_seconds, variables)
        result.seconds = round(time.monotonic() - begin, 1)
        return result

    def fails(self, tests: Sequence[str]) -> str:
        """Returns the first of ``tests`` that does not pass on the real code, or nothing."""
        seconds = 60.0 + 3 * sum(map(self._lines.seconds, tests))
        with _tree(self._root) as folder:
            result = Result("", "", "", 0, "", "", "", state="survived")
            self._test(folder, result, list(tests), seconds, {})
        return result.test if result.state == "found" else ""

    def _test(
        self,
        folder: Path,
        result: Result,
        tests: Sequence[str],
        seconds: float,
        variables: dict[str, str],
    ) -> None:
        """Runs tests on the copy in ``folder``, and notes in the result what they found."""
        reached = folder / "reached"
        environment = os.environ | variables
        environment["PYTHONPATH"] = str(folder / "src")
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["TMPDIR"] = str(folder)
        environment["MUTANT_SECONDS"] = str(seconds)
        environment["MUTANT_REACHED"] = str(reached)
        options = ["-x", "-q", f"--timeout={_HANG_SECONDS}", "-p", "no:cacheprovider"]
        options += ["-p", "mutant_budget", *self._options]
        output = folder / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self._root,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=limit,
            )
            try:
                code: int | None = process.wait(seconds + 2 * _HANG_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):  # what it started goes with it
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result.reached |= reached.exists()
        _judge(result, code, output.read_text(errors="replace"))


def _undecided(mutant: Mutant) -> Result:
    fields = ("name", "package", "file", "line", "kind", "was", "now")
    return Result(**{field: getattr(mutant, field) for field in fields}, state="survived")


def _judge(result: Result, code: int | None, output: str) -> None:
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)
    result.test = failed[0] if failed else output.strip().rpartition("\n")[2]
    if code == 5:
        raise RuntimeError(f"no test ran for {result.name}:\n{output}")
    if code is None or "Timeout (>" in output or "+ Timeout +" in output:
        result.state, result.how = "found", "hang"
    elif code < 0:
        result.state, result.how = "found", f"signal {-code}"
    elif failed or code not in (0, 2):
        result.state, result.how = "found", "failure" if code == 1 else "no start"
    elif code == 2 and "the time is over" not in output:
        result.state, result.how = "found", "no start"
    else:
        result.how = "all passed" if code == 0 else "passed until the time was over"


def read(path: Path) -> dict[str, Result]:
    """Returns the results of a file by the names of the mutants; a later line counts."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines()
    return {result.name: result for result in (Result(**json.loads(line)) for line in lines)}


def table(results: Sequence[Result], old: str = "") -> str:
    """Returns the counts and the survivors in Markdown, with each "why" of an older table kept."""
    whys = dict(re.findall(r"^\| (`[^|]*?` \| [^|]* \| .*?) \| (?:yes|no) \| (.*?) \|$", old, re.M))
    valid = [result for result in results if result.state != "invalid"]
    lines = []
    for title, field, keys in (("package", "package", PACKAGES), ("kind", "kind", KINDS)):
        lines += [f"| {title} | mutants | found by tests | by torture alone | survived |"]
        lines += ["|---|---:|---:|---:|---:|"]
        for key in keys:
            counts = _counts([r for r in valid if getattr(r, field) == key])
            if counts[0]:
                lines.append(f"| {key.strip('_')} | {' | '.join(map(str, counts))} |")
        lines += [f"| all | {' | '.join(map(str, _counts(valid)))} |", ""]
    lines += ["| survivor | kind | change | reached | why |", "|---|---|---|---|---|"]
    for r in sorted((r for r in valid if r.state == "survived"), key=lambda r: (r.file, r.line)):
        was, now = (text.replace("|", "\\|") for text in (r.was, r.now))
        key = f"`{r.file}:{r.line}` | {r.kind} | `{was}` → `{now}`"
        lines.append(f"| {key} | {'yes' if r.reached else 'no'} | {whys.get(key, '')} |")
    return "\n".join(lines) + "\n"


def _counts(results: Sequence[Result]) -> tuple[int, int, int, int]:
    found = [result for result in results if result.state == "found"]
    by_torture = sum(result.test.startswith("tests/torture/") for result in found)
    return len(results), len(found) - by_torture, by_torture, len(results) - len(found)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--count", type=int, default=40, help="mutants, evenly over the files")
    parser.add_argument("--only", metavar="PACKAGE", choices=PACKAGES, help="one package")
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be given again")
    parser.add_argument("--lines", type=Path, required=True, help="what covered_lines.py wrote")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for each mutant")
    parser.add_argument("--torture", type=float, default=0.0, help="seconds a judge, for survivors")
    parser.add_argument("--results", type=Path, default=Path("mutations.jsonl"))
    parser.add_argument("--resume", action="store_true", help="leave out those in --results")
    parser.add_argument("--again", action="store_true", help="run the survivors in --results")
    parser.add_argument("--table", type=Path, metavar="OUT.md", help="write the results there")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after them")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("options", nargs="*", help="for pytest, after --")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace, known: dict[str, Result]) -> list[Mutant]:
    packages = (options.only,) if options.only else PACKAGES
    every = mutants.of_tree(options.root / "src" / "residency", packages)
    if options.again:
        return [m for m in every if m.name in known and known[m.name].state == "survived"]
    every = [m for m in every if options.kind is None or m.kind in options.kind]
    drawn = mutants.sample(every, options.count, options.seed)
    return [m for m in drawn if not (options.resume and m.name in known)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws, runs, writes, and prints a line per mutant."""
    options = _arguments(arguments)
    known = read(options.results)
    lines = Lines(options.lines)
    runner = Runner(options.root, lines, options.seconds, options.torture, options.options)
    end = time.monotonic() + 60 * options.minutes
    found = []
    for mutant in _chosen(options, known):
        if time.monotonic() > end:
            break
        result = runner.run(mutant)
        with options.results.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")
        known[result.name] = result
        found += [result.test] if lines.passed(result.test) else []
        reached = "" if result.reached or result.state == "found" else " (not reached)"
        print(
            f"{result.state}{reached}: {result.name} [{result.how} {result.test}]"
            f" {result.seconds:.0f} s",
            flush=True,
        )
    failing = runner.fails(sorted(set(found))) if found else ""
    if failing:
        sys.exit(f"{failing} fails on the real code too, so what it found stands for nothing")
    if options.table is not None:
        old = options.table.read_text() if options.table.exists() else ""
        options.table.write_text(table(list(known.values()), old))


if __name__ == "__main__":
    main()
