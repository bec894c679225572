"""What an interactive session keeps of its last error is named as that, and let go by one call."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from notes import megabytes, note_of

import residency

pytestmark = [
    pytest.mark.device_memory(limit="64MiB"),
    pytest.mark.sim_device(schedule="late", workspaces=False),
    pytest.mark.usefixtures("search_to_its_end", "session"),
]


@pytest.fixture
def session(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stands for IPython, which keeps an error under four names."""
    shell = types.SimpleNamespace(
        InteractiveTB=types.SimpleNamespace(tb=None), last_execution_result=None
    )
    module = types.ModuleType("IPython.core.interactiveshell")
    module.InteractiveShell = types.SimpleNamespace(_instance=shell)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.core.interactiveshell", module)
    yield shell
    shell.InteractiveTB.tb = shell.last_execution_result = None
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)


def show_error(session: Any, device: torch.device, *, kept: list[torch.Tensor]) -> None:
    """Lets a cell fail that has 24 MiB of its own, and a tensor that the session has, too."""

    def cell() -> None:
        weights = [megabytes(8, device) for _ in range(3)]
        old = kept[0]
        raise ValueError(len(weights) + len(old))

    try:
        cell()
    except ValueError as error:
        sys.last_value = error
        sys.last_traceback = error.__traceback__
        session.InteractiveTB.tb = error.__traceback__
        session.last_execution_result = types.SimpleNamespace(error_in_exec=error)


def test_what_the_last_error_alone_keeps_is_one_line_and_the_remedy(
    device: torch.device, session: Any
) -> None:
    kept = [megabytes(8, device)]
    show_error(session, device, kept=kept)
    note = note_of(lambda: megabytes(40, device), "try")
    # The tensor that something else has, too, would stay: it is not counted.
    what = "an error that is kept, with the values of the functions that it left"
    assert f"     24.00 MiB  sys.last_value, {what}: 3 tensors\n" in note
    assert note.splitlines()[-2] == "this would have made room:"
    assert note.splitlines()[-1].endswith("residency.reclaim(errors=True) lets go of it")
    assert kept


def test_one_call_lets_go_of_it_and_the_same_call_without_says_that_it_is_there(
    device: torch.device, session: Any
) -> None:
    kept = [megabytes(8, device)]
    show_error(session, device, kept=kept)
    without = residency.reclaim(device=device)
    assert "errors=True lets go of these" in str(without)
    freed = residency.reclaim(device=device, errors=True)
    assert freed.before.held - freed.after.held == 24 << 20
    assert freed.errors == freed.total > 0
    assert torch.accelerator.memory_allocated() == 8 << 20
    assert str(sys.last_value) == str(3 + (8 << 20))  # a person may still read it
    assert not residency.reclaim(device=device, errors=True).total


def test_a_notebook_shows_figures_as_print_does(device: torch.device) -> None:
    kept = megabytes(8, device)
    shown: list[str] = []
    printer = types.SimpleNamespace(text=shown.append)
    results = [residency.memory_state(device), residency.reclaim(device=device)]
    results += residency.holders("1MiB")[:1]
    for result in results:
        result._repr_pretty_(printer, False)
    assert shown == list(map(str, results))
    assert kept is not None
