"""The tables that torch tests itself with: its operators, modules and optimizers with samples."""

from __future__ import annotations

import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_MOST_NUMEL = 300_000  # a sample above it shows nothing that a smaller one does not
_MOST_LOOKED_AT = 40
_SEED = 99


def import_tables() -> None:
    """Imports torch's tables; raises ImportError where this torch lacks something they need."""
    # Imported by `common_utils` for a base class of test cases, of which none is made here.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stand_in)
    import torch.testing._internal.common_methods_invocations
    import torch.testing._internal.common_modules
    import torch.testing._internal.common_optimizers  # noqa: F401


def _tables(kind: str) -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

    if kind == "operator":
        return {info.formatted_name: info for info in op_db}
    if kind == "module":
        return {info.name: info for info in module_db}
    return {info.optim_cls.__name__: info for info in optim_db}


class Tables:
    """Torch's tables by kind and name."""

    def __init__(self) -> None:
        import_tables()
        self._of = {kind: _tables(kind) for kind in ("operator", "module", "optimizer")}

    def names(self, kind: str) -> list[str]:
        return sorted(self._of[kind])

    def info(self, kind: str, name: str) -> Any:
        return self._of[kind][name]


def reseed() -> None:
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)


def spread(items: list[Any], most: int) -> list[Any]:
    """Returns at most so many of the items, the first among them, evenly spread."""
    if len(items) <= most:
        return items
    return [items[i * len(items) // most] for i in range(most)]


def tensors_in(value: object) -> list[torch.Tensor]:
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def operator_samples(info: Any, dtype: torch.dtype, *, grad: bool, most: int) -> list[Any]:
    """Returns samples of an operator on the host; none for what it has no samples of."""
    reseed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Iterator[Any] = info.sample_inputs("cpu", dtype, requires_grad=grad)
        samples = [s for s in itertools.islice(made, _MOST_LOOKED_AT) if _is_plain(s)]
    return spread(samples, most)


def _is_plain(sample: Any) -> bool:
    tensors = tensors_in((sample.input, sample.args, sample.kwargs))
    return sum(tensor.numel() for tensor in tensors) <= _MOST_NUMEL and all(
        tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
        for tensor in tensors
    )
