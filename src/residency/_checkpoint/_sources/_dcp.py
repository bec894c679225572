"""Directories of `torch.distributed.checkpoint`: `.metadata` and the files that it names.

Each item, a tensor, a shard or a value, is a `torch.save` archive within a file. `.metadata` is a
pickle of a few of torch's classes; it is read without making an instance of any. [Note: pickles]
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from residency._checkpoint._sources._pickles import PickledInstance, read_metadata
from residency._checkpoint._sources._safetensors import member
from residency._checkpoint._sources._source import (
    Source,
    StoredTensor,
    TensorName,
    check_cover,
    without_copies,
)
from residency._checkpoint._sources._torch_save import Items
from residency._errors import CorruptSaveError, RefusedError

METADATA = ".metadata"


def open_directory(path: Path) -> Source:
    """Opens a directory that `dcp.save` wrote.

    Raises:
        CorruptSaveError: The files are damaged, or do not fit each other.
        RefusedError: Loading it could run code, or a writer's extension changed its bytes.
    """
    file = path / METADATA
    metadata = read_metadata(file.read_bytes(), file)
    try:
        return _ForeignReader(path, metadata).read()
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptSaveError(f"{file} makes no sense: {error!r}.", file=file.name) from error


class _ForeignReader:
    def __init__(self, path: Path, metadata: PickledInstance) -> None:
        self._path = path
        self._file = path / METADATA
        self._entries: dict[str, PickledInstance] = metadata["state_dict_metadata"]
        self._paths = metadata.get("planner_data")
        self._infos: dict[tuple[str, tuple[int, ...] | None], PickledInstance] = {
            (index["fqn"], index.get("offset")): info
            for index, info in metadata["storage_data"].items()
        }
        self._open: dict[str, Items] = {}

    def read(self) -> Source:
        tensors: dict[str, list[StoredTensor]] = {}
        values: dict[str, Any] = {}
        with ExitStack() as stack:
            for name, entry in self._entries.items():
                if type(entry).__name__ == "BytesStorageMetadata":
                    inner, values[name] = self._item(stack, name, None)
                    tensors |= {key: [stored] for key, stored in inner.items()}
                else:
                    tensors[name] = self._shards(stack, name, entry)
                    values[name] = TensorName(name)
        return Source(self._path, "dcp", tensors, self._nested(values))

    def _shards(self, stack: ExitStack, name: str, entry: PickledInstance) -> list[StoredTensor]:
        whole = tuple(entry["size"])
        shards = []
        for chunk in entry["chunks"]:
            offsets, shape = tuple(chunk["offsets"]), tuple(chunk["sizes"])
            found, value = self._item(stack, name, offsets)
            if value != TensorName(name):
                raise CorruptSaveError(
                    f"{self._file} says that {name!r} is a tensor, and its item is none.",
                    file=METADATA,
                    tensor=name,
                )
            stored = found[name]
            if stored.shape != shape or len(shape) != len(whole) or len(offsets) != len(whole):
                raise CorruptSaveError(
                    f"{self._file} says that {name!r} has shape {shape} at {offsets} of {whole},"
                    f" and its item has {stored.shape}.",
                    file=METADATA,
                    tensor=name,
                )
            shards.append(stored._replace(whole_shape=whole, offsets=offsets))
        shards = without_copies(shards)
        if not shards:
            raise CorruptSaveError(f"{self._file} has no bytes for {name!r}.", file=METADATA)
        check_cover(name, shards, self._file)
        return shards

    def _item(
        self, stack: ExitStack, name: str, offsets: tuple[int, ...] | None
    ) -> tuple[dict[str, StoredTensor], object]:
        info = self._infos.get((name, offsets))
        if info is None:
            at = "" if offsets is None else f" at {offsets}"
            raise CorruptSaveError(
                f"{self._file} does not say where {name!r}{at} is.", file=METADATA, tensor=name
            )
        if info.get("transform_descriptors"):
            raise RefusedError(
                f"{name!r} in {self._path} went through {info['transform_descriptors']} when it"
                " was saved, and only that extension can read it. Load it with dcp.load."
            )
        start, num_bytes = info["offset"], info["length"]
        return self._items(stack, info["relative_path"]).read(start, num_bytes, name)

    def _items(self, stack: ExitStack, file_name: Any) -> Items:
        if file_name not in self._open:
            file = member(self._path, file_name, self._file)
            self._open[file_name] = Items(file, stack.enter_context(file.open("rb")))
        return self._open[file_name]

    def _nested(self, values: Mapping[str, object]) -> object:
        """Puts values where they were in the saved structure, as far as its paths are known."""
        if not isinstance(self._paths, Mapping):
            return dict(values)
        nested: dict[object, object] = {}
        for name, value in values.items():
            steps = self._paths.get(name, (name,))
            here: object = nested
            for step, following in zip(steps, [*steps[1:], None], strict=True):
                if isinstance(step, int):
                    if not isinstance(here, list) or not 0 <= step <= len(here) + len(values):
                        raise ValueError(f"{name!r} has the path {steps!r}")
                    here.extend([None] * (step + 1 - len(here)))
                elif not isinstance(here, dict):
                    raise ValueError(f"{name!r} has the path {steps!r}")
                if following is None:
                    here[step] = value
                    break
                known = here[step] if isinstance(here, list) else here.get(step)
                if known is None:
                    known = [] if isinstance(following, int) else {}
                    here[step] = known
                here = known
        return nested
