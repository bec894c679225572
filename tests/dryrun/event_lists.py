"""Happened lists: what the reducer of a dry run is told of a script, and what it must say to it.

Written by hand they are text, a line for an event (`read`):

    made A                      an optimizer, which is there from now on
    step A @ items+, epochs     `stepping` and `stepped`, in loops, the innermost first: with a plus
                                in their next round; *phases goes over names
    batch L for library         a loader is asked for a batch (``for library``: by a loop of one)
    40 x backward @ items+      an event, forty times
    reached X trained           a load; ``noted X`` says that it has reached what is trained now

``-> end items epochs, stop_trainers`` after a line is what must be done then, and nothing at all
others; ``= num_steps 2`` is how the state must be. ``held 3`` are MiB from then on, ``in library``
and ``out of library`` say where the script is, ``drained`` that the last batch was one, and
``gone A`` that it is there no more. A loop that was ended is under way until an event without it.

`recorded` reads the files that ``RESIDENCY_DRY_RUN_EVENTS`` asks a dry run for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.dryrun import rows_of_loaders, rows_of_loads, rows_of_trainings

from residency._dryrun._steering import Do, Happened, Here, Round
from residency._units import MIB

RECORDED = Path(__file__).parents[1] / "data" / "steering"
ROWS = rows_of_trainings.ROWS | rows_of_loaders.ROWS | rows_of_loads.ROWS


@dataclass
class EventList:
    """The events of a script, and the decision after each of them."""

    wanted: int = 2
    events: list[Happened] = field(default_factory=list)
    expected: list[Do] = field(default_factory=list)
    state: list[tuple[int, str, Any]] = field(default_factory=list)  # after so many events


class _Reader:
    def __init__(self) -> None:
        self.found = EventList()
        self._numbers: dict[str, int] = {}
        self._rounds: dict[str, int] = {}
        self._ended: set[str] = set()
        self._optimizers: list[str] = []
        self._noted: list[str] = []
        self._gone: list[str] = []
        self._last = self._held = 0
        self._in_library = False

    def number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers) + 1)

    def take(self, line: str) -> None:
        line, _, done = (part.strip() for part in line.partition("->"))
        line, _, loops = (part.strip() for part in line.partition("@"))
        words = line.split()
        times = 1
        if words[1:2] == ["x"]:
            times, words = int(words[0]), words[2:]
        around = [each.strip() for each in loops.split(",")] if loops else []
        for _ in range(times):
            for name in (each.strip("*+") for each in around if each.endswith("+")):
                self._rounds[name] = self._rounds.get(name, 0) + 1
            self._event(words, around, done)

    def _event(self, words: list[str], around: list[str], done: str) -> None:
        kind, names = words[0], words[1:]
        match kind:
            case "wanted":
                self.found.wanted = int(names[0])
            case "held":
                self._held = int(names[0]) * MIB
            case "in" | "out":
                self._in_library = kind == "in"
            case "drained":
                self._last = 0
            case "there":
                self._optimizers = names
            case "noted":
                self._noted = names
            case "gone":
                self._gone += names
                self._optimizers = [each for each in self._optimizers if each not in names]
            case "=":
                value = json.loads(names[1].lower())
                self.found.state.append((len(self.found.events), names[0], value))
            case "step":
                self._add("stepping", self._facts(names), around, "")
                self._add("stepped", self._facts(names), around, done)
            case "batch":
                loader, iterator = names[0], f"an iterator of {names[0]}"
                if names[1:2] == ["by"]:
                    iterator, names = names[2], [*names[:1], *names[3:]]
                facts = (self.number(loader), self.number(iterator), "library" not in names)
                self._add("asked_batch", facts, around, done)
                self._last = self._last if "no_batch" in done else self.number(loader)
            case "passing":
                facts = (self.number(names[0]), "library" not in names, "inner" not in names)
                self._add(kind, facts, around, done)
            case "reached":
                flags = ("trained" in names, "copied" in names)
                self._add(kind, (self.number(names[0]), *flags), around, done)
            case "loaded":
                self._add(kind, ("whole" in names,), around, done)
            case _:
                if kind == "made":
                    self._optimizers = [*self._optimizers, names[0]]
                self._add(kind, self._facts(names), around, done)

    def _facts(self, names: list[str]) -> tuple[int, ...]:
        return tuple(int(e) if e.isdigit() else self.number(e) for e in names)

    def _add(self, kind: str, facts: tuple[Any, ...], around: list[str], done: str) -> None:
        loops = [each.strip("*+") for each in around]
        self._ended &= set(loops)
        rounds = [
            Round(self.number(f"the loop {name}"), self._rounds.setdefault(name, 1), "*" in each)
            for name, each in zip(loops, around, strict=True)
        ]
        here = Here(
            around=tuple(rounds),
            are_ending=bool(self._ended),
            in_library=self._in_library,
            optimizers=tuple(map(self.number, self._optimizers)),
            loader=self._last,
            trained=tuple(map(self.number, self._noted)),
            held=self._held,
            gone=tuple(map(self.number, self._gone)),
        )
        self._gone = []
        do = self._do(done)
        if do.go_on:
            self._ended.clear()
        self._ended |= {name for name in loops if self.number(f"the loop {name}") in do.end}
        self.found.events.append(Happened(kind, here, facts))
        self.found.expected.append(do)

    def _do(self, done: str) -> Do:
        do = Do()
        for words in (part.split() for part in done.split(",") if part.strip()):
            if words[0] == "end":
                do.end = tuple(self.number(f"the loop {name}") for name in words[1:])
            else:
                assert hasattr(do, words[0]), words
                setattr(do, words[0], True)
        return do


def read(text: str) -> EventList:
    """Returns the events of a text, as the module says."""
    reader = _Reader()
    for line in text.strip().splitlines():
        if line.strip():
            reader.take(line.strip())
    return reader.found


def recorded(path: Path) -> EventList:
    """Returns what a dry run has recorded."""
    lines = map(json.loads, path.read_text().splitlines())
    found = EventList(next(lines)["wanted"])
    for kind, here, facts, do in lines:
        found.events.append(Happened(kind, _here(here), tuple(facts)))
        found.expected.append(Do(**do | {"end": tuple(do.get("end", ()))}))
    return found


def _here(values: list[Any]) -> Here:
    around = tuple(Round(*each) for each in values[0])
    return Here(around, *(tuple(e) if isinstance(e, list) else e for e in values[1:]))


def differences(steering: Any, events: EventList) -> Iterator[str]:
    """Yields where a reducer, the module or a copy of it, says another thing than it must."""
    state = steering.Steering(events.wanted)
    states = [state]
    for number, (event, expected) in enumerate(zip(events.events, events.expected, strict=True)):
        state, do = steering.advance(state, event)
        states.append(state)
        if values(do) != values(expected):
            yield f"event {number}: {event}: {do}, and not {expected}"
    for number, name, value in events.state:
        if getattr(states[number], name) != value:
            yield f"after {number} events: {name} is {getattr(states[number], name)}, not {value}"


def values(do: Any) -> dict[str, Any]:
    """Returns what is to be done, which compares with that of a copy of the module."""
    return {name: getattr(do, name) for name in Do.__slots__}
