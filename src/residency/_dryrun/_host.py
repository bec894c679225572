"""The work that a dry run leaves out on the host: random numbers for large weights, and the
conversion of such weights, whose values mean nothing. Their memory is asked for and never touched.
"""

from __future__ import annotations

from typing import Any

import torch

from residency._dryrun._methods import around, replace_method
from residency._units import MIB

# What `Tensor.to` reads its arguments with. Torch does not annotate it.
_parse_to: Any = vars(torch._C)["_nn"]._parse_to
LARGE_BYTES = MIB  # the values of smaller tensors may steer a script


def leave_out_weights() -> None:
    """Makes large host tensors of floating-point numbers without filling them."""
    for name in ("normal_", "uniform_"):
        replace_method(name, _unfilled(getattr(torch.Tensor, name)))
    # Torch's own draws again until all numbers lie inside, which unfilled ones never need to.
    init: Any = torch.nn.init
    init._no_grad_trunc_normal_ = _unfilled(init._no_grad_trunc_normal_)
    replace_method("to", _unconverted(torch.Tensor.to))
    for name, dtype in (
        ("bfloat16", torch.bfloat16),
        ("half", torch.float16),
        ("float", torch.float32),
    ):
        replace_method(name, _unconverted(getattr(torch.Tensor, name), dtype))


def _is_large(tensor: torch.Tensor) -> bool:
    return (
        not torch.nn.parameter.is_lazy(tensor)
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and tensor.numel() * tensor.element_size() >= LARGE_BYTES
    )


def _unfilled(fill: Any) -> Any:
    @around(fill)
    def filled(tensor: torch.Tensor, *args: object, **options: object) -> Any:
        return tensor if _is_large(tensor) else fill(tensor, *args, **options)

    return filled


def _unconverted(convert: Any, target: torch.dtype | None = None) -> Any:
    """Returns a conversion that leaves out the numbers where a large weight stays on the host."""

    @around(convert)
    def converted(self: torch.Tensor, *args: object, **options: object) -> Any:
        if isinstance(self, torch.nn.Parameter) and not torch.is_grad_enabled() and _is_large(self):
            device, dtype = (target and (self.device, target)) or _parsed(args, options)
            if dtype not in (None, self.dtype) and device in (None, self.device):
                return torch.empty_like(self, dtype=dtype)
        return convert(self, *args, **options)

    return converted


def _parsed(args: Any, options: Any) -> tuple[Any, Any]:
    """Returns the device and the type that `Tensor.to` is asked for."""
    try:
        device, dtype, _, _ = _parse_to(*args, **options)
    except (TypeError, RuntimeError):  # another tensor, or `copy=`
        return None, None
    return device, dtype
