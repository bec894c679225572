"""The reducer of a dry run, without torch: scripts as lists of events, and what it says to each."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests.dryrun.event_lists import RECORDED, ROWS, differences, read, recorded, values

from residency._dryrun import _steering
from residency._dryrun._steering import Do, Happened, Here, Round, Steering, advance
from residency._units import MIB

LISTS = sorted(RECORDED.glob("*.jsonl"))
KNOWN = [each.events[:120] for each in (*map(read, ROWS.values()), *map(recorded, LISTS))]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # whoever imports it fails
sys.path.insert(0, sys.argv[1])
from tests.dryrun.event_lists import ROWS, differences, read
from residency._dryrun import _steering
assert not [name for row in ROWS.values() for name in differences(_steering, read(row))]
print(len(ROWS))
"""


@pytest.mark.parametrize("name", ROWS)
def test_a_script_ends_where_it_should(name: str) -> None:
    assert list(differences(_steering, read(ROWS[name]))) == []


@pytest.mark.parametrize("path", LISTS, ids=[path.stem for path in LISTS])
def test_a_recorded_run_is_decided_as_it_was(path: Path) -> None:
    assert list(differences(_steering, recorded(path))) == []


def test_a_row_that_differs_is_found() -> None:
    events = read("made A\nstep A @ items+\nstep A @ items+ -> end items")
    assert "stop_trainers=True" in next(differences(_steering, events))
    assert list(differences(_steering, read("made A\nstep A\n= num_steps 2")))


def test_the_reducer_runs_where_there_is_no_torch() -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", WITHOUT_TORCH, root]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(len(ROWS))], done.stderr


def test_the_reducer_imports_pythons_own_modules_and_a_unit() -> None:
    tree = ast.parse(Path(_steering.__file__).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    assert {name for name in names if name.split(".")[0] not in sys.stdlib_module_names} == {
        "residency._units"
    }


# ------------------------------------------------------------------------------ drawn histories

LOOPS, OPTIMIZERS, LOADERS, ITERATORS, LOADS = (1, 2, 3), (11, 12), (21, 22), (31, 32), (41, 42)
NAMED = 3  # of the loops


def some(numbers: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.sampled_from(numbers), unique=True, max_size=len(numbers)).map(tuple)


rounds = st.builds(
    lambda loop, number: Round(loop, number, loop == NAMED),
    st.sampled_from(LOOPS),
    st.integers(1, 5),
)
looks = st.builds(
    Here,
    around=st.lists(rounds, unique_by=lambda each: each.loop, max_size=3).map(tuple),
    are_ending=st.booleans(),
    in_library=st.booleans(),
    optimizers=some(OPTIMIZERS),
    loader=st.sampled_from((0, *LOADERS)),
    trained=some(LOADS),
    held=st.integers(0, 3).map(lambda number: number * MIB),
    gone=st.one_of(st.just(()), some((*OPTIMIZERS, *LOADERS, *ITERATORS))),
)
optimizers, loaders = st.sampled_from(OPTIMIZERS), st.sampled_from(LOADERS)
FACTS: dict[str, list[st.SearchStrategy[Any]]] = {
    "made": [optimizers],
    "stepping": [optimizers],
    "stepped": [optimizers, st.sampled_from((0, 4))],
    "backward": [],
    "begun": [],
    "loaded": [st.booleans()],
    "read": [],
    "reached": [st.sampled_from(LOADS), st.booleans(), st.booleans()],
    "passing": [loaders, st.booleans(), st.booleans()],
    "asked_batch": [loaders, st.sampled_from(ITERATORS), st.booleans()],
}
drawn = st.one_of(
    *(
        st.builds(Happened, st.just(kind), looks, st.tuples(*facts))
        for kind, facts in FACTS.items()
        for _ in range(3 if kind.startswith("step") else 1)
    )
)


@st.composite
def histories(draw: Any) -> list[Happened]:
    """Draws events, or a script of whose events some are left out, told twice or others."""
    if draw(st.booleans()):
        return draw(st.lists(drawn, max_size=40))
    known = [*draw(st.sampled_from(KNOWN))]
    for index in sorted(draw(st.sets(st.integers(0, len(known)), max_size=6)), reverse=True):
        known[index : index + 1] = draw(
            st.sampled_from([[], known[index : index + 1] * 2, [draw(drawn)]])
        )
    return known


def test_each_event_is_drawn() -> None:
    own = (Steering.made, Steering.stepping, Steering.stepped, Steering.backward, Steering.begun)
    loads = (
        Steering.loaded,
        Steering.read,
        Steering.reached,
        Steering.passing,
        Steering.asked_batch,
    )
    assert {each.__name__ for each in (*own, *loads)} == set(FACTS)
    public = {name for name, each in vars(Steering).items() if callable(each) and name[0] != "_"}
    assert public == set(FACTS)


@given(histories(), st.integers(0, 3))
@settings(deadline=None, max_examples=150)
def test_what_is_decided_can_be_done(events: list[Happened], wanted: int) -> None:
    state = Steering(wanted)
    for event in events:
        before, state_before = state, copy.deepcopy(state)
        state, do = advance(state, event)
        assert before == state_before, "the state before was changed"
        assert advance(before, event) == (state, do), "it is no function"
        check(event, before, state, do)


def check(event: Happened, before: Steering, state: Steering, do: Do) -> None:
    around = event.here.around
    assert set(do.end) <= {each.loop for each in around}
    assert not {each.loop for each in around[1:] if each.has_names} & set(do.end)
    if do.end:
        assert state.is_ending
    if do.stop_trainers:
        assert state.is_ending
        assert state.was_ended
        assert state.num_steps >= min(state.wanted, 1)
    if do.go_on:
        assert before.is_ending
        assert not state.is_ending
    assert not do.leave or (state.was_left and state.is_ending)
    assert not do.no_batch or event.kind in ("passing", "asked_batch")
    assert not do.has_enough or do.no_batch
    assert state.num_resumes <= 3
    assert state.num_trainings - before.num_trainings in (0, 1)
    assert state.num_steps - before.num_steps in (0, 1) or state.num_steps == 0
    assert not set(event.here.gone) & (state.seen.keys() - set(event.facts[:1]))
    if state.wanted == 0:
        assert do == Do()


@given(histories(), st.integers(-9, -1), st.integers(-50, -1))
@settings(deadline=None, max_examples=60)
def test_numbers_mean_nothing_but_who_it_is(
    events: list[Happened], factor: int, summand: int
) -> None:
    def name(number: int) -> int:
        return number and number * factor + summand  # backwards, and another one for each

    def renamed(event: Happened) -> Happened:
        here = event.here
        facts = tuple(
            name(each) if type(each) is int and not (event.kind == "stepped" and index) else each
            for index, each in enumerate(event.facts)
        )
        look = here._replace(
            around=tuple(each._replace(loop=name(each.loop)) for each in here.around),
            optimizers=tuple(map(name, here.optimizers)),
            loader=name(here.loader),
            trained=tuple(map(name, here.trained)),
            gone=tuple(map(name, here.gone)),
        )
        return Happened(event.kind, look, facts)

    def decisions(events: list[Happened]) -> list[dict[str, Any]]:
        state, found = Steering(2), []
        for event in events:
            state, do = advance(state, event)
            found.append(values(do))
        return found

    expected = [do | {"end": tuple(map(name, do["end"]))} for do in decisions(events)]
    assert decisions([renamed(event) for event in events]) == expected
