"""Transformers, PEFT and accelerate with the integration, in one process in which the simulator is
CUDA, its work late and its races checked.

test_transformers.py reads what became of each case. The frameworks are the installed ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers_adapters_cases
import transformers_evaluation_cases
import transformers_interrupted_cases
import transformers_parking_cases
import transformers_saving_cases
import transformers_streaming_cases
import transformers_training_cases
from transformers_interrupted_cases import dead, let_some_die
from transformers_lab import case, set_up_process
from worker_cases import take_device

# As they are imported, `case` gets their cases.
MODULES = (
    transformers_adapters_cases,
    transformers_evaluation_cases,
    transformers_interrupted_cases,
    transformers_parking_cases,
    transformers_saving_cases,
    transformers_streaming_cases,
    transformers_training_cases,
)


def main(folder: Path) -> None:
    set_up_process()
    dead.extend(let_some_die(folder))
    take_device("1GiB", face="cuda", check_races=True)
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
