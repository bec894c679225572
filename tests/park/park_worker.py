"""One process of test_uses.py: runs every case of a phase and writes what became of each.

``two`` are the cases of ``park_ranks_cases.py``, ``uses`` those of ``park_uses_cases.py``.
"""

from __future__ import annotations

import sys

import park_ranks_cases
import park_uses_cases
import torch
import torch.distributed as dist
from park_lab import FOLDER, NUM_RANKS, PHASE, cases

from residency import sim

# As they are imported, `cases` gets their cases.
MODULES = (park_ranks_cases, park_uses_cases)


def main(own_rank: int) -> None:
    torch.set_num_threads(1)
    sim.enable("1GiB", schedule="late", check_races=True)
    if PHASE == "two":
        store = dist.FileStore(str(FOLDER / f"store-{PHASE}"), NUM_RANKS)
        dist.init_process_group(
            "cpu:gloo,sim:simccl", store=store, rank=own_rank, world_size=NUM_RANKS
        )
    cases[PHASE].run(FOLDER / f"{PHASE}{own_rank}.json")
    if PHASE == "two":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
