"""The mutation check changes what it says it does, draws evenly, and tells what survived."""

from __future__ import annotations

import collections
from pathlib import Path

import covered_lines
import mutants
import mutations
import pytest


def _changed(source: str, kind: str) -> list[str]:
    """Returns the source with each mutant of a kind, without the mark of being reached."""
    content = source.encode()
    found = [m for m in mutants.find("_optim", "_optim/_x.py", content) if m.kind == kind]
    texts = [mutants.apply(content, mutant).decode() for mutant in found]
    for text in texts:
        compile(text, "x.py", "exec")
    mark = '__import__("sys").mutant_was_reached = True'
    return [
        "\n".join(line for line in text.split("\n") if line.strip() != mark).strip("\n")
        for text in texts
    ]


@pytest.mark.parametrize(
    ("kind", "source", "changed"),
    [
        ("wait removed", "stream.wait_event(event)", ["pass"]),
        ("wait removed", "gate.before_write(\n    tensors)", ["pass"]),
        ("wait removed", "done = event.wait(3)", []),
        ("one off", "f(x[4:])", ["f(x[5:])"]),
        ("one off", "f(offset, é[offset])", ["f((offset + 1), é[offset])"]),
        ("one off", "raise ValueError(3)", []),
        ("one off", "f(f'{x[4]}')", []),
        ("comparison turned", "(a) < (b)", ["(a) <= (b)"]),
        ("comparison turned", "a == b != c", ["a != b != c", "a == b == c"]),
        ("comparison turned", "a is None", ["a is not None"]),
        ("comparison turned", "a is  not None", ["a is None"]),
        ("comparison turned", "a not in b", ["a in b"]),
        ("comparison turned", "a > b", ["a >= b"]),
        ("condition negated", "if a or b:\n    c", ["if (not (a or b)):\n    c"]),
        (
            "condition negated",
            "if a:\n    b\nelif c:\n    d",
            ["if (not (a)):\n    b\nelif c:\n    d", "if a:\n    b\nelif (not (c)):\n    d"],
        ),
        (
            "finally dropped",
            "try:\n    a()\nfinally:\n    b()\n    c()",
            ["try:\n    a()\nfinally:\n    pass"],
        ),
        (
            "lock dropped",
            "with self._lock, other:\n    a()",
            ['with __import__("contextlib").nullcontext(), other:\n    a()'],
        ),
        ("lock dropped", "with suppress(BlockingIOError):\n    a()", []),
        ("stale buffer", "a.copy_(b)", ["pass"]),
        ("stale buffer", "return_ = a[0].copy_(b).sum()", ["return_ = a[0].sum()"]),
        ("wrong stream", "s = lanes.d2h", ["s = lanes.h2d"]),
        ("wrong stream", "f(h2d)", ["f(d2h)"]),
        ("fsync skipped", "os.fsync(file)", ["pass"]),
        ("arguments swapped", "f(a[0], b, c)", ["f(b, a[0], c)"]),
        ("arguments swapped", "isinstance(a, b), f(*a, b), f(a, a)", []),
        (
            "early return",
            'def f() -> None:\n    """Does."""\n    g()',
            ['def f() -> None:\n    """Does."""\n    return None\n    g()'],
        ),
        (
            "early return",
            "def f() -> None:\n    try:\n        g()\n    finally:\n        h()",
            ["def f() -> None:\n    return None\n    try:\n        g()\n    finally:\n        h()"],
        ),
        ("early return", "def f() -> int:\n    g()", []),
        ("and/or swapped", "x = a and b or c", ["x = (a and b and c)", "x = (a or b) or c"]),
    ],
)
def test_a_kind_changes_what_it_says_and_nothing_else(
    kind: str, source: str, changed: list[str]
) -> None:
    assert sorted(_changed(source, kind)) == sorted(changed)


def test_every_kind_has_places_in_the_library() -> None:
    found = mutants.of_tree(mutations.ROOT / "src" / "residency", mutants.PACKAGES)
    assert {m.kind for m in found} == set(mutants.KINDS)
    assert len({m.name for m in found}) == len(found)


def test_a_draw_is_even_over_files_packages_and_kinds_and_the_same_for_a_seed() -> None:
    found = mutants.of_tree(mutations.ROOT / "src" / "residency", mutants.PACKAGES)
    drawn = mutants.sample(found, 50, seed=3)
    assert drawn == mutants.sample(found, 50, seed=3) != mutants.sample(found, 50, seed=4)
    assert drawn[:20] == mutants.sample(found, 20, seed=3)  # a longer draw begins as a short one
    assert len({m.file for m in drawn}) >= 45
    # A package has as many as it has files, where these are fewer than its share.
    assert set(collections.Counter(m.package for m in drawn).values()) <= {8, 9, 10, 11, 12}
    assert max(collections.Counter(m.kind for m in drawn).values()) < 20


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a library of one function, and a test that sees one of its two branches."""
    source = tmp_path / "src" / "residency" / "_optim"
    source.mkdir(parents=True)
    (source.parent / "__init__.py").write_text("")
    (source / "__init__.py").write_text("")
    plugin = source.parent / "testing"  # which the installed library has pytest load
    plugin.mkdir()
    (plugin / "__init__.py").write_text("")
    (plugin / "plugin.py").write_text("")
    (source / "_half.py").write_text(
        "def half(number):\n    if number == 0:\n        return 7\n    return number // 2\n\n\n"
        "def unused(number):\n    return number + 5\n"
    )
    tests = tmp_path / "tests" / "optim"
    tests.mkdir(parents=True)
    (tests / "test_half.py").write_text(
        "from residency._optim._half import half\n\n\ndef test_a_half():\n    assert half(8) == 4\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    slow\n    whole\n"
    )
    return tmp_path


def _command(checkout: Path, kind: str) -> list[str]:
    lines = checkout / "lines.db"
    covered_lines.record(checkout, lines)
    command = ["--root", str(checkout), "--results", str(checkout / "results.jsonl")]
    return [*command, "--lines", str(lines), "--kind", kind]


@pytest.mark.whole
def test_a_change_that_a_test_sees_is_found_and_others_survive(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in checkout.rglob("*.py")}
    results = checkout / "results.jsonl"
    command = _command(checkout, "one off")
    mutations.main([*command, "--seconds", "30", "--count", "9"])
    found = {result.was: result for result in mutations.read(results).values()}

    assert found["return number // 2"].state == "found"
    assert found["return number // 2"].test == "tests/optim/test_half.py::test_a_half"
    assert found["if number == 0:"].state == "survived"
    assert found["if number == 0:"].reached
    assert found["return number + 5"].state == "survived"
    assert not found["return number + 5"].reached
    assert {path: path.read_bytes() for path in checkout.rglob("*.py")} == before

    capsys.readouterr()
    page = checkout / "table.md"
    mutations.main([*command, "--resume", "--table", str(page)])
    assert capsys.readouterr().out == ""  # all are known
    assert "| optim | 4 | 1 | 0 | 3 |" in page.read_text()
    page.write_text(page.read_text().replace("| no |  |", "| no | nobody calls it |"))
    mutations.main([*command, "--resume", "--table", str(page)])
    assert page.read_text().count("nobody calls it") == 2  # also of the branch that no test takes
    assert page.read_text().count("| yes |  |") == 1


@pytest.mark.whole
def test_a_test_that_fails_on_the_real_code_is_not_asked(checkout: Path) -> None:
    broken = checkout / "tests" / "optim" / "test_broken.py"
    broken.write_text(
        "from residency._optim._half import half\n\ndef test_it():\n    assert half(0) == 1\n"
    )
    mutations.main([*_command(checkout, "comparison turned"), "--seconds", "30"])
    (result,) = mutations.read(checkout / "results.jsonl").values()
    assert (result.state, result.test) == ("found", "tests/optim/test_half.py::test_a_half")


@pytest.mark.whole
def test_a_test_that_fails_alone_on_the_real_code_ends_the_command(checkout: Path) -> None:
    command = _command(checkout, "comparison turned")
    test = checkout / "tests" / "optim" / "test_half.py"
    test.write_text(test.read_text().replace("== 4", "== 5"))
    with pytest.raises(SystemExit, match=r"test_half\.py::test_a_half fails on the real code"):
        mutations.main(command)


@pytest.mark.whole
def test_the_record_names_the_tests_of_a_line_and_of_the_processes_that_they_start(
    checkout: Path,
) -> None:
    (checkout / "tests" / "optim" / "test_child.py").write_text(
        "import subprocess, sys\n\ndef test_a_child():\n"
        "    code = 'from residency._optim._half import half; half(0)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    path = checkout / "lines.db"
    assert covered_lines.record(checkout, path) == 0
    lines = covered_lines.Lines(path)
    child, test = "tests/optim/test_child.py::test_a_child", "tests/optim/test_half.py::test_a_half"
    assert lines.tests("_optim/_half.py", range(2, 3)) == [test, child]
    assert lines.tests("_optim/_half.py", range(3, 4)) == [child]
    assert lines.tests("_optim/_half.py", range(4, 5)) == [test]
    assert lines.tests("_optim/_half.py", range(8, 9)) == []
    assert 0 < lines.seconds(test) < lines.seconds(child)


def test_tests_that_hang_or_die_have_found_the_change() -> None:
    fields = dict.fromkeys(("name", "package", "file", "kind", "was", "now"), "")
    for code, output, how in [
        (1, "FAILED tests/a.py::b - Failed: Timeout (>60.0s) from pytest-timeout.", "hang"),
        (None, "", "hang"),
        (-11, "", "signal 11"),
        (1, "FAILED tests/a.py::b - assert 1 == 2", "failure"),
        (4, "ImportError while loading conftest", "no start"),
        (2, "ERROR tests/a.py\n! Interrupted: 1 error during collection !", "no start"),
    ]:
        result = mutations.Result(**fields, line=1, state="survived")
        mutations._judge(result, code, output)
        assert (result.state, result.how) == ("found", how)
    for code, output in [(0, "3 passed"), (2, "!!! the time is over !!!\n3 passed")]:
        result = mutations.Result(**fields, line=1, state="survived")
        mutations._judge(result, code, output)
        assert result.state == "survived"
    with pytest.raises(RuntimeError, match="no test ran"):
        mutations._judge(mutations.Result(**fields, line=1, state="survived"), 5, "")
