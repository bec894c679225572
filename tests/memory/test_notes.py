"""A note has one line for a list, says how it grows, what C++ holds, and which integration is for
the call that failed.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from notes import MIB, megabytes, note_of

import residency
from residency._memory import _framework_calls
from residency._memory._framework_calls import integration_lines
from residency._memory._history import held_history

pytestmark = [
    pytest.mark.device_memory(limit="64MiB"),
    pytest.mark.sim_device(schedule="late", workspaces=False),
]


@pytest.fixture(autouse=True)
def alone(search_to_its_end: None) -> Iterator[None]:
    """Forgets the phases of other tests."""
    held_history.clear()
    yield
    held_history.clear()


def note_of_steps(device: torch.device, num_steps: int, *sizes: int) -> str:
    """Returns the note of a step that fails after others, in each of which lists grew by tensors of
    so many MiB; a list of three was there before.
    """
    lists: dict[str, list[torch.Tensor]] = {name: [] for name in "ab"[: len(sizes)]}
    kept = [megabytes(1, device) for _ in range(3)]
    for _ in range(num_steps):
        with residency.phase("step"):
            for name, size in zip(lists, sizes, strict=True):
                lists[name].append(megabytes(size, device))
    note = note_of(lambda: megabytes(64, device), "step")
    assert len(kept) == 3
    return note


def test_a_list_that_grows_is_one_line_with_its_bytes_its_length_and_its_growth(
    device: torch.device,
) -> None:
    note = note_of_steps(device, 7, 2)
    assert "     14.00 MiB  note_of_steps() local 'lists' ['a']: 7 tensors, +1 a step\n" in note
    assert "      3.00 MiB  note_of_steps() local 'kept': 3 tensors\n" in note
    assert "local 'lists' ['a'][" not in note


@pytest.mark.parametrize(
    "sizes", [(2, 1), *(pytest.param((1, b), marks=pytest.mark.whole) for b in (1, 2))]
)
def test_where_two_lists_grow_both_are_named_and_a_third_is_not(
    device: torch.device, sizes: tuple[int, int]
) -> None:
    note = note_of_steps(device, 7, *sizes)
    for name in "ab":
        assert f"local 'lists' ['{name}']: 7 tensors, +1 a step\n" in note
    assert "local 'kept': 3 tensors\n" in note


def test_lists_of_few_tensors_and_of_many_sizes_tell_no_growth(device: torch.device) -> None:
    held = [megabytes(size, device) for size in (1, 2, 3, 4)]
    note = note_of_steps(device, 2, 2)
    assert "local 'held': 4 tensors\n" in note
    assert "local 'lists' ['a'][0]\n" in note
    assert " a step" not in note
    assert held


@pytest.mark.sim
@pytest.mark.parametrize(
    ("make", "is_offered"),
    [(torch.optim.Adam, True), (torch.optim.Adafactor, False), (torch.optim.LBFGS, False)],
)
def test_an_offload_is_offered_with_what_the_class_allows(
    device: torch.device, make: Any, is_offered: bool
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, device=device))
    optimizer = make([parameter])

    def loss() -> torch.Tensor:
        parameter.grad = torch.ones_like(parameter)
        return torch.zeros(())

    optimizer.step(loss)
    note = note_of(lambda: megabytes(64, device), "fill")
    assert ("offload_optimizer" in note) == is_offered
    del optimizer
    gc.collect()


@pytest.mark.sim
@pytest.mark.sim_device(schedule="late", workspaces=True)
def test_what_cpp_holds_is_told_apart(device: torch.device) -> None:
    kept = torch.empty(8320 * 1024, dtype=torch.uint8, device=device)  # as large, and known
    torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    note = note_of(lambda: megabytes(64, device), "fill")
    assert (
        "      8.12 MiB  held by C++ or autograd, not reachable from Python\n"
        "                1 block of 8.12 MiB, as large as cuBLAS's workspace of a stream: "
        "residency.reclaim() frees those\n"
    ) in note
    del kept
    before = residency.memory_state(device).held
    residency.reclaim(device=device)
    assert before - residency.memory_state(device).held == 8320 * 1024


def fail_in(module: str, function: str, inner: Callable[[], object]) -> torch.OutOfMemoryError:
    """Returns the error of a function that a module of that name would have."""
    names: dict[str, Any] = {"__name__": module, "inner": inner}
    exec(f"def {function}(): inner()", names)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        names[function]()
    return caught.value


def run_out() -> None:
    raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")


PEFT = ("peft.peft_model", "load_adapter")
REMEDY = (
    "it failed in PEFT's load_adapter: residency.integrations.transformers: ResidencyCallback "
    "reads adapters from the host into the parameters."
)


def test_a_place_that_an_integration_is_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "residency.integrations.transformers", raising=False)
    assert list(integration_lines(fail_in(*PEFT, run_out))) == [REMEDY]
    assert list(integration_lines(fail_in("peft.peft_model", "forward", run_out))) == []
    monkeypatch.setitem(sys.modules, "residency.integrations.transformers", None)  # type: ignore[arg-type]
    assert list(integration_lines(fail_in(*PEFT, run_out))) == []


def test_the_line_stands_in_the_note(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "residency.integrations.transformers", raising=False)
    note = note_of(lambda: (_ for _ in ()).throw(fail_in(*PEFT, run_out)), "fill")
    assert note.splitlines()[-1] == REMEDY


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("transformers.trainer", "ResidencyCallback keeps the optimizer's state on the host"),
        ("accelerate.optimizer", "offload_optimizer takes the result of `prepare`"),
        ("a_script", None),
    ],
)
def test_a_step_of_a_frameworks_optimizer_is_named(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, module: str, words: str | None
) -> None:
    monkeypatch.delitem(sys.modules, "residency.integrations.transformers", raising=False)
    parameter = torch.nn.Parameter(torch.zeros(6 * MIB, device=device))  # 24 MiB
    parameter.grad = torch.zeros_like(parameter)
    error = fail_in(module, "train", torch.optim.AdamW([parameter], foreach=False).step)
    lines = list(integration_lines(error))
    assert [words in line for line in lines] == ([True] if words else [])
    error.__traceback__ = None
    lines = list(integration_lines(fail_in(module, "train", run_out)))
    assert lines == []  # in the forward pass, say


def test_the_places_are_there_in_the_frameworks_that_are_installed() -> None:
    looked_at = 0
    for call in _framework_calls._CALLS:
        package, *rest = call.module.split(".")
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            continue
        source = Path(found.origin).parent.joinpath(*rest).with_suffix(".py").read_text()
        assert f"def {call.function}(" in source or not call.function, call
        looked_at += 1
    assert looked_at  # torch's at least
