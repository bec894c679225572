"""Torch's dtypes by the names that safetensors and a save's document have for them."""

from __future__ import annotations

import torch

from residency._errors import CorruptSaveError

# What safetensors has, in its order; everything else is stored as bytes. Source: safetensors 0.8,
# `safetensors/src/tensor.rs`, Dtype.
STORED_DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}

HALF_BYTES = "F4"
"""Two of the format's elements are one of torch's ``float4_e2m1fn_x2``."""

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in STORED_DTYPES.items()} | {
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    HALF_BYTES: torch.float4_e2m1fn_x2,
}
"""By its name in a header; more than a save of this library stores as such."""


def name_of(dtype: torch.dtype) -> str:
    """Returns the name that a document has for a dtype."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype that a document names.

    Raises:
        CorruptSaveError: This torch has none of that name.
    """
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise CorruptSaveError(
            f"the save names a dtype {name[:40]!r}, which this torch does not have."
        )
    return found
