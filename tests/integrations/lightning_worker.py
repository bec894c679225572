"""Lightning's Trainer with this library's plugin and callback, and with the stock plugin beside it.

One process, in which the simulator is CUDA, for one of the two class trees; test_lightning.py reads
what became of each case.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import lightning_saves_cases
import lightning_training_cases
import lightning_values_cases
import torch
from lightning_lab import case, fit
from worker_cases import take_device

from residency.integrations.lightning import (
    ResidencyCheckpointIO,
)

# As they are imported, `case` gets their cases.
MODULES = (
    lightning_saves_cases,
    lightning_training_cases,
    lightning_values_cases,
)


def main(at: Path) -> None:
    take_device("1GiB", face="cuda", check_races=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the framework's advice to its users
    os.chdir(at)
    case.run(at / "outcomes.json")
    # Python ends with this save under way.
    trainer = fit(steps=1)
    trainer.strategy.checkpoint_io = ResidencyCheckpointIO()
    trainer.save_checkpoint(at / "last.ckpt")


if __name__ == "__main__":
    main(Path(sys.argv[2]))
