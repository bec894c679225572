"""Torch's own samples of its operators, the first five of each in fp32 and in bf16."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
from typing import Any

import torch

from benchmarks.atlas.rows import DEVICE, DTYPES, Atlas, tensors_of, warm

_NUM_SAMPLES = 5


def opinfo(atlas: Atlas, part: int = 0, num_parts: int = 1) -> None:
    """Writes the rows of every operator of which the number among all has that remainder."""
    operators = sorted(_operators(), key=lambda info: (info.name, info.variant_test_name))
    warm()
    for operator in operators[part::num_parts]:
        for dtype in ("fp32", "bf16"):
            _of_operator(atlas, operator, dtype)


def _operators() -> list[Any]:
    stand_in: Any = types.ModuleType("expecttest")  # torch's tests want its class, and no more
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    # A private name: torch publishes no samples. Its tests are imported when they are needed.
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def _of_operator(atlas: Atlas, operator: Any, dtype: str) -> None:
    name = ".".join(filter(None, (operator.name, operator.variant_test_name)))
    try:
        samples = _samples(operator, DTYPES[dtype])
    except Exception as error:  # a sample that torch cannot make is no case of ours
        failed = f"{type(error).__name__}: {str(error)[:80]}"
        atlas.write({"op": name, "dtype": dtype, "sample_error": failed})
        return
    for number, sample in enumerate(samples):
        try:
            given, arguments, options = (
                _moved(part) for part in (sample.input, sample.args, sample.kwargs)
            )
        except Exception:  # a layout that has no copy
            continue
        if "device" in options:
            options["device"] = DEVICE
        inputs = [t for t in tensors_of([given, list(arguments), options]) if t.requires_grad]
        run = functools.partial(operator, given, *arguments, **options)
        atlas.row(name, run, inputs, dtype=dtype, n=number)


def _samples(operator: Any, dtype: torch.dtype) -> list[Any]:
    if dtype not in operator.supported_dtypes(DEVICE):
        return []
    grads = operator.supports_autograd and dtype in operator.supported_backward_dtypes(DEVICE)
    torch.manual_seed(0)
    return list(
        itertools.islice(operator.sample_inputs("cpu", dtype, requires_grad=grads), _NUM_SAMPLES)
    )


def _moved(value: Any) -> Any:
    """Returns what is on the host on the device; a named tuple stays as it is."""
    if torch.is_tensor(value):
        return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return value if hasattr(value, "_fields") else type(value)(_moved(part) for part in value)
    if isinstance(value, dict):
        return {name: _moved(part) for name, part in value.items()}
    return torch.device(DEVICE) if isinstance(value, torch.device) else value
