"""The types ``torch.cuda.FloatTensor`` and its fellows, by which older scripts make tensors.

A torch without CUDA has them, knows tensors by them, and refuses to make one. A type of ours has
the same name, by which torch's ``type`` takes it, and makes what torch's would.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_PREFIX = "torch.cuda."
_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class CudaTensorType(type):
    """The type of these types: what is called is one of them."""

    dtype: torch.dtype
    layout = torch.strided
    is_cuda = True
    is_sparse = False

    def __call__(cls, *args: Any) -> torch.Tensor:
        """Makes a tensor of a size, of numbers, or of another tensor of the type."""
        device = torch.device("cuda", torch.cuda.current_device())
        if all(isinstance(each, int | torch.Size) for each in args):
            return torch.empty(*args, dtype=cls.dtype, device=device) if args else cls(0)
        other = args[0]
        if isinstance(other, torch.Tensor):
            if other.type() != cls.__name__:
                raise TypeError(f"expected {cls.__name__} (got {other.type()})")
            return other.detach()
        host = getattr(torch, cls.__name__.removeprefix(_PREFIX))
        made: torch.Tensor = host(*args).to(device)
        return made

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.type() == cls.__name__


def install() -> None:
    """Puts the types where torch has its own."""
    for name, dtype in _DTYPES.items():
        whole = _PREFIX + name
        torch.cuda.__dict__[name] = CudaTensorType(whole, (), {"dtype": dtype})
    torch.__dict__["set_default_tensor_type"] = _choosing_device(torch.set_default_tensor_type)


def _choosing_device(choose: Any) -> Any:
    @functools.wraps(choose)
    def chosen(kind: Any) -> None:
        name = kind if isinstance(kind, str) else torch.typename(kind)
        of_device = vars(torch.cuda).get(name.removeprefix(_PREFIX))
        is_ours = name.startswith(_PREFIX) and isinstance(of_device, CudaTensorType)
        choose(name.replace(_PREFIX, "torch.") if is_ours else kind)
        torch.set_default_device("cuda" if is_ours else None)
        _make_by(of_device if is_ours else None)

    return chosen


def _make_by(kind: Any) -> None:
    """Makes ``torch.Tensor(...)`` a tensor of a type, or of the host's where it is None."""
    tensors: Any = torch.Tensor
    make = torch._C.TensorBase.__new__  # torch.Tensor has none of its own, and no other way here
    if "__new__" in vars(tensors):
        del tensors.__new__
    if kind is None:
        return

    def new(*args: Any, **options: Any) -> Any:  # any signature, as Dynamo compares them
        is_plain = args[0] is tensors and not options
        return kind(*args[1:]) if is_plain else make(*args, **options)

    tensors.__new__ = staticmethod(new)
