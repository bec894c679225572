"""A script that comes from no file does what Python does with it, and its loops can be ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.dryrun.processes import ENVIRONMENT, in_dry_run
from tests.dryrun.test_rewriting import LOOPS

ENDING = """
from residency._dryrun._loops import loops
for number in range(5):
    print(number)
    loops.end([each.number for each in loops.around()])
print("after", __name__)
"""
EXECUTED = {
    "text": "exec(SOURCE, {'__name__': 'mine'})",
    "bytes": "exec(SOURCE.encode(), {'__name__': 'mine'})",
    "here": "exec(SOURCE)",
    "compiled": "exec(compile(SOURCE, '<a cell>', 'exec'))",
    "a_tree": "import ast\nexec(compile(ast.parse(SOURCE), '<a cell>', mode='exec'))",
    "within": "exec('exec(SOURCE)')",
    "by_runpy": "open('other.py', 'w').write(SOURCE)\nimport runpy\nrunpy.run_path('other.py')",
    "in_a_function": "def f():\n    SOURCE_ = SOURCE\n    exec(SOURCE_)\nf()",
}
FORMS = {
    "an_expression": "print(eval('[int(x) for x in \"12\"]'))",
    "another_exec": "def exec(text):\n    print(type(text), text)\nexec('for x in [1]: print(x)')",
    "a_method": "class A:\n    def exec(self, text): print(text)\nA().exec('for x in 1: f()')",
    "no_text": "exec(compile('for x in \"ab\": print(x)', 'f', 'exec'))",
    "spread": "exec(*['for x in \"ab\": print(x)'])",
    "a_future": "from __future__ import annotations\nexec('def f(x: nothing):\\n    "
    "for y in x: print(y)\\nf([3])\\nprint(f.__annotations__)')",
    "no_future": "exec(compile('def f(x: int):\\n    for y in x: print(y)\\nf([3])\\n"
    "print(f.__annotations__)', 'f', 'exec', dont_inherit=True))",
    "a_single_one": "exec(compile('[int(x) for x in \"12\"]', 'f', 'single'))",
    "no_syntax": "try:\n    exec('for x in :')\nexcept SyntaxError as e:\n    print(e.msg)",
    "an_error": "for x in map(int, '1'):\n    raise KeyError(x)",
    "an_exit": "import sys\nfor x in map(sys.exit, [3]):\n    pass",
    "arguments": "import sys\nfor x in map(str, sys.argv): print(x)\nprint(sys.path[0], __name__)",
    "nothing_to_follow": "import sys\nprint(sys.argv, __name__)",
    "at_the_end": "import atexit\natexit.register(print, 'bye')\nfor x in map(int, '1'): print(x)",
}


def words_of(source: str, way: str) -> tuple[list[str], str | None]:
    """Returns a command that runs a text, and what it reads."""
    if way == "-c":
        return [sys.executable, "-c", source, "one", "2"], None
    return [sys.executable, "-", "one", "2"], source


def as_python_runs_it(
    folder: Path, words: list[str], text: str | None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, env=ENVIRONMENT, input=text, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("way", "form"),
    [*(("-c", form) for form in [*FORMS, "loops"])]
    + [("-", form) for form in ("a_future", "an_error", "an_exit", "arguments", "at_the_end")],
)
def test_a_text_does_what_it_does_without_a_dry_run(way: str, form: str, tmp_path: Path) -> None:
    words, text = words_of(FORMS.get(form, LOOPS), way)
    (tmp_path / "plain").mkdir()
    plain = as_python_runs_it(tmp_path / "plain", words, text)
    dry = in_dry_run(tmp_path, words, steps=2, text=text)
    assert (dry.returncode, dry.stdout) == (plain.returncode, plain.stdout), dry.stderr
    assert dry.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert "residency" not in dry.stderr


@pytest.mark.parametrize("way", ["-c", "-"])
def test_the_loops_of_a_text_are_ended_and_what_comes_after_them_runs(
    way: str, tmp_path: Path
) -> None:
    words, text = words_of(ENDING, way)
    dry = in_dry_run(tmp_path, words, steps=2, text=text)
    assert dry.stdout.split() == ["0", "after", "__main__"], dry.stderr


@pytest.mark.parametrize("form", EXECUTED)
def test_the_loops_of_what_a_script_executes_are_ended(form: str, tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "script.py").write_text(f"SOURCE = {ENDING!r}\n{EXECUTED[form]}\n")
    dry = in_dry_run(tmp_path, [sys.executable, "script.py"], steps=2)
    assert dry.stdout.split()[:2] == ["0", "after"], (dry.stdout, dry.stderr)
