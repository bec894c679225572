"""A script whose loops can be ended does what it does without that, and says the same."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from tests.dryrun.processes import ENVIRONMENT, in_dry_run

WHO_AM_I = """
'''A script.'''
from __future__ import annotations
import sys
print(__name__, __file__, __doc__, __spec__, __package__, __cached__, type(__annotations__))
print(sys.argv, sys.path[0], sys.flags.safe_path, type(__builtins__), sorted(vars()))
"""
LOOPS = """
def numbers(last):
    number = 0
    while number < last:
        number += 1
        if number % 2:
            continue
        yield number
    else:
        print("no more")
    return "returned"

def delegated():
    print((yield from numbers(5)))

def out_of_two():
    for i in range(3):
        for j in range(3):
            if i == j == 1:
                break
        else:
            print("whole", i)
            continue
        break
    else:
        print("never")
    while 0:
        return print("nothing")
    while True:
        print("once")
        for k in iter(int, 0):
            print("nothing")
        else:
            break
    for i in range(2):
        while i:
            print(i)
            break
        else:
            continue
        return i, j

def left_by(error):
    try:
        for i in range(3):
            try:
                while str(i):
                    raise error(i)
            finally:
                print("closed", i)
                continue
    except StopIteration:
        print("out")
    return [next(n for n in numbers(9) if n > i) for i in range(3)]

class Body:
    for name in map(str.upper, "ab"):
        print(name)
    values = [n * 2 for n in map(int, "12")]
    __private = {n: str(n) for n in values}
    squares = {str(x + y) for x in map(int, "12") for y in map(int, str(x)) if str(x)}
    def get(self):
        return [self.__private[n] for n in map(int, "24")]

for value in delegated():
    print(value)
iterator = numbers(6)
for first in iterator:
    print(first, next(iterator), list(iterator))
print(out_of_two(), left_by(KeyError), left_by(StopIteration), sorted(Body.squares), Body().get())
for Body.values[0], *Body.rest in map(str, [12, 345]):
    print(Body.values, Body.rest)
"""
BROKEN = {
    "no_iterable": "for x in print:\n    print(x)",
    "in_the_iterable": "def f(x):\n    return 1 / x\nfor x in map(f, [1, 0]):\n    print(x)",
    "in_a_generator": "def g():\n    yield from (1 / int(x) for x in '10')\nfor x in g(): print(x)",
    "in_the_test": "x = 1\nwhile 1 / int(x):\n    x -= 1\n    print(x)",
    "in_the_body": "def f():\n    for x in map(str, 'a'):\n        raise KeyError(x)\n\nf()",
    "chained": "for x in 'a':\n try: int(x)\n except ValueError as e: raise KeyError(x) from e",
    "in_a_module": "import other\nother.f(0)",
    "no_syntax": "for x in :\n    pass",
    "no_text": "\x00",
    "an_exit": "import sys\nfor x in map(sys.exit, [3]):\n    pass",
    "to_the_end_of_time": "while iter(()):\n    raise SystemExit('out of it')",
}
OTHER = "def f(x):\n    for y in [x]:\n        print(1 / int(y))\n"
SPAWNED = """
import multiprocessing, pickle
def double(number):
    return [2 * n for n in map(int, [number])]
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, range(3)), pickle.dumps(double))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that a run begins with."""
    (tmp_path / "user").mkdir()
    return tmp_path


def both(folder: Path, *words: str) -> list[tuple[int, str, str]]:
    """Runs Python with these words as it is, and in a dry run."""
    command = [sys.executable, *words]
    user = folder / "user"
    plain = subprocess.run(
        command, cwd=user, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    ours = in_dry_run(folder, command, steps=2)
    return [(each.returncode, _said(each.stdout), _said(each.stderr)) for each in (plain, ours)]


def _said(text: str) -> str:
    """Returns a text without addresses and marks: Python 3.11 makes none where no items come."""
    text = re.sub("0x[0-9a-f]+", "0x", text)
    return re.sub(r"^[ ~^]+$\n", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("flags", [[], ["-P"], ["-O"]])
def test_a_script_is_what_it_is(folder: Path, flags: list[str]) -> None:
    Path(folder, "user", "below").mkdir()
    Path(folder, "user", "below", "who.py").write_text(WHO_AM_I)
    Path(folder, "user", "link.py").symlink_to(Path("below", "who.py"))
    for name in ("below/who.py", "./link.py", str(folder / "user" / "below" / "who.py")):
        plain, ours = both(folder, *flags, name, "--flag", "x")
        assert ours == plain
        assert plain[0] == 0


def test_loops_do_what_they_do(folder: Path) -> None:
    Path(folder, "user", "loops.py").write_text(LOOPS)
    plain, ours = both(folder, "loops.py")
    assert ours == plain
    assert plain[0] == 0, plain


@pytest.mark.parametrize("name", BROKEN)
def test_a_script_that_fails_says_the_same(folder: Path, name: str) -> None:
    Path(folder, "user", "broken.py").write_text(BROKEN[name])
    Path(folder, "user", "other.py").write_text(OTHER)
    plain, ours = both(folder, "broken.py")
    assert ours == plain
    assert plain[0]


@pytest.mark.parametrize("words", [["-m", "who"], ["package"], ["archive.zip"], ["-m", "package"]])
def test_a_module_and_an_archive_are_run_as_ever(folder: Path, words: list[str]) -> None:
    Path(folder, "user", "package").mkdir()
    Path(folder, "user", "package", "__main__.py").write_text(WHO_AM_I)
    Path(folder, "user", "who.py").write_text(WHO_AM_I)
    with zipfile.ZipFile(folder / "user" / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", WHO_AM_I)
    plain, ours = both(folder, *words)
    assert ours == plain
    assert plain[0] == 0


def test_no_code_of_ours_is_left_for_later_runs(folder: Path) -> None:
    Path(folder, "user", "other.py").write_text(OTHER)
    for word in ("-c", "-Bc"):
        in_dry_run(folder, [sys.executable, word, "import other; other.f(1)"], steps=2)
    assert not list(folder.rglob("*.pyc"))


def test_processes_find_functions_of_the_script(folder: Path) -> None:
    Path(folder, "user", "spawned.py").write_text(textwrap.dedent(SPAWNED))
    plain, ours = both(folder, "spawned.py")
    assert ours == plain
    assert plain[0] == 0
