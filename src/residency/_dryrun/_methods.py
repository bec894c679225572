"""Functions in the place of methods of ``torch.Tensor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def replace_method(name: str, method: Callable[..., Any]) -> None:
    """Puts a function in a method's place, for the parameters of lazy modules, too."""
    # Those let through only the methods in this list, which they compare by identity.
    lazy: Any = torch.nn.UninitializedParameter
    allowed = lazy._allowed_methods
    if getattr(torch.Tensor, name) in allowed:
        allowed.append(method)
    setattr(torch.Tensor, name, method)
