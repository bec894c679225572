"""Starts a process as one of a dry run."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import residency

SCRIPTS = Path(__file__).parent / "scripts"
SITE = Path(residency.__file__).parent / "_cli" / "_site"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(SITE.parents[2])])}


_LIBRARY = ctypes.CDLL(None)
_DROP = 24  # PR_CAPBSET_DROP, of linux/prctl.h
_OF_ROOT = (1, 2, 3)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


def be_like_any_user() -> None:
    """Leaves a process that is about to begin no right to files but those that modes give.

    Where root does not run the tests, none is left already.
    """
    for capability in _OF_ROOT:
        _LIBRARY.prctl(_DROP, capability, 0, 0, 0)


def in_dry_run(
    folder: Path,
    words: Sequence[str],
    *,
    steps: int = 0,
    text: str | None = None,
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command in the folder ``user``; what the run keeps is in ``run`` beside it.

    Args:
        folder: Of both.
        words: The command.
        steps: After how many the loops are ended; 0 leaves them as they are.
        text: What the command reads.
        before: Is called in the process before the command is.
    """
    for name in ("user", "run"):
        (folder / name).mkdir(exist_ok=True)
    settings = json.dumps({"folder": str(folder / "run"), "steps": steps})
    return subprocess.run(
        words,
        cwd=folder / "user",
        env=ENVIRONMENT | {"RESIDENCY_DRY_RUN": settings},
        input=text,
        preexec_fn=before,
        capture_output=True,
        text=True,
        check=False,
    )


def judged_by(script: str, folder: Path) -> Any:
    """Returns what a script of ``scripts`` prints on its last line of the programs in a folder."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
