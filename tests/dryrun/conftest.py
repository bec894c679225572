"""Runs ``residency dry-run`` on scripts that know nothing of it."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
_SECONDS = 600  # of a busy machine


def without_units(value: Any) -> Any:
    """Shortens the keys of the answer: a test need not say that all its sizes are bytes."""
    if isinstance(value, list):
        return [without_units(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key.removesuffix("_bytes"): without_units(inner) for key, inner in value.items()}


@dataclass
class Outcome:
    """What a dry run printed, and its exit status."""

    status: int
    answer: dict[str, Any]
    errors: str

    @property
    def has_run(self) -> bool:
        """Whether the script came to its end, be it one that trains or not."""
        return self.answer.get("ended") == "finished" and self.status in (0, 3)

    def phase(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(p for p in self.answer["phases"] if p["name"] == name)
        return found


def run_dry(
    folder: Path,
    script: str | Path,
    *arguments: str,
    options: tuple[str, ...] = ("--capacity", "8GiB"),
    python: str = sys.executable,
) -> Outcome:
    """Runs a script of this folder, or a text, in a folder."""
    path = folder / "script.py"
    if isinstance(script, Path):
        path = script
    else:
        path.write_text(script)
    command = [sys.executable, "-m", "residency", "dry-run", "--json", *options, "--"]
    done = subprocess.run(
        [*command, python, str(path), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    answer = without_units(json.loads(done.stdout)) if done.stdout else {}
    return Outcome(done.returncode, answer, done.stderr)


@pytest.fixture
def dry_run(tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a script of this folder, or a text, in a folder of its own."""
    return functools.partial(run_dry, tmp_path)


@pytest.fixture(scope="module")
def dry_run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Outcome, Path]]:
    """Runs a script for all tests of a module, and says in which folder."""

    def run(script: str | Path, **options: Any) -> tuple[Outcome, Path]:
        folder = tmp_path_factory.mktemp("dry")
        return run_dry(folder, script, **options), folder

    return run
