"""Sees through what wraps a module or an optimizer and only changes how it is called."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Wrappers that put themselves into the names of what they wrap, by the files that define them: who
# has not loaded these has none. Source: torch._dynamo, checkpoint_wrapper, torch.distributed.fsdp.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
)


def plain_module(module: nn.Module) -> nn.Module:
    """Returns the module inside of wrappers that only change how it is called."""
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif (inner := compiled_module(module)) is not None:
            module = inner
        else:
            return module


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Returns the module that ``torch.compile`` made another one of."""
    found = _wrapped(module)
    return found[1] if found is not None and found[0] == "_orig_mod" else None


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Returns what a wrapper wraps, and how it calls it; by its class, as others may have a part
    of the same name.
    """
    for file, kind, name in _WRAPPERS:
        loaded: Any = sys.modules.get(file)
        if loaded is not None and isinstance(module, getattr(loaded, kind, ())):
            inner: Any = module._modules[name]
            return name, inner
    return None


def plain_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside of accelerate's wrapper, or what it is given."""
    accelerate: Any = sys.modules.get("accelerate.optimizer")
    if accelerate is not None and isinstance(optimizer, accelerate.AcceleratedOptimizer):
        return optimizer.optimizer
    return optimizer


@dataclass(frozen=True, slots=True)
class Place:
    """The place in a module of a name of its state dict.

    Attributes:
        parts: The parts on the way there, the module first, wrappers among them.
        name: The name without what wrappers add.
        rest: What is left of the name below the last part.
    """

    parts: tuple[nn.Module, ...]
    name: str
    rest: str


def place_of(module: nn.Module, name: str) -> Place:
    """Finds a name of a module's state dict, from which a hook of a wrapper may have taken the
    wrapper's own word away already.
    """
    parts: list[nn.Module] = []
    named: list[str] = []
    words = deque(name.split("."))
    num_left = len(words)
    part: nn.Module | None = module
    while words and part is not None:
        parts.append(part)
        found = _wrapped(part)
        if found is not None:
            part = found[1]
            if words[0] == found[0]:
                words.popleft()
            continue
        num_left = len(words)
        named.append(words.popleft())
        # Not `get`, which TorchScript's table of parts does not have.
        part = part._modules[named[-1]] if named[-1] in part._modules else None  # noqa: SIM401
    named += words
    return Place(tuple(parts), ".".join(named), ".".join(named[-num_left:]))


def clean_names(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns names of parts or parameters of a module without what wrappers add."""
    if all(_wrapped(part) is None for part in module.modules()):
        return list(names)  # as nearly always
    return [place_of(module, name).name for name in names]
