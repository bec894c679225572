"""A case in a process of its own: its report, its progress, and what goes wrong in it."""

import subprocess
import sys

import pytest

from residency import RefusedError, ResidencyError, _demo
from residency._demo._child import Child
from residency._errors import InvalidArgumentError


def test_an_unknown_case_is_refused_before_a_process_starts() -> None:
    apart = _demo.Apart(_demo.Settings())
    with apart, pytest.raises(InvalidArgumentError, match="optimizer-step"):
        apart.run("nothing", lambda *_: None)


@pytest.fixture
def child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "made_up_part.py").write_text(
        "import sys\n"
        "from residency._demo._child import answer, messages\n"
        "def echo():\n"
        "    for message in messages():\n"
        "        print('a framework prints', end='')\n"
        "        answer(got=message)\n"
        "def refuse():\n"
        "    answer(refused='for a reason')\n"
        "def end():\n"
        "    sys.exit('these are its last words')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    child = Child("made_up_part", request.param)
    yield child
    child.end()


@pytest.mark.parametrize("child", ["echo"], indirect=True)
def test_messages_come_back_whatever_else_is_printed(child: Child) -> None:
    for value in ("one", [1, {"two": None}]):
        child.send(value=value)
        assert child.receive() == {"got": {"value": value}}


@pytest.mark.parametrize("child", ["refuse"], indirect=True)
def test_a_refusal_is_raised_here(child: Child) -> None:
    with pytest.raises(RefusedError, match="for a reason"):
        child.receive()


@pytest.mark.parametrize("child", ["end"], indirect=True)
def test_the_last_words_of_a_process_that_ends_are_shown(child: Child) -> None:
    with pytest.raises(ResidencyError, match="ended with status 1: these are its last words"):
        child.receive()


def test_the_process_that_shows_the_progress_imports_no_torch() -> None:
    imports = "import sys; from residency import _demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", imports]).returncode == 0
