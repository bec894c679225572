"""Saves and loads of a dry run: files of the real size that take no room.

What large tensors hold means nothing, so no byte of them is written or read. A file keeps its
layout, and its size as ``ls`` says: its large tensors are holes. Small ones may steer the script
(the counter of an optimizer's steps), and are saved and loaded as they are. With ``--real`` all is
written, and counted alone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import serialization

from residency._checkpoint import (
    DTYPES,
    STORED_DTYPES,
    Record,
    be_dry,
    make_header,
    watch_files,
)
from residency._dryrun._background import BackgroundWrites
from residency._dryrun._files import files_of_run
from residency._dryrun._host import LARGE_BYTES
from residency._dryrun._methods import Function, put_around
from residency._memory import ImportWatch

# Whether the save that this thread is in goes to a file of its own, and is at a large tensor.
_state = threading.local()
_ZIP = b"PK\x03\x04"  # how a file of torch.save begins


class Saves:
    """The functions that save and load, while a dry run is on.

    Attributes:
        num_bytes: What was saved, as the files' sizes say.
        files: How many files were saved.
    """

    def __init__(self, *, is_real: bool) -> None:
        """Counts from 0.

        Args:
            is_real: Whether the bytes mean something, and are written.
        """
        self.num_bytes = 0
        self.files = 0
        self._is_real = is_real
        self._lock = threading.Lock()  # saves are written by threads, too
        self._writes = BackgroundWrites()

    def start(self) -> None:
        """Puts the functions in place, also in modules that are imported later."""
        put_around(torch, "save")(self._save)
        _keep_snapshots(torch.get_device_module().memory)
        put_around(torch.jit, "save")(_save_script)
        watch_files(self._count)
        watched = {
            "safetensors.torch": self._watch_files,
            "transformers.tokenization_utils_base": _watch_tokenizers,
            "torch.distributed.checkpoint.filesystem": self._watch_distributed,
        }
        if not self._is_real:
            self._writes.start()
            put_around(torch, "load")(_load)
            put_around(serialization, "_save")(_save_with_holes)
            be_dry()
            watched["safetensors"] = _watch_reading
            watched["torch.distributed.checkpoint.utils"] = _watch_ranks
            for lightning in ("lightning.fabric", "lightning_fabric"):
                watched[f"{lightning}.utilities.cloud_io"] = _save_at_once
        ImportWatch(watched).start()

    def _count(self, file: object) -> None:
        if isinstance(file, str | os.PathLike) and os.path.exists(file):
            _note_save(file, is_new=False)
            with self._lock:
                self.num_bytes += os.path.getsize(file)
                self.files += 1

    def _save(self, save: Function, obj: object, f: Any, *args: object, **options: object) -> None:
        is_file = isinstance(f, str | os.PathLike)
        _state.leaves_holes = is_file
        target = f if is_file or self._is_real else _StreamWithHoles(f)
        _note_save(f if is_file else getattr(f, "name", None), is_new=is_file)
        self._writes.begin()
        save(obj, target, *args, **options)
        self._count(f)
        if not self._is_real:
            self._writes.end(obj)

    def _watch_files(self, module: ModuleType) -> None:
        @put_around(module, "save_file")
        def save_file(
            save: Function,
            tensors: dict[str, torch.Tensor],
            filename: str | os.PathLike[str],
            metadata: dict[str, str] | None = None,
            **options: object,
        ) -> None:
            kinds = {tensor.dtype for tensor in tensors.values()}
            _note_save(filename, is_new=True)
            if self._is_real or not kinds <= STORED_DTYPES.keys():
                save(tensors, filename, metadata, **options)
            else:
                self._writes.begin()
                write_holes(tensors, filename, metadata)
                self._writes.end(tensors)
            self._count(filename)

    def _watch_distributed(self, module: ModuleType) -> None:
        @put_around(module.FileSystem, "create_stream")
        @contextmanager
        def create_stream(
            create: Function, file_system: object, path: object, mode: str
        ) -> Iterator[object]:
            with create(file_system, path, mode) as stream:
                yield stream
            if "w" in mode:
                self._count(path)

        if self._is_real:
            return

        @put_around(module.FileSystemReader, "read_data")
        def read_data(read: Function, storage: Any, plan: Any, planner: Any) -> object:
            return read(storage, _without_holes(storage, plan, planner), planner)


def _note_save(file: object, *, is_new: bool) -> None:
    """Notes a file that is saved: it goes when the run ends, and what it replaces comes back."""
    files = files_of_run()
    if files is not None and isinstance(file, str | os.PathLike):
        files.note_save(os.fspath(file), is_new=is_new)


def _save_script(
    save: Function, module: object, f: object, *args: object, **options: object
) -> None:
    _note_save(f, is_new=True)
    save(module, f, *args, **options)


def _keep_snapshots(module: ModuleType) -> None:
    """Keeps the files in which a script records its memory: the run is made for them."""

    @put_around(module, "_dump_snapshot")
    def dumped(
        dump: Function, filename: str = "dump_snapshot.pickle", *args: object, **options: object
    ) -> None:
        files = files_of_run()
        if files is not None:
            files.note_result(filename)
        dump(filename, *args, **options)


def _watch_tokenizers(module: ModuleType) -> None:
    """Notes the files that tokenizers write, which is done in Rust."""

    @put_around(vars(module)["PreTrainedTokenizerBase"], "save_pretrained")
    def saved(
        save: Function, tokenizer: object, save_directory: Any, *args: object, **options: object
    ) -> object:
        files = files_of_run()
        if files is not None and os.path.isdir(save_directory):
            for file in os.scandir(save_directory):
                if file.name.startswith("tokenizer"):
                    files.note_change(file.path)
        return save(tokenizer, save_directory, *args, **options)


def _save_at_once(module: ModuleType) -> None:
    """Makes Lightning save to a file, and not by way of the file's bytes in memory."""

    @put_around(module, "_atomic_save")
    def saved(save: Function, checkpoint: object, path: str | os.PathLike[str]) -> None:
        if "://" in str(path):
            save(checkpoint, path)
        else:
            torch.save(checkpoint, path)


def _without_holes(storage: Any, plan: Any, planner: Any) -> Any:
    """Takes large tensors, and shards that another rank would have, as read; returns the rest."""
    left = []
    for item in plan.items:
        place = storage.storage_data.get(item.storage_index)
        if item.type.name == "TENSOR" and (place is None or place.length >= LARGE_BYTES):
            planner.commit_tensor(item, planner.resolve_tensor(item).detach())
        else:
            left.append(item)
    return replace(plan, items=left)


def _watch_ranks(module: ModuleType) -> None:
    """Gives a save what this rank has, once: the other ranks, its copies, save nothing."""

    def nothing(given: Any) -> object:
        if isinstance(given, list):  # what was written
            return []
        # A load's plan stays: it says what a rank reads.
        return replace(given, items=[]) if type(given).__name__ == "SavePlan" else given

    @put_around(module._DistWrapper, "gather_object")
    def gather_object(gather: Function, wrapper: object, given: object) -> object:
        gathered = gather(wrapper, given)
        return gathered and [gathered[0], *map(nothing, gathered[1:])]


class _StreamWithHoles:
    """A stream that a save is written to, in which large tensors become holes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        # That of torch.distributed.checkpoint hands on what is written to the one below.
        below = getattr(stream, "raw", None)
        self._seeks = next((s for s in (stream, below) if s is not None and s.seekable()), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        size = len(data)
        if self._seeks is None or size < LARGE_BYTES or not getattr(_state, "is_large", False):
            return int(self._stream.write(data))
        self._seeks.seek(size, os.SEEK_CUR)
        return size


class _FileWithHoles:
    """Torch's writer of a file, which leaves room for large records and writes the others."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write_record(self, name: str, data: Any, num_bytes: int) -> None:
        is_large = isinstance(data, torch.UntypedStorage) and num_bytes >= LARGE_BYTES
        if is_large and getattr(_state, "leaves_holes", False):
            self._writer.write_record_metadata(name, num_bytes)
            return
        _state.is_large = is_large
        try:
            self._writer.write_record(name, data, num_bytes)
        finally:
            _state.is_large = False


def _save_with_holes(
    save: Function, obj: object, zip_file: Any, *args: object, **options: object
) -> None:
    save(obj, _FileWithHoles(zip_file), *args, **options)


def _load(load: Function, f: Any, *args: object, **options: object) -> Any:
    """Maps a file into memory: holes are zeros there, and take nothing.

    The script may write the file anew while it has what was loaded.
    """
    if "mmap" not in options and isinstance(f, str | os.PathLike):
        with open(f, "rb") as file:
            if file.read(len(_ZIP)) == _ZIP:
                options["mmap"] = True
                if (files := files_of_run()) is not None:
                    files.note_mapping(os.fspath(f))
    return load(f, *args, **options)


def write_holes(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None,
) -> None:
    """Writes a file of safetensors in which large tensors, and those without bytes, are holes."""
    # In the library's order: the last of its types first, then by name.
    order = list(STORED_DTYPES)
    names = sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name))
    records = [
        Record(name, STORED_DTYPES[each.dtype], tuple(each.shape), each.numel() * each.itemsize)
        for name, each in ((name, tensors[name]) for name in names)
    ]
    header = make_header(records, file=str(filename), metadata=metadata or {}, alignment=8)
    with open(filename, "wb") as file:
        file.write(header)
        for record in records:
            if 0 < record.num_bytes < LARGE_BYTES and not tensors[record.name].is_meta:
                host = tensors[record.name].detach().cpu().contiguous()
                file.write(ctypes.string_at(host.data_ptr(), record.num_bytes))
            else:
                file.seek(record.num_bytes, os.SEEK_CUR)
        file.truncate()


def _watch_reading(module: ModuleType) -> None:
    """Replaces the reading of large tensors by their making."""
    opened = vars(module)["safe_open"]

    class FileOfHoles:
        """A file of safetensors, whose large tensors are not read."""

        def __init__(self, filename: Any, framework: str, device: Any = "cpu", **options: Any):
            self._file = opened(filename, framework, device="cpu", **options)
            self._device = torch.device("cuda", device) if isinstance(device, int) else device

        def __enter__(self) -> FileOfHoles:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_slice(self, name: str) -> _Slice:
            return _Slice(self._file.get_slice(name), self._device)

        def get_tensors(self) -> dict[str, torch.Tensor]:
            return {name: self.get_tensor(name) for name in self._file.offset_keys()}

        def get_tensor(self, name: str) -> torch.Tensor:
            part = self._file.get_slice(name)
            dtype = DTYPES[part.get_dtype()]
            made = torch.empty(part.get_shape(), dtype=dtype, device=self._device)
            if made.numel() * made.element_size() >= LARGE_BYTES:
                return made
            read: torch.Tensor = self._file.get_tensor(name)
            return read.to(self._device)

    module.__dict__["safe_open"] = FileOfHoles


class _Slice:
    """A tensor of a file, of which parts are asked for."""

    def __init__(self, part: Any, device: Any) -> None:
        self._part = part
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        dtype = DTYPES[self._part.get_dtype()]
        whole = torch.empty(self._part.get_shape(), dtype=dtype, device="meta")
        if whole.numel() * whole.element_size() < LARGE_BYTES:
            read: torch.Tensor = self._part[index]
            return read.to(self._device)
        return torch.empty(whole[index].shape, dtype=dtype, device=self._device)
