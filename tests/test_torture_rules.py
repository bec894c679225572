"""The judges of tests/torture see what a user sees, and say how to repeat what they found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TORTURE = Path(__file__).parent / "torture"


def private_imports(source: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [
        name
        for name in names
        if name.split(".")[0] == "residency" and any(p.startswith("_") for p in name.split("."))
    ]


def test_a_private_import_is_seen() -> None:
    assert private_imports("from residency import _device, sim") == ["residency._device"]
    assert private_imports("import residency._units") == ["residency._units"]
    assert private_imports("from residency._units import MIB\nimport torch") == [
        "residency._units.MIB"
    ]


def test_no_judge_imports_anything_private() -> None:
    found = {file.name: private_imports(file.read_text()) for file in TORTURE.glob("*.py")}
    assert not any(found.values()), found


JUDGE = """
def test_a_judge(torture):
    def judge(chance):
        assert chance.random() < 0.99
    torture(judge)
"""


@pytest.fixture
def judged(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest((TORTURE / "conftest.py").read_text())
    pytester.makepyfile(JUDGE)
    return pytester


def test_a_failing_seed_is_printed_with_the_command_that_repeats_it(
    judged: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORTURE_SECONDS", "60")
    result = judged.runpytest()
    result.assert_outcomes(failed=1)
    line = next(line for line in result.outlines if "Repeat it: TORTURE_SEED=" in line)
    seed = line.split("TORTURE_SEED=")[1].split()[0]
    monkeypatch.setenv("TORTURE_SEED", seed)
    judged.runpytest().assert_outcomes(failed=1)
    monkeypatch.setenv("TORTURE_SEED", "0")  # whose first number is 0.84
    judged.runpytest().assert_outcomes(passed=1)


@pytest.mark.parametrize("variable", ["TORTURE_SECONDS", "TORTURE_ROUNDS", "TORTURE_SEED"])
def test_what_is_no_number_is_answered_with_the_usage(
    variable: str, judged: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "soon")
    result = judged.runpytest()
    result.stdout.fnmatch_lines([f"*{variable} is 'soon'; expected a number*make torture*"])


def test_the_seeds_are_new_in_each_run_and_printed_or_those_of_a_text(
    judged: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seed() -> str:
        judged.makepyfile("def test_a_judge(torture):\n    torture(lambda chance: None)")
        lines = judged.runpytest().outlines
        (line,) = [line for line in lines if line.startswith("2 rounds from seed ")]
        assert line.endswith("::test_a_judge")
        return line.split()[4]

    monkeypatch.delenv("TORTURE_FROM", raising=False)
    assert seed() != seed()
    monkeypatch.setenv("TORTURE_FROM", "a commit")
    assert seed() == seed()


def test_the_tests_of_a_file_share_its_time(
    judged: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged.makepyfile(
        "import time\nimport pytest\n\n"
        "@pytest.mark.parametrize('number', range(4))\n"
        "def test_a_judge(torture, number):\n"
        "    begin = time.monotonic()\n"
        "    torture(lambda chance: time.sleep(0.01))\n"
        "    assert time.monotonic() - begin >= 0.1\n"
    )
    monkeypatch.setenv("TORTURE_SECONDS", "0.4")
    result = judged.runpytest()
    result.assert_outcomes(passed=4)
    rounds = [int(line.split()[0]) for line in result.outlines if " rounds from seed " in line]
    assert len(rounds) == 4
    assert max(rounds) <= 10  # a fourth of the time each
    monkeypatch.setenv("TORTURE_ROUNDS", "2")
    lines = judged.runpytest().outlines
    assert sum(line.startswith("2 rounds from seed ") for line in lines) == 4
