"""Calls of ``flex_attention`` on a device, with what torch says of its memory: for a dry run.

``python flex_program.py cases.json found.json``. Each case is a call of its own, compiled or not.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.torture.flex_cases import run


def main(cases: Path, found: Path) -> None:
    """Runs all cases of one file and writes what each took to another."""
    gc.disable()
    gc.freeze()
    torch.autograd.set_multithreading_enabled(False)  # no other thread frees what is counted
    # A call that is not compiled is none for a script that compiles something else, either.
    torch.compile(torch.add)(torch.zeros(1, device="cuda"), 1)
    found.write_text(json.dumps([run(case) for case in json.loads(cases.read_text())]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
