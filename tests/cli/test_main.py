"""The command line answers with one message and one status, whatever went wrong."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from limits import WORKER_SECONDS

import residency
from residency import _demo
from residency._cli import main
from residency._demo import CaseRow, Promise, Report
from residency._errors import RefusedError

ROW = CaseRow("a-case", "run", 8, 1, "finished", None, None, None, 1.0, 0.5, 0.7, True, 0.1)
REPORT = Report("a-case", "a device", {}, (ROW,), (Promise("holds", True, "it does"),), "code()")
BROKEN = dataclasses.replace(REPORT, promises=(Promise("holds", False, "it does not"),))

Fake = Callable[[str], Report]


def answering(report: Report) -> Fake:
    return lambda name: report


def raising(error: BaseException) -> Fake:
    def run(name: str) -> Report:
        raise error

    return run


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], None]:
    def use(fake: Fake) -> None:
        monkeypatch.setattr(_demo.Apart, "run", lambda apart, name, show, *, then: fake(name))

    return use


def test_the_status_is_zero_when_every_promise_held(
    use: Callable[[Fake], None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(answering(REPORT))
    assert main(["demo"]) == 0
    assert "holds" in capsys.readouterr().out


def test_the_status_is_one_when_a_promise_was_broken(
    use: Callable[[Fake], None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(answering(BROKEN))
    assert main(["demo"]) == 1
    assert "BROKEN" in capsys.readouterr().out


@pytest.mark.parametrize("report", [REPORT, BROKEN])
def test_json_is_all_that_stdout_holds(
    use: Callable[[Fake], None], capsys: pytest.CaptureFixture[str], report: Report
) -> None:
    use(answering(report))
    status = main(["demo", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["held"] == (status == 0)
    assert document["reports"][0]["rows"] == [dataclasses.asdict(ROW)]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RefusedError("found this, expected that"), 2, "found this, expected that"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (ModuleNotFoundError("No module", name="rich"), 2, "pip install 'residency[demo]'"),
        (ModuleNotFoundError("No module named 'x'", name="x"), 2, "No module named 'x' (--debug"),
        (ImportError("cannot import name 'y'", name="rich"), 2, "ImportError: cannot import name"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_a_traceback_only_for_debugging(
    use: Callable[[Fake], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    words: str,
) -> None:
    use(raising(error))
    assert main(["demo"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert main(["demo", "--debug"]) == status
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_our_own_is_one_line_that_names_the_way_to_its_traceback(
    use: Callable[[Fake], None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(raising(ZeroDivisionError("one by none")))
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "ZeroDivisionError: one by none (--debug shows the traceback)" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "1"], "num_steps is 1; expected at least 2"),
        (["--seed", "-1"], "seed is -1"),
        (["--case", "nothing"], "no case 'nothing'"),
    ],
)
def test_an_option_that_means_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["demo", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_options_reach_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Fake(_demo.Apart):
        def __init__(self, settings: _demo.Settings) -> None:
            super().__init__(settings)
            seen.append(settings)

        def run(self, name: str, show: object, *, then: str | None = None) -> Report:
            seen.append((name, then))
            return REPORT

    monkeypatch.setattr(_demo, "Apart", Fake)
    main(["demo", "--case", "resume", "--case", "hand-off", "--steps", "7", "--seed", "3"])
    settings = _demo.Settings(num_steps=7, seed=3)
    assert seen == [settings, ("resume", "hand-off"), ("hand-off", None)]


def test_the_help_of_the_demo_names_its_cases_and_their_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"Cases: {', '.join(_demo.CASES)}" in said
    settings = _demo.Settings()
    assert f"each run ({settings.num_steps})" in said
    assert f"batches ({settings.seed})" in said


def test_without_a_verb_the_commands_to_begin_with_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 12
    for verb in ("dry-run", "record", "demo", "doctor"):
        assert f"residency {verb}" in shown
        with pytest.raises(SystemExit) as stopped:
            main([verb, "--help"])
        assert stopped.value.code == 0


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"residency {residency.__version__}"


def test_importing_the_package_registers_no_device_and_builds_nothing() -> None:
    code = (
        "import sys, residency; "
        "assert 'residency_sim' not in sys.modules; "
        "assert 'torch.utils.cpp_extension' not in sys.modules; "
        "assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WORKER_SECONDS)
