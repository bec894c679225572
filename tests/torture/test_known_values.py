"""Random programs over whole numbers and truth values in a dry run, judged by stock torch.

Positions, lengths, labels and masks are known in a dry run, so that each value that a program reads
of them is the one that stock torch finds on the CPU, or the dry run's answer names a line that it
follows from among its guesses. A fault is shrunk to a short program before it is shown.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.torture.known_value_operators import OPERATORS, READS
from tests.torture.known_value_programs import NAME, Stock, program

pytestmark = pytest.mark.whole  # a dry run for each round
Torture = Callable[[Callable[[random.Random], None]], None]

NUM_PROGRAMS = 150  # of one dry run
NUM_SHOWN = 8
MOST_TRIES = 8
HEAD = """\
import json, sys
sys.path.insert(0, {root!r})
import torch
from tests.torture.known_value_programs import seeded, short

D = "cuda"
found = []


def run(body):
    said = []
    try:
        body(lambda value: said.append(short(value)))
    except Exception as error:  # stock torch had none: an error is a wrong answer, too
        said.append(f"{{type(error).__name__}}: {{str(error)[:300]}}")
    found.append(said)


"""
TAIL = 'with open("found.json", "w") as file:\n    json.dump(found, file)\n'


def replayed(lines: list[str]) -> Stock | None:
    """Runs a program with stock torch; returns nothing if it refuses a line."""
    stock = Stock()
    return stock if all(stock.run(line) for line in lines) else None


def dry_run(programs: list[list[str]], folder: Path) -> tuple[list[list[str]], list[set[int]]]:
    """Runs programs in one dry run; returns what each read, and its lines that were guesses."""
    text = [HEAD.format(root=str(Path(__file__).resolve().parents[2]))]
    starts = []
    for i, lines in enumerate(programs):
        text += [f"def program{i}(say):\n"]
        starts.append("".join(text).count("\n") + 1)  # the number of its first line in the script
        text += ["".join(f"    {line}\n" for line in lines), f"\n\nrun(program{i})\n\n\n"]
    (folder / "script.py").write_text("".join([*text, TAIL]))
    (folder / "found.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "residency", "dry-run", "--json", "--quiet", "--steps", "0"]
    command += ["--device", "h100", "--", "python", "script.py"]
    ended = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "found.json").exists(), ended.stdout[-2000:] + ended.stderr[-6000:]
    answer = json.loads(ended.stdout)
    places = [re.search(r"script\.py:(\d+)", each["line"]) for each in answer["guesses"]]
    numbers = [int(place[1]) for place in places if place]
    guesses = [
        {number - start for number in numbers if 0 <= number - start < len(lines)}
        for start, lines in zip(starts, programs, strict=True)
    ]
    return json.loads((folder / "found.json").read_text()), guesses


def fault(stock: Stock, found: list[str], guessed: set[int]) -> tuple[str, list[str]] | None:
    """Describes the first wrong read that no guess explains, and lines that it follows from."""
    for i, read in enumerate(stock.reads):
        value = found[i] if i < len(found) else "nothing"
        if not read.is_known or read.lines & guessed:
            if re.match(r"\w+Error: ", value):
                return None  # a guess may end the program
        elif value != read.value:
            origin = [stock.lines[number] for number in sorted(read.lines)]
            return f"{stock.lines[read.line]}: {value}, and not {read.value}", origin
    return None


def faults(programs: list[list[str]], folder: Path) -> list[tuple[str, list[str]] | None]:
    """Judges programs in one dry run, and returns the fault of each."""
    stocks = [replayed(lines) for lines in programs]
    runs = [stock.lines for stock in stocks if stock is not None]
    found = iter(zip(*dry_run(runs, folder), strict=True))
    return [None if stock is None else fault(stock, *next(found)) for stock in stocks]


def shrunk(programs: list[list[str]], folder: Path) -> list[list[str]]:
    """Leaves out lines as long as a fault stays; one dry run tries all ways to leave out some."""
    first = [found[1] if found else [] for found in faults(programs, folder)]
    still = faults(first, folder)
    pairs = zip(programs, first, still, strict=True)
    programs = [origin if bad else lines for lines, origin, bad in pairs]
    for _ in range(MOST_TRIES):
        ways = [[way for way in without_some(lines) if is_whole(way)] for lines in programs]
        if not any(ways):
            break
        bad = iter(faults([way for each in ways for way in each], folder))
        left = [[way for way in each if next(bad)] for each in ways]
        if not any(left):
            break
        better = zip(programs, left, strict=True)
        programs = [min(each, key=len) if each else lines for lines, each in better]
    return programs


def without_some(lines: list[str]) -> list[list[str]]:
    places = [(i, i + n) for n in (4, 2, 1) for i in range(len(lines) - n + 1)]
    return [lines[:start] + lines[end:] for start, end in places]


def is_whole(lines: list[str]) -> bool:
    """Whether a program reads something, and nothing before it is made."""
    made: set[str] = set()
    for line in lines:
        target, _, rest = line.partition(" = ")
        is_made = NAME.fullmatch(target) is not None
        if not set(NAME.findall(rest if is_made else line)) <= made:
            return False
        if is_made:
            made.add(target)
    return bool(lines) and lines[-1].startswith("say(")


def test_values_that_follow_from_the_host_are_read_as_stock_torch_finds_them(
    torture: Torture, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        programs = [program(chance, OPERATORS, READS).lines for _ in range(NUM_PROGRAMS)]
        found = zip(programs, faults(programs, tmp_path), strict=True)
        bad = [lines for lines, wrong in found if wrong]
        least = shrunk(bad[:NUM_SHOWN], tmp_path) if bad else []
        notes = faults(least, tmp_path) if bad else []
        shown = [
            "\n".join([*lines, f"# {note[0] if note else 'none when it runs again'}"])
            for lines, note in zip(least, notes, strict=True)
        ]
        assert not bad, f"{len(bad)} programs with a wrong value:\n" + "\n\n".join(shown)

    torture(judge)


def test_a_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(programs: list[list[str]], _: Path) -> tuple[Any, Any]:
        stocks = [replayed(lines) for lines in programs]
        values = [[read.value for read in stock.reads] for stock in stocks if stock is not None]
        said = [
            ["wrong" if "v2" in " ".join(lines) else value for value in each]
            for lines, each in zip(programs, values, strict=True)
        ]
        return said, [set() for _ in programs]

    monkeypatch.setattr(f"{__name__}.dry_run", wrong)
    lines = ["v1 = torch.ones(3, device=D)", "v2 = v1.long()", "v3 = v1 + 1"]
    lines += ["say(v3.tolist())", "say(v2.tolist())", "say(int(v2.sum()))"]
    least = shrunk([lines], tmp_path)[0]
    assert least == lines[:2] + lines[4:5] or least == lines[:2] + lines[5:]
    assert fault(Stock(), [], set()) is None
