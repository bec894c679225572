"""Transformers, PEFT and accelerate with the integration, in one process in which the simulator is
CUDA, its work late and its races checked.

test_transformers.py reads what became of each case. The frameworks are the installed ones.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import transformers
import transformers_adapters_cases
import transformers_evaluation_cases
import transformers_interrupted_cases
import transformers_saving_cases
import transformers_training_cases
from transformers_interrupted_cases import dead, let_some_die
from transformers_lab import case
from worker_cases import take_device

# As they are imported, `case` gets their cases.
MODULES = (
    transformers_adapters_cases,
    transformers_evaluation_cases,
    transformers_interrupted_cases,
    transformers_saving_cases,
    transformers_training_cases,
)


def main(folder: Path) -> None:
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # capacities here have no room for larger ones
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the frameworks' advice to their users
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    dead.extend(let_some_die(folder))
    take_device("1GiB", face="cuda", check_races=True)
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
