"""The cases that a worker process runs; its test reads what became of each."""

from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Case = Callable[[], None]


class Cases:
    """Collects functions as a decorator, and runs them in their order."""

    def __init__(self) -> None:
        self._functions: dict[str, Case] = {}

    def __call__(self, function: Case) -> Case:
        self._functions[function.__name__] = function
        return function

    def run(self, file: Path) -> None:
        """Writes ``{name: "passed" or the traceback}`` after every case."""
        outcomes = {}
        for name, function in self._functions.items():
            try:
                function()
                outcomes[name] = "passed"
            except (Exception, pytest.fail.Exception):
                outcomes[name] = traceback.format_exc()
            file.write_text(json.dumps(outcomes))
            gc.collect()
            torch.accelerator.synchronize()
