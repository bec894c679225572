"""What a save's document says of a tensor beyond the file's header: written and read here alone.

A tensor that is whole, has a dtype of the format and shares no bytes needs no note.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from residency._checkpoint._document._dtypes import dtype_named, name_of
from residency._checkpoint._document._nodes import is_count, is_counts
from residency._errors import CorruptSaveError


@dataclass(frozen=True, slots=True)
class TensorNote:
    """A note that was read: what the document says of one tensor, free of contradictions.

    Attributes:
        dtype: The tensor's, where the file's header has another: of a view, and of a dtype that the
            format lacks, whose bytes the header calls ``uint8``. None where the header has it.
        shape: The tensor's, where there is a ``dtype``.
        of: The name of the tensor whose bytes a view shares; None for one with bytes of its own.
        start: The view's first byte among those.
        stride: The view's, in its own elements.
        whole_shape: Of the tensor that this is a shard of; None for a whole one.
        offsets: Where the shard begins; None where this rank has no element of it.
        of_rank: Which rank wrote the tensor; None for this one.
        mesh: The first rank of those that have the tensor's shards. Other ranks may have another
            tensor of the same name, as the stages of a pipeline do.
    """

    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    of: str | None = None
    start: int = 0
    stride: tuple[int, ...] = ()
    whole_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    of_rank: int | None = None
    mesh: int = 0

    @property
    def is_empty_shard(self) -> bool:
        """Whether this rank has no element of the tensor."""
        return self.whole_shape is not None and self.offsets is None

    @property
    def span_bytes(self) -> int:
        """The bytes from a view's first element to its last."""
        if self.dtype is None or 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return (1 + sum((size - 1) * step for size, step in steps)) * self.dtype.itemsize


PLAIN = TensorNote()  # of a tensor of which the header says everything


def bytes_note(dtype: torch.dtype, shape: Sequence[int]) -> dict[str, Any]:
    """Returns the note of a tensor that is stored as bytes, for want of a dtype in the format."""
    return {"dtype": name_of(dtype), "shape": list(shape)}


def view_note(
    dtype: torch.dtype, shape: Sequence[int], *, stride: Sequence[int], of: str, start: int
) -> dict[str, Any]:
    """Returns the note of a tensor whose bytes are those of another; ``start`` is in bytes."""
    return {**bytes_note(dtype, shape), "stride": list(stride), "of": of, "start": start}


def shard_note(
    whole_shape: Sequence[int], offsets: Sequence[int] | None, mesh: int = 0
) -> dict[str, Any]:
    """Returns the note of a shard; one without ``offsets`` has no element on this rank."""
    note = {
        "whole_shape": list(whole_shape),
        "offsets": None if offsets is None else list(offsets),
    }
    return {**note, "mesh": mesh} if mesh else note


def elsewhere_note(rank: int | None) -> dict[str, Any]:
    """Returns the note of a tensor that another rank writes."""
    return {"of_rank": rank}


def read_note(name: str, note: object) -> TensorNote:
    """Returns what a note says.

    Raises:
        CorruptSaveError: It makes no sense.
    """
    try:
        return _read(note)
    except (CorruptSaveError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise senseless(name, note) from error


def senseless(name: str, note: object) -> CorruptSaveError:
    """Returns the error for a note that makes no sense, by itself or beside its file."""
    return CorruptSaveError(
        f"the document's entry for {name!r} is inconsistent: {reprlib.repr(note)}.", tensor=name
    )


def _read(note: Any) -> TensorNote:
    dtype = dtype_named(note["dtype"]) if "dtype" in note else None
    shape = _counts(note["shape"]) if dtype is not None else ()
    whole_shape = _counts(note["whole_shape"]) if "whole_shape" in note else None
    offsets = note["offsets"] if whole_shape is not None else None
    of_rank, mesh = note.get("of_rank"), note.get("mesh", 0)
    if (of_rank is not None and not is_count(of_rank)) or not is_count(mesh):
        raise ValueError(f"{of_rank!r} or {mesh!r} is no rank")
    read = TensorNote(
        dtype=dtype,
        shape=shape,
        whole_shape=whole_shape,
        offsets=None if offsets is None else _counts(offsets),
        of_rank=of_rank,
        mesh=mesh,
    )
    if whole_shape is not None and len(read.offsets or whole_shape) != len(whole_shape):
        raise ValueError(f"{read.offsets} is no place in {whole_shape}")
    return read if "of" not in note else _with_view(read, note)


def _with_view(read: TensorNote, note: Any) -> TensorNote:
    of, start, stride = note["of"], note["start"], _counts(note["stride"])
    if read.dtype is None or not isinstance(of, str) or not is_count(start):
        raise ValueError("a view without a dtype, a base or a start")
    if len(stride) != len(read.shape) or start % read.dtype.itemsize:
        raise ValueError(f"{stride} and {start} are no layout of {read.shape}")
    return replace(read, of=of, start=start, stride=stride)


def _counts(value: Any) -> tuple[int, ...]:
    if not is_counts(value) or math.prod(value).bit_length() > 63:
        raise ValueError(f"{reprlib.repr(value)} is no shape")
    return tuple(value)
