"""The work that a dry run leaves out on the host: random numbers for large weights, and conversions
and copies of such weights, whose values mean nothing. Their memory is asked for and never touched.

What a script draws after them is what it would have drawn: how long its samples are, and in which
order they come, decides its peak. So as many numbers of 32 bits are taken from the generator as
CPU kernels take: a few elements are filled, and the others take one each, or two for a double.
Source: `normal_fill` and `uniform_kernel` in aten/src/ATen/native/cpu/DistributionTemplates.h.
"""

from __future__ import annotations

from typing import Any

import torch

from residency._dryrun._methods import around, replace_method
from residency._units import MIB

# What `Tensor.to` reads its arguments with. Torch does not annotate it.
_parse_to: Any = vars(torch._C)["_nn"]._parse_to
LARGE_BYTES = MIB  # the values of smaller tensors may steer a script
_MOST_TAKEN = 1_000_000_000  # numbers, in 3 seconds; after them the generator stands still
_taken = 0


def leave_out_weights() -> None:
    """Makes large host tensors of floating-point numbers without filling them."""
    for name in ("normal_", "uniform_"):
        replace_method(name, _unfilled(getattr(torch.Tensor, name)))
    # Since torch 2.12 it draws again until all numbers lie inside, which wide bounds never need.
    init: Any = torch.nn.init
    init._no_grad_trunc_normal_ = _unfilled(init._no_grad_trunc_normal_)
    replace_method("copy_", _uncopied(torch.Tensor.copy_))
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
    def filled(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not _is_large(tensor):
            return fill(tensor, *args, **options)
        # Kernels go by sixteen elements, and treat the last ones with what is over.
        few = torch.empty(16 + tensor.numel() % 16, dtype=tensor.dtype, device="cpu")
        fill(few, *args, **options)
        words = 2 if tensor.dtype is torch.float64 else 1
        _take(words * (tensor.numel() - few.numel()), options.get("generator"))
        return tensor

    return filled


def _take(count: int, generator: torch.Generator | None) -> None:
    """Takes numbers of 32 bits from a generator of the host."""
    global _taken
    _taken += count
    if _taken > _MOST_TAKEN:
        return
    thrown_away = torch.empty(min(count, MIB), dtype=torch.uint8, device="cpu")
    for first in range(0, count, MIB):
        thrown_away[: count - first].random_(generator=generator)


def _uncopied(copy: Any) -> Any:
    """Returns a copy that leaves out the numbers of a large weight for other memory of the host."""

    @around(copy)
    def copied(self: torch.Tensor, *args: Any, **options: object) -> Any:
        given = (*args, *options.values())  # the source has one name or another
        is_weight = any(isinstance(each, torch.nn.Parameter) and _is_large(each) for each in given)
        return self if is_weight and self.is_cpu else copy(self, *args, **options)

    return copied


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
