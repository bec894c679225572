"""Breaks each invariant that a docstring states, and looks whether its test sees it.

``python tests/tools/broken_invariants.py`` takes all of them, in half an hour; with names of
modules, those alone. It never writes to the checkout: each change is made in a copy of ``src``
that stands first on the path. The table is in ``invariant_breaks.py``; ``tests/test_invariants.py``
holds it against the docstrings.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from invariant_breaks import BREAKS, Break

ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 900  # on a busy machine, too


def is_seen(broken: Break) -> tuple[bool, str]:
    """Returns whether the test fails on the change, and the last line that it said."""
    with tempfile.TemporaryDirectory(prefix="broken-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "residency" / broken.changed
        path.write_text(path.read_text().replace(broken.was, broken.now))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", ""]
        try:
            done = subprocess.run(
                [*command, *broken.test.split()],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(source)},
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return True, f"hangs for more than {_SECONDS} s"
    said = (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]
    return done.returncode == 1, said


def main(names: list[str]) -> int:
    """Prints a line for each, and returns how many no test has seen."""
    num_unseen = 0
    for broken in BREAKS:
        if names and broken.module not in names:
            continue
        seen, said = is_seen(broken)
        num_unseen += not seen
        print(f"{'seen' if seen else 'NOT SEEN'}  {broken.module}: {said}", flush=True)
    return num_unseen


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
