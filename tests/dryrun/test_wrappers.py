"""Whatever goes around a function in a dry run takes what that function takes.

``foreign_functions.py`` finds all of them in a process that was started with every change, and
judges each; none is listed. ``around``, by which they are made, is tried with drawn signatures.
"""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from residency._dryrun._from_files import FromFiles
from residency._dryrun._methods import around, put_around

# Who stands around whom, the outermost first: a function of a later file is called by one of an
# earlier one. Whoever changes what is asked for comes first, then whoever begins a phase, then
# whoever does something else, and last whoever only notes what was done.
CHANGES = (
    "_levers.py",
    "_trainers.py",
    "_frameworks.py",
    "_host.py",
    "_resumes.py",
    "_random_weights.py",
)
PHASES = ("_known_calls.py",)
STAND_INS = ("_saves.py",)
NOTES = ("_reaching.py", "_from_files.py", "_stopping.py", "_owners.py")
ORDER = (*CHANGES, *PHASES, *STAND_INS, *NOTES)
# What a dry run waits for that is not installed where these tests run everywhere.
OPTIONAL = {"timm", "triton", "trl", "ultralytics", "bitsandbytes"}


def judged(*packages: str) -> dict[str, Any]:
    program = Path(__file__).with_name("foreign_functions.py")
    command = [sys.executable, "-W", "ignore", str(program), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{"), done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("packages", "least", "least_chains"),
    [
        (("torch", "safetensors", "residency", "concurrent"), 95, 14),
        pytest.param((), 125, 17, marks=pytest.mark.whole),
    ],
    ids=["torch", "all"],
)
def test_each_wrapper_takes_what_its_function_takes(
    packages: tuple[str, ...], least: int, least_chains: int
) -> None:
    found = judged(*packages)
    assert found["wrong"] == []
    assert found["bare"] == [], "stands in a place of another, and around nothing"
    assert {name.partition(".")[0] for name in found["missing"]} <= OPTIONAL
    assert found["number"] >= least  # it has looked
    chains = found["chains"]
    assert {place: sorted(files, key=ORDER.index) for place, files in chains.items()} == chains
    assert len(chains) >= least_chains


def drawn(draw: random.Random, names: list[str]) -> str:
    """Returns the text of a signature over names, some for position alone, some with defaults."""
    bare, named = draw.randint(0, 1), draw.randint(2, len(names))
    with_default = draw.randint(1, len(names))
    parts = []
    for index, name in enumerate(names):
        parts += ["/"] * (index == bare > 0) + ["*"] * (index == named)
        parts.append(name + f"={index}" * (index >= with_default))
    return ", ".join(parts)


@pytest.mark.parametrize("is_put", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_calls_arrive_as_they_do_at_the_function_itself(seed: int, is_put: bool) -> None:
    draw = random.Random(seed)
    names = [*draw.choice([(), ("self",)]), *draw.sample("abcdef", 4)]
    space: dict[str, Any] = {}
    text = drawn(draw, names)
    exec(f"def function({text}):\n    return ({', '.join(names)})", space)
    function: Callable[..., Any] = space["function"]
    firsts = list(inspect.signature(function).parameters.values())[: draw.randint(0, 2)]
    taken = [f"own_{p.name}" + f"={p.default}" * (p.default is not p.empty) for p in firsts]
    given = ", ".join([*(f"own_{p.name}" for p in firsts), "*args", "**options"])
    space["called"] = []
    other = ["other"] * is_put
    exec(
        f"def wrapper({', '.join([*other, *taken, '*args', '**options'])}):\n"
        f"    called.append(1)\n    return {'other' if is_put else 'function'}({given})",
        space,
    )
    owner = types.SimpleNamespace(name=function)
    if is_put:
        assert put_around(owner, "name")(space["wrapper"]) is space["wrapper"]
        wrapped = owner.name
    else:
        wrapped = around(function)(space["wrapper"])
    assert inspect.signature(wrapped) == inspect.signature(function)
    parameters = list(inspect.signature(function).parameters.values())
    for _ in range(8):
        args, options = [], {}
        is_by_position = True
        for number, each in enumerate(parameters):
            is_method = each.name == "self" and not number
            needs = each.kind is each.POSITIONAL_ONLY or is_method
            is_by_position &= each.kind is not each.KEYWORD_ONLY and (needs or draw.random() < 0.5)
            if each.default is not each.empty and draw.random() < 0.3:
                is_by_position = False
            elif is_by_position:
                args.append(f"given {each.name}")
            elif not needs:
                options[each.name] = f"given {each.name}"
        space["called"].clear()
        assert wrapped(*args, **options) == function(*args, **options)
        assert space["called"] == [1]


def test_a_native_function_takes_its_arguments_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Tensor] = []
    files = FromFiles(copied.append)
    for name in ("to", "clone", "copy_"):
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    monkeypatch.setattr(
        "residency._dryrun._from_files.replace_method",
        lambda name, method: monkeypatch.setattr(torch.Tensor, name, method),
    )
    files.watch()
    source, target = torch.ones(3), torch.zeros(3)
    files.add([source])
    assert target.copy_(other=source.clone(memory_format=torch.contiguous_format)) is target
    assert target.tolist() == [1.0] * 3
    assert copied == [target]
