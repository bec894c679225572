"""The compiled meta kernels of torch, which dry mode uses where there are any.

Torch registers shape functions written in Python over hundreds of its compiled ones, for symbolic
shapes, which dry mode has none of. They take fifty times as long: 98 microseconds for a product
of two tensors, and 2 compiled (torch 2.13, on two cores).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# torch has no public name for what its kernels ask of a layout (2.11 to 2.13)
from torch._prims_common import suggest_memory_format

_LIBRARY = "_meta_lib_dont_use_me_use_register_meta"
_TABLES = ("meta", "post_autograd", "pre_autograd")
_CONVOLUTION = "aten::convolution"
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions
_registrations: list[Any] = []  # registrations last as long as their library


def prefer_compiled() -> None:
    """Takes the Python functions of operators away that have a compiled one; once a process.

    Where a version of torch keeps them in another place, nothing happens: dry mode is slower then.
    """
    if _registrations:
        return
    # torch has the functions behind its meta kernels in these two alone (2.13).
    from torch import _meta_registrations
    from torch._decomp import global_decomposition_table

    library: Any = getattr(_meta_registrations, _LIBRARY, None)
    names = set(getattr(library, "_op_impls", ()))
    if not names or not hasattr(library, "_destroy"):
        return
    functions: dict[Any, Any] = {}
    for table in _TABLES:  # the first table has the last word, as in torch
        for operator, function in global_decomposition_table[table].items():
            functions.setdefault(operator, function)
    library._destroy()
    make: Any = torch.library.Library  # torch does not annotate it
    again = make("aten", "IMPL", "Meta")
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    for operator, function in functions.items():
        name = operator.name()
        if f"aten/{name.removeprefix('aten::')}/Meta" in names and not has_kernel(name, "Meta"):
            again.impl(operator, _as_cudnn(function) if name == _CONVOLUTION else function)
    _registrations.append(again)


def _as_cudnn(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gives a convolution's result the channels last where the input or the weight has them.

    So does CUDA (``cudnn_conv_suggest_memory_format`` in ATen/native/ConvUtils.h); the function of
    torch 2.13 does not know that it stands for it.
    """

    @functools.wraps(function)
    def laid_out(images: torch.Tensor, weight: torch.Tensor, *options: object) -> torch.Tensor:
        made = function(images, weight, *options)
        layout = _LAYOUTS.get(weight.dim())
        if layout is None or layout not in map(suggest_memory_format, (images, weight)):
            return made
        return made.contiguous(memory_format=layout)

    return laid_out
