"""Imports verl as each of Ray's workers does, and prints what came of it as the last line."""

import json
import logging
import sys


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.getMessage()} {record.exc_info}")


messages = Messages()
logging.getLogger("residency").addHandler(messages)

import verl  # noqa: E402

loaded = sorted(name for name in sys.modules if name.startswith("residency."))
are_workers_there = "verl.workers.engine_workers" in sys.modules

from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker  # noqa: E402

methods = [
    value
    for owner in (ActorRolloutRefWorker, TrainingWorker)
    for name, value in vars(owner).items()
    if name in ("update_actor", "compute_ref_log_prob", "compute_log_prob", "train_mini_batch")
]
print()
print(
    json.dumps(
        {
            "version": verl.__version__,
            "loaded": loaded,
            "are_workers_there": are_workers_there,
            "guarded": sum("_verl_guard" in method.__code__.co_filename for method in methods),
            "messages": messages.found,
        }
    )
)
