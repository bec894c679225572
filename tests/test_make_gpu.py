"""``make gpu``: what it runs is there, what is missing is said at once, and the report is whole."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command, with a report in a folder of the test's own."""
    monkeypatch.syspath_prepend(str(ROOT))
    module: Any = importlib.import_module("benchmarks.gpu")
    monkeypatch.setattr(module, "report_path", lambda *_: tmp_path / "report.md")
    monkeypatch.setattr(module, "_hardware", lambda: "NVIDIA H200")
    return module


def test_every_folder_and_file_that_it_names_is_there(gpu: Any) -> None:
    names = [name for part in gpu._TESTS.values() for name in part]
    assert all((ROOT / name.removeprefix("--ignore=")).exists() for name in names), names
    for part in ("benchmarks", "probe", "record", "atlas"):
        for _, module, *_ in gpu._commands(part):
            assert importlib.util.find_spec(module) is not None


def test_an_unknown_part_is_named(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["probe", "tests/optim"]) == 2
    assert "no part is named tests/optim; there are: benchmarks, probe, " in capsys.readouterr().out


def test_what_is_missing_is_said_in_one_line_before_anything_runs(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = gpu._is_installed
    absent = ("hypothesis", "pytest_timeout")
    monkeypatch.setattr(gpu, "_is_installed", lambda name: name not in absent and there(name))
    assert gpu.main(["probe", "optimizers"]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("missing: pytest-timeout hypothesis. ")


def test_a_machine_without_a_gpu_is_told_so(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "_hardware", lambda: "simulated")
    monkeypatch.setattr(gpu, "_IS_SIMULATED", False)
    assert gpu.main([]) == 2
    assert "torch finds no accelerator" in capsys.readouterr().out


def test_the_report_has_each_commands_output_and_a_failure_is_the_status(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = (
        "print('PASS one')",
        "print('FAIL two'); raise SystemExit(3)",
        "print('PASS three')",
    )
    monkeypatch.setattr(gpu, "_commands", lambda part: [("-c", program) for program in programs])
    assert gpu.main(["probe"]) == 1
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# gpu\n\n- hardware: NVIDIA H200, ")
    assert "make gpu PARTS='probe'" in report
    assert [line for line in report.splitlines() if line.startswith(("PASS", "FAIL"))] == [
        "PASS one",
        "FAIL two",
        "PASS three",
    ]
    assert "\nstatus 3, " in report


def test_a_command_at_the_end_of_its_time_is_interrupted_and_shows_what_it_has(gpu: Any) -> None:
    done = gpu._run(("-c", "import time; print('PASS one', flush=True); time.sleep(600)"), 1)
    assert done.status != 0
    assert done.output.startswith("PASS one\n")
    assert "KeyboardInterrupt" in done.output
    assert "cut off after 1 s" in done.section()


def test_a_group_is_over_in_its_time_and_says_what_was_not_run(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "_SECONDS_OF_A_GROUP", 1)
    monkeypatch.setattr(gpu, "_commands", lambda part: [("-c", "import time; time.sleep(600)")])
    assert gpu.main(["figures"]) == 1
    report = (tmp_path / "report.md").read_text()
    assert report.count("cut off after 1 s") == 1
    assert report.count("not run: there was no time left") == len(gpu._GROUPS["figures"]) - 1


def test_what_looks_at_the_whole_card_runs_alone(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_is_installed", lambda name: True)
    beside, alone = gpu._commands("memory")
    assert "(whole or not whole) and not alone" in beside
    assert "-n" in beside
    assert "alone" in alone
    assert "-n" not in alone


def test_the_report_ends_with_the_figures_beside_those_of_other_cards(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = "from benchmarks import figures; figures.show('park', '49.0 GB/s', '55.2')"
    monkeypatch.setattr(gpu, "_commands", lambda part: [("-c", shown)])
    assert gpu.main(["probe"]) == 0
    *_, heading, _, head, _, row = (tmp_path / "report.md").read_text().splitlines()
    assert heading == "## Beside other cards"
    assert head == "| | this card | limit | H200 | H100 |"
    assert row == "| park | 49.0 GB/s | 55.2 | 51.0 GB/s | - |"


def test_of_tests_the_report_has_the_failures_and_the_counts(gpu: Any) -> None:
    output = "....F\nTraceback ...\n== short test summary info ==\nFAILED a.py::b\n1 failed in 2s\n"
    done = gpu._Done(("-m", "pytest", "a.py"), 1, 2.0, output)
    assert done.section() == (
        "## `python -m pytest a.py`\n\nstatus 1, 2 s\n\n"
        "```\n== short test summary info ==\nFAILED a.py::b\n1 failed in 2s\n```\n"
    )
