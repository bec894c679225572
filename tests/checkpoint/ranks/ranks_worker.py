"""One rank of test_ranks_save.py: saves with a Checkpointer, on the devices of several processes.

A phase finds what the ones before it saved.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "optim"))
sys.path.insert(0, str(Path(__file__).parents[2] / "sim"))
import ranks_saves_cases
import ranks_trouble_cases
from distributed_lab import (
    BACKEND,
    DEVICE,
    NUM_RANKS,
)
from ranks_lab import FOLDER, PHASE, cases, threads
from worker_cases import take_device

# As they are imported, `cases` gets their cases.
MODULES = (ranks_saves_cases, ranks_trouble_cases)


def main(own_rank: int) -> None:
    torch.set_num_threads(1)
    take_device("1GiB", schedule="late", check_races=True)
    threads.watch()
    store = dist.FileStore(str(FOLDER / f"store-{PHASE}"), NUM_RANKS)
    dist.init_process_group(
        f"cpu:gloo,{DEVICE}:{BACKEND}", store=store, rank=own_rank, world_size=NUM_RANKS
    )
    cases[PHASE].run(FOLDER / f"{PHASE}{own_rank}.json")
    if PHASE == "dying":
        os._exit(0)  # a group with a dead rank cannot be taken down
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
