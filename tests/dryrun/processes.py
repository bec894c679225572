"""Starts a process as one of a dry run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import residency

SITE = Path(residency.__file__).parent / "_cli" / "_site"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(SITE.parents[2])])}


def in_dry_run(
    folder: Path, words: Sequence[str], *, steps: int = 0, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command in the folder ``user``; what the run keeps is in ``run`` beside it.

    Args:
        folder: Of both.
        words: The command.
        steps: After how many the loops are ended; 0 leaves them as they are.
        text: What the command reads.
    """
    for name in ("user", "run"):
        (folder / name).mkdir(exist_ok=True)
    settings = json.dumps({"folder": str(folder / "run"), "steps": steps})
    return subprocess.run(
        words,
        cwd=folder / "user",
        env=ENVIRONMENT | {"RESIDENCY_DRY_RUN": settings},
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
