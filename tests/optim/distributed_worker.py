"""One rank of test_distributed.py: runs every case and writes what became of each.

A case ends at the bits of the plain optimizer on the same ranks, which runs beside it.
"""

from __future__ import annotations

import sys

import distributed_sharding_cases
import distributed_states_cases
import torch
import torch.distributed as dist
from distributed_lab import BACKEND, DEVICE, FOLDER, NUM_RANKS, PHASE, cases
from worker_cases import take_device

# As they are imported, `cases` gets their cases.
MODULES = (
    distributed_sharding_cases,
    distributed_states_cases,
)


def main(own_rank: int) -> None:
    torch.set_num_threads(1)
    take_device("1GiB", schedule="late", check_races=True)
    store = dist.FileStore(str(FOLDER / f"store-{PHASE}"), NUM_RANKS)
    dist.init_process_group(
        f"cpu:gloo,{DEVICE}:{BACKEND}", store=store, rank=own_rank, world_size=NUM_RANKS
    )
    cases[PHASE].run(FOLDER / f"{PHASE}{own_rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
