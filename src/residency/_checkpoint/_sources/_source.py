"""What a checkpoint on disk is to those who read it: names, and where the bytes of each lie.

Nothing here has been read yet. A source is opened by looking at headers and pickles of layout only;
it knows each tensor's dtype, shape and place, so that a restore can be planned, and refused, before
any byte of a tensor moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from residency._checkpoint._disk._system import system_in_use
from residency._checkpoint._disk._wanted import Checksums
from residency._checkpoint._document._notes import TensorNote
from residency._errors import CorruptSaveError, RefusedError


@dataclass(frozen=True, slots=True)
class TensorName:
    """The name of a tensor among a source's values.

    Attributes:
        name: The tensor's name in `Source.tensors`.
    """

    name: str


class StoredTensor(NamedTuple):
    """The place of a tensor's bytes, or of one shard's.

    Either `file` is set, or `tensor`. In a file the elements lie in row-major order, without gaps,
    in this machine's byte order, unless `stride` says otherwise.

    Attributes:
        name: The whole tensor's name.
        dtype: What the bytes are elements of.
        shape: Of what is stored here.
        whole_shape: Of the whole tensor; `shape` where this is no shard.
        offsets: Where in the whole tensor this begins, per dimension.
        file: The file that has the bytes.
        start: Where in the file they begin; no alignment is promised.
        num_bytes: How many they are.
        tensor: The elements on the host, where a file does not have them in row-major order. As a
            rule its pages are those of a file, read when they are first touched.
        stride: In elements, where the bytes in the file are not in row-major order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    file: Path | None = None
    start: int = 0
    num_bytes: int = 0
    tensor: torch.Tensor | None = None
    stride: tuple[int, ...] | None = None


@dataclass(slots=True)
class Source:
    """A checkpoint that has been opened: what it holds, and where.

    Attributes:
        path: What was opened.
        kind: Its format: "dcp", "residency", "safetensors" or "torch.save".
        tensors: By name, where each is; several entries are shards of one tensor, which together
            cover it without overlap.
        values: The saved structure, with a `TensorName` for each tensor; a flat dict by name
            where the format keeps no structure. Of a save of this library, nodes by top-level name.
        views: Tensors that share their bytes with another, by name.
        checksums: Those of its files, where they are known.
        is_own_rank: Whether this very rank of as many ranks saved it, as far as that matters.
    """

    path: Path
    kind: str
    tensors: Mapping[str, Sequence[StoredTensor]]
    values: Any
    views: Mapping[str, TensorNote] = field(default_factory=dict)
    checksums: Mapping[Path, Checksums] = field(default_factory=dict)
    is_own_rank: bool = True

    def close(self) -> None:
        """Lets go of mapped files. The source is empty afterwards."""
        self.tensors, self.values, self.views, self.checksums = {}, {}, {}, {}

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def whole_in_file(
    name: str, dtype: torch.dtype, shape: Sequence[int], file: Path, start: int
) -> StoredTensor:
    """Describes a whole tensor in row-major order in a file."""
    shape = tuple(shape)
    num_bytes = math.prod(shape) * dtype.itemsize
    return StoredTensor(name, dtype, shape, shape, (0,) * len(shape), file, start, num_bytes)


def on_host(name: str, tensor: torch.Tensor, file: Path) -> StoredTensor:
    """Describes a whole tensor that is on the host already.

    Raises:
        RefusedError: It has no plain layout, or no bytes.
    """
    tensor = tensor.detach()
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        found = f"{type(tensor).__name__}, {tensor.layout}, {tensor.dtype}"
        raise RefusedError(
            f"{name!r} in {file} is a tensor without a plain layout ({found}). Save its parts"
            " instead."
        )
    if tensor.device.type != "cpu":
        raise RefusedError(f"{name!r} in {file} is on {tensor.device.type!r}: it has no bytes.")
    shape = tuple(tensor.shape)
    return StoredTensor(
        name, tensor.dtype, shape, shape, (0,) * len(shape), num_bytes=tensor.nbytes, tensor=tensor
    )


def check_cover(name: str, shards: Sequence[StoredTensor], file: Path) -> None:
    """Checks that shards cover their tensor, each element once.

    Raises:
        CorruptSaveError: They leave a hole, overlap, lie outside, or differ in dtype.
    """
    if system_in_use().is_alone:  # which has the first rank's
        return
    whole = shards[0].whole_shape
    if len(shards) == 1 and shards[0].shape == whole and not any(shards[0].offsets):
        return
    for shard in shards:
        if shard.dtype != shards[0].dtype:
            problem = f"is {shards[0].dtype} in one shard and {shard.dtype} in another"
            raise CorruptSaveError(f"{name!r} in {file} {problem}.", file=file.name, tensor=name)
        ends = [start + size for start, size in zip(shard.offsets, shard.shape, strict=True)]
        if any(end > size for end, size in zip(ends, whole, strict=True)):
            problem = f"has a shard {shard.shape} at {shard.offsets}, outside of its shape {whole}"
            raise CorruptSaveError(f"{name!r} in {file} {problem}.", file=file.name, tensor=name)
    filled = [shard for shard in shards if math.prod(shard.shape)]
    total, expected = sum(math.prod(shard.shape) for shard in filled), math.prod(whole)
    if total != expected or _overlap(filled):
        problem = f"has shards with {total} elements in all; some overlap or are missing"
        raise CorruptSaveError(
            f"{name!r} in {file} {problem}: shape {whole} has {expected}.",
            file=file.name,
            tensor=name,
        )


def _overlap(shards: Sequence[StoredTensor]) -> bool:
    """Returns whether two shards share an element: a sweep along the dimension that cuts most."""
    if len(shards) < 2:
        return False
    dimensions = range(len(shards[0].shape))
    cut = max(dimensions, key=lambda d: len({shard.offsets[d] for shard in shards}), default=0)
    active: list[StoredTensor] = []
    for shard in sorted(shards, key=lambda shard: shard.offsets[cut : cut + 1]):
        active = [s for s in active if s.offsets[cut] + s.shape[cut] > shard.offsets[cut]]
        if any(_meet(shard, other) for other in active):
            return True
        active.append(shard)
    return False


def _meet(one: StoredTensor, other: StoredTensor) -> bool:
    return all(
        max(a, b) < min(a + m, b + n)
        for a, m, b, n in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )


def without_copies(shards: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Returns the shards, of several at one place with one shape the first only."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], StoredTensor] = {}
    for shard in shards:
        first.setdefault((shard.offsets, shard.shape), shard)
    return list(first.values())
