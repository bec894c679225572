"""Saves and loads of a dry run: files of the real size that take no room.

What large tensors hold means nothing, so no byte of them is written or read. A file keeps its
layout, and its size as ``ls`` says: its large tensors are holes. Small ones may steer the script
(the counter of an optimizer's steps), and are saved and loaded as they are.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
from types import ModuleType
from typing import Any

import torch
from torch import serialization

from residency._checkpoint import DTYPES, STORED_DTYPES
from residency._memory import ImportWatch
from residency._units import MIB

_LARGE = MIB
_state = threading.local()  # whether the save that this thread is in goes to a file of its own
_ZIP = b"PK\x03\x04"  # how a file of torch.save begins


class Saves:
    """The functions that save and load, while a dry run is on.

    Attributes:
        num_bytes: What was saved, as the files' sizes say.
        files: How many files were saved.
    """

    def __init__(self) -> None:
        """Counts from 0."""
        self.num_bytes = 0
        self.files = 0

    def start(self) -> None:
        """Puts the functions in place, also in modules that are imported later."""
        torch_module: Any = torch
        torch_module.save = self._saving(torch.save)
        torch_module.load = _loading(torch.load)
        inner: Any = serialization
        inner._save = _with_holes(inner._save)
        ImportWatch({"safetensors": _watch_reading, "safetensors.torch": self._watch_files}).start()

    def _count(self, file: object) -> None:
        if isinstance(file, str | os.PathLike) and os.path.exists(file):
            self.num_bytes += os.path.getsize(file)
            self.files += 1

    def _saving(self, save: Any) -> Any:
        @functools.wraps(save)
        def saved(obj: object, f: Any, *args: object, **options: object) -> None:
            is_file = isinstance(f, str | os.PathLike)
            _state.leaves_holes = is_file
            save(obj, f if is_file else _StreamWithHoles(f), *args, **options)
            self._count(f)

        return saved

    def _watch_files(self, module: ModuleType) -> None:
        def save_file(
            tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None, **_: Any
        ) -> None:
            _write_holes(tensors, filename, metadata)
            self._count(filename)

        wrapped = functools.wraps(vars(module)["save_file"])(save_file)
        module.__dict__["save_file"] = wrapped


class _StreamWithHoles:
    """A stream that a save is written to, in which long runs of zeros become holes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        # That of torch.distributed.checkpoint hands on what is written to the one below.
        below = getattr(stream, "raw", None)
        self._seeks = next((s for s in (stream, below) if s is not None and s.seekable()), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        size = len(data)
        if self._seeks is None or size < _LARGE or memoryview(data).cast("B") != bytes(size):
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
        is_large = isinstance(data, torch.UntypedStorage) and num_bytes >= _LARGE
        if is_large and getattr(_state, "leaves_holes", False):
            self._writer.write_record_metadata(name, num_bytes)
        else:
            self._writer.write_record(name, data, num_bytes)


def _with_holes(save: Any) -> Any:
    @functools.wraps(save)
    def saved(obj: object, zip_file: Any, *args: object, **options: object) -> None:
        save(obj, _FileWithHoles(zip_file), *args, **options)

    return saved


def _loading(load: Any) -> Any:
    """Returns a load that maps a file into memory: holes are zeros there, and take nothing."""

    @functools.wraps(load)
    def loaded(f: Any, *args: object, **options: object) -> Any:
        if "mmap" not in options and isinstance(f, str | os.PathLike):
            with open(f, "rb") as file:
                if file.read(len(_ZIP)) == _ZIP:
                    options["mmap"] = True
        return load(f, *args, **options)

    return loaded


def _write_holes(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    # In the library's order: the widest type first, then by name.
    for name, tensor in sorted(tensors.items(), key=lambda each: (-each[1].itemsize, each[0])):
        first, end = end, end + tensor.numel() * tensor.element_size()
        shape, kind = list(tensor.shape), STORED_DTYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    with open(filename, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(first + end)
        for name, tensor in tensors.items():
            num_bytes = tensor.numel() * tensor.element_size()
            if 0 < num_bytes < _LARGE:
                host = tensor.detach().cpu().contiguous()
                file.seek(first + header[name]["data_offsets"][0])
                file.write(ctypes.string_at(host.data_ptr(), num_bytes))


def _watch_reading(module: ModuleType) -> None:
    """Lets large tensors of files be made, not read."""
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
            if made.numel() * made.element_size() >= _LARGE:
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
        if whole.numel() * whole.element_size() < _LARGE:
            read: torch.Tensor = self._part[index]
            return read.to(self._device)
        return torch.empty(whole[index].shape, dtype=dtype, device=self._device)
