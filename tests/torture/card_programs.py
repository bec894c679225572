"""Runs a judge's program in a dry run on a simulated card, with cases that it reads from a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def found_on(
    card: str, program: Path, cases: list[dict[str, Any]], folder: Path, **variables: str
) -> list[dict[str, Any]]:
    """Runs cases in one dry run, and returns what the program found of each.

    Args:
        card: As ``--device`` takes it.
        program: Takes two files: the cases, and where to write what it finds, both as JSON.
        cases: What the program runs.
        folder: For both files.
        **variables: Of the program's environment.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    found = folder / "found.json"
    found.unlink(missing_ok=True)
    options = ["--json", "--quiet", "--steps", "0", "--device", card]
    command = [sys.executable, "-m", "residency", "dry-run", *options, "--", "python"]
    ended = subprocess.run(
        [*command, str(program), str(folder / "cases.json"), str(found)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    answers: list[dict[str, Any]] = json.loads(found.read_text())
    return answers
