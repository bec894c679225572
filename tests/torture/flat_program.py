"""Trainings with the first FSDP on a device, with what torch says of its memory.

``python flat_program.py cases.json found.json`` is one rank: in a dry run with no peer, or, with a
further word, ``with peers``, beside others that are there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if sys.argv[3:] == ["with peers"]:
    from residency import sim

    sim.enable("4GiB", device="cuda")

import torch
import torch.distributed as dist
from tests.torture.flat_cases import run


def main(cases: Path, found: Path) -> None:
    """Runs all cases of one file and writes what each took to another."""
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(0)
    answers = [run(case, f"case{i}") for i, case in enumerate(json.loads(cases.read_text()))]
    found.write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
