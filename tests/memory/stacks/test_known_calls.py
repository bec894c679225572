"""The known calls of frameworks are there under their names, and each is put back as it was."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import residency
from residency._memory import _known_calls

FRAMEWORKS = [name for name in _known_calls._CALLS if not name.startswith(("torch", "residency"))]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_calls_of_a_framework_are_found_and_put_back(
    framework: Callable[..., Any], name: str, tmp_path: Path
) -> None:
    framework(name.partition(".")[0])
    module = importlib.import_module(name)

    def stored() -> list[Any]:
        found = []
        for path, _ in _known_calls._CALLS[name]:
            owner, _, attribute = path.rpartition(".")
            found.append(vars(getattr(module, owner) if owner else module)[attribute])
        return found

    before = stored()
    with residency.record(tmp_path / "run.jsonl"):
        inside = stored()
    assert all(a is not b for a, b in zip(before, inside, strict=True))
    assert [type(a) for a in before] == [type(b) for b in inside]  # class methods stay such
    assert all(a is b for a, b in zip(before, stored(), strict=True))
