"""A warm process that has imported real frameworks and used no device, and forks for each round.

In a fork the simulator stands in CUDA's place, its work late or overtaking, and in half of the
rounds its races are checked.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from framework_lab import Round
from lightning_rounds import lightning_round
from trainer_rounds import accelerate_round, trainer_round
from warm_process import Log, serve

from residency import sim


def task(play: Round) -> Callable[[dict[str, Any], Log], None]:
    def run(request: dict[str, Any], log: Log) -> None:
        chance = random.Random(request["seed"])
        sim.enable(
            "256MiB",
            context="0B",
            schedule=chance.choice(["late", "overtake", "eager"]),
            check_races=chance.random() < 0.5,
            device="cuda",
        )
        os.chdir(request["folder"])
        play(chance, Path(request["folder"]), log)
        torch.accelerator.synchronize()

    return run


if __name__ == "__main__":
    rounds = {"lightning": lightning_round, "trainer": trainer_round}
    rounds["accelerate"] = accelerate_round
    serve({name: task(play) for name, play in rounds.items()})
