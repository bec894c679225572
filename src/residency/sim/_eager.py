"""Runs eagerly what would be compiled: Triton has no simulated accelerator to compile for."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch


def disable_compilation() -> None:
    """Lets ``torch.compile`` return what it is given, and say so once."""
    compile_for_real = torch.compile

    @functools.wraps(compile_for_real)
    def run_eagerly(model: Any = None, **options: Any) -> Any:
        warnings.warn(
            "torch.compile does nothing beside the simulated accelerator: the model runs eagerly.",
            stacklevel=2,
        )
        return (lambda function: function) if model is None else model

    vars(torch)["compile"] = run_eagerly
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # what was compiled earlier, and has not run yet
        dynamo.config.disable = True
