"""Files of `torch.save`, and the same as items within a file of `torch.distributed.checkpoint`.

Such a file is a zip archive that compresses nothing: its pickle says which tensor is where in which
storage, and each storage is one record. So a tensor's bytes can be read from the file as those of
any other format, and no page of the file has to be mapped. [Note: pickles]
"""

from __future__ import annotations

import io
import math
import mmap
import os
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from residency._checkpoint._sources._pickles import (
    PickledTensor,
    UnknownNameError,
    load_weights_only,
    read_tensors,
)
from residency._checkpoint._sources._source import (
    Source,
    StoredTensor,
    TensorName,
    on_host,
    whole_in_file,
)
from residency._errors import CorruptSaveError, RefusedError

ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_MOST_VISITS = 100_000
_MAX_DEPTH = 200


def open_file(path: Path) -> Source:
    """Opens a file of `torch.save`.

    Memory:
        Nothing is copied, with two exceptions: a file in the format from before torch 1.6 is loaded
        onto the host as a whole, and tensors of which `torch.load` must say what they are, as well
        as those that are not in row-major order, are mapped.

    Raises:
        CorruptSaveError: The file is damaged.
        RefusedError: Loading it could run code, or a tensor has no plain layout.
    """
    with path.open("rb") as stream:
        is_zip = stream.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        if is_zip:
            items = Items(path, stream)
            tensors, values = items.read(0, items.num_bytes, prefix="")
    if not is_zip:
        loaded = load_weights_only(path, path, mmap=False)
        tensors, values = named_tensors(loaded, "", lambda name, t: on_host(name, t, path), path)
    return Source(path, "torch.save", {name: [stored] for name, stored in tensors.items()}, values)


class Items:
    """The records that `torch.save` wrote, read at any place of a file.

    Args:
        path: The file.
        stream: The same, open for as long as items are read.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.num_bytes = os.fstat(stream.fileno()).st_size
        self._stream = stream
        self._mapped: mmap.mmap | None = None

    def read(self, start: int, num_bytes: int, prefix: str) -> tuple[dict[str, StoredTensor], Any]:
        """Reads one item: its tensors by name, and its values.

        Args:
            start: Where in the file the item begins.
            num_bytes: Its length.
            prefix: What the names of its tensors begin with.

        Raises:
            CorruptSaveError: The item is damaged.
            RefusedError: Loading it could run code, or a tensor has no plain layout.
        """
        archive = self._archive(start, num_bytes)
        try:
            found = read_tensors(archive.pickle)
        except UnknownNameError:
            return self._loaded(start, num_bytes, prefix)
        except Exception as error:
            raise CorruptSaveError(
                f"{self.path} has a pickle that makes no sense: {error!r}.",
                file=self.path.name,
                offset=start,
            ) from error
        return named_tensors(found, prefix, lambda n, t: self._stored(archive, n, t), self.path)

    def _loaded(
        self, start: int, num_bytes: int, prefix: str
    ) -> tuple[dict[str, StoredTensor], Any]:
        """Lets torch decide what is harmless, of an item that has more than plain tensors."""
        is_file = (start, num_bytes) == (0, self.num_bytes)
        item: Path | io.BytesIO = self.path
        if not is_file:
            item = io.BytesIO(os.pread(self._stream.fileno(), num_bytes, start))
        found = load_weights_only(item, self.path, mmap=is_file)
        return named_tensors(found, prefix, lambda n, t: on_host(n, t, self.path), self.path)

    def _stored(self, archive: _Archive, name: str, pickled: PickledTensor) -> StoredTensor:
        record = archive.records.get(f"{archive.root}data/{pickled.storage}")
        if record is None:
            self._corrupt(f"has no bytes for {name!r}", name, archive.start)
        start, num_bytes = record
        if num_bytes != pickled.storage_bytes:
            found = (
                f"has {num_bytes} bytes for the storage of {name!r}, not {pickled.storage_bytes}"
            )
            self._corrupt(found, name, start)
        steps = zip(pickled.shape, pickled.stride, strict=True)
        is_empty = not math.prod(pickled.shape)
        num_elements = 1 + sum((size - 1) * step for size, step in steps)
        if is_empty:  # a slice of an empty batch may begin anywhere
            return whole_in_file(name, pickled.dtype, pickled.shape, self.path, start)
        if pickled.start + num_elements * pickled.dtype.itemsize > num_bytes:
            self._corrupt(
                f"has {name!r} reach beyond its storage of {num_bytes} bytes", name, start
            )
        start += pickled.start
        if pickled.is_row_major:
            return whole_in_file(name, pickled.dtype, pickled.shape, self.path, start)
        span = self._map(start, num_elements, pickled.dtype)
        return on_host(name, span.as_strided(pickled.shape, pickled.stride), self.path)

    def _map(self, start: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        if self._mapped is None:  # private to this process: nothing can reach the file
            self._mapped = mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(self._mapped, dtype=dtype, count=num_elements, offset=start)

    def _archive(self, start: int, num_bytes: int) -> _Archive:
        if start < 0 or num_bytes < 0 or start + num_bytes > self.num_bytes:
            self._corrupt(
                f"has {self.num_bytes} bytes, too few for {num_bytes} at {start}", None, start
            )
        window = _Window(self._stream.fileno(), start, num_bytes)
        try:
            with zipfile.ZipFile(io.BufferedReader(window)) as archive:
                infos = archive.infolist()
                pickles = [i.filename for i in infos if i.filename.split("/")[-1] == "data.pkl"]
                if len(pickles) != 1:
                    self._corrupt(
                        f"has {len(pickles)} pickles named data.pkl, not one", None, start
                    )
                root = pickles[0].removesuffix("data.pkl")
                self._check_compression(infos)
                # Before anything is read: nothing in such a file is longer than it looks.
                records = {info.filename: self._record(info, start, num_bytes) for info in infos}
                self._check_kind(archive, root)
                return _Archive(start, root, records, archive.read(pickles[0]))
        except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, OSError) as error:
            raise CorruptSaveError(
                f"{self.path} is no whole file of torch.save: {error}.",
                file=self.path.name,
                offset=start,
            ) from error

    def _check_compression(self, infos: list[zipfile.ZipInfo]) -> None:
        packed = next((i.filename for i in infos if i.compress_type != zipfile.ZIP_STORED), None)
        if packed is not None:
            raise RefusedError(
                f"{self.path} is a zip with compressed records ({packed!r}), which torch.save "
                "never writes: another program packed it. Pack it without compression "
                "(zip -0), or load it with torch.load and save it again."
            )

    def _check_kind(self, archive: zipfile.ZipFile, root: str) -> None:
        names = set(archive.namelist())
        if f"{root}constants.pkl" in names:
            raise RefusedError(
                f"{self.path} is a TorchScript archive: it holds code. Save its state_dict instead."
            )
        order = archive.read(f"{root}byteorder") if f"{root}byteorder" in names else b"little"
        if order != b"little":
            raise RefusedError(
                f"{self.path} has the byte order {order.decode(errors='replace')!r}; save it "
                "again on a machine of this one's."
            )

    def _record(self, info: zipfile.ZipInfo, start: int, num_bytes: int) -> tuple[int, int]:
        """Returns where in the file a record's bytes are, and how many."""
        header = os.pread(self._stream.fileno(), _LOCAL_HEADER_BYTES, start + info.header_offset)
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = info.header_offset + _LOCAL_HEADER_BYTES + names
        is_whole = header[:4] == ZIP_MAGIC and info.compress_size == info.file_size
        if not is_whole or begin + info.file_size > num_bytes:
            found = f"has a record {info.filename!r} that is not within the file"
            self._corrupt(found, None, start + info.header_offset)
        return start + begin, info.file_size

    def _corrupt(self, problem: str, tensor: str | None, offset: int) -> NoReturn:
        raise CorruptSaveError(
            f"{self.path} {problem}.", file=self.path.name, tensor=tensor, offset=offset
        )


def named_tensors(
    found: Any, prefix: str, store: Callable[[str, Any], StoredTensor], path: Path
) -> tuple[dict[str, StoredTensor], Any]:
    """Names the tensors of a structure by their paths in it, joined by dots.

    Args:
        found: Nested mappings, lists, tuples and values; it is not changed.
        prefix: The path to it.
        store: Says of a name and a tensor, or what stands for one, where it is.
        path: The file, for messages.

    Returns:
        The tensors by name, and the structure with a `TensorName` for each.

    Raises:
        RefusedError: Two tensors would have one name, or the structure contains itself.
    """
    tensors: dict[str, StoredTensor] = {}
    lengths: dict[int, int] = {}
    num_visits = 0

    def walk(value: object, names: tuple[str, ...]) -> object:
        nonlocal num_visits
        num_visits += 1
        if isinstance(value, dict | list | tuple):
            lengths[id(value)] = len(value)
        # Lists that share lists would be walked through for ever.
        if num_visits % _MOST_VISITS == 0 and num_visits > 4 * sum(lengths.values()):
            raise RefusedError(
                f"{path} has containers that stand in many places, as which more than "
                f"{num_visits} values would be read."
            )
        if len(names) > _MAX_DEPTH:
            raise RefusedError(f"{path} nests deeper than {_MAX_DEPTH} levels, or contains itself.")
        if isinstance(value, PickledTensor | torch.Tensor):
            name = ".".join(names)
            if name in tensors:
                raise RefusedError(f"{path} has two tensors whose path is {name!r}.")
            tensors[name] = store(name, value)
            return TensorName(name)
        if isinstance(value, dict) and not isinstance(value, Counter):
            pairs = [(key, walk(entry, (*names, str(key)))) for key, entry in value.items()]
            return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
        if isinstance(value, list | tuple) and type(value) is not torch.Size:
            items = [walk(entry, (*names, str(index))) for index, entry in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, set) and any(
            isinstance(e, PickledTensor | torch.Tensor) for e in value
        ):
            raise RefusedError(
                f"{path} has tensors in a set, {'.'.join(names)!r}; save it again with a list."
            )
        return value

    return tensors, walk(found, (prefix,) if prefix else ())


@dataclass(frozen=True, slots=True)
class _Archive:
    start: int
    root: str
    records: Mapping[str, tuple[int, int]]
    pickle: bytes


class _Window(io.RawIOBase):
    """A part of a file, read without moving the file's own position."""

    def __init__(self, descriptor: int, start: int, num_bytes: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._num_bytes = descriptor, start, num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._num_bytes)[whence]
        if base + offset < 0:
            raise ValueError(f"a position before the file's begin: {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._num_bytes - self._position))
        data = os.pread(self._descriptor, wanted, self._start + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
