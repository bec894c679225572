"""Pickles of which nothing runs: what may be named in them is on a list, and is ours.

[Note: pickles] A pickle is a program; what makes it dangerous is the global names that it may call.
The list has harmless stand-ins for the few names that a tensor, a container or a metadata class of
torch needs; every other is refused. So one reads where tensors lie without making one, which
`torch.load` cannot. Stand-ins are made anew for each pickle or cannot be changed, since a pickle
may also assign attributes to what it has named. What the list lacks may still be harmless: there
`torch.load(weights_only=True)` decides.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from residency._errors import CorruptSaveError, RefusedError

_TOO_LARGE = 1 << 63  # torch counts in 63 bits
_MOST_DIMENSIONS = 1000


class UnknownNameError(pickle.UnpicklingError):
    """The error of a pickle that asks for a name that is not on the list."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor before it is read: where in which storage its elements are."""

    storage: str
    storage_bytes: int
    dtype: torch.dtype
    start: int  # in bytes, from the storage's begin
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __setstate__(self, state: object) -> None:  # else a dataclass has one that takes anything
        raise pickle.UnpicklingError("a tensor's layout is not changed in a pickle")

    @property
    def is_row_major(self) -> bool:
        """Whether the elements follow each other in row-major order, without gaps."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size == 0:
                return True
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    num_elements: int
    dtype: torch.dtype | None  # None: counted in bytes

    def __setstate__(self, state: object) -> None:  # else a dataclass has one that takes anything
        raise pickle.UnpicklingError("a storage is not changed in a pickle")


class PickledInstance:
    """The attributes of an instance of a class of torch's, and none of its code."""

    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise KeyError(f"{type(self).__name__}.{name}")
        return self.state[name]

    def get(self, name: str) -> Any:
        """Returns an attribute, or None where the instance has none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_tensors(data: bytes) -> Any:
    """Reads the pickle of a `torch.save` file, with `PickledTensor` for each tensor.

    Raises:
        UnknownNameError: It needs more than tensors, containers and plain values.
        Exception: It is no pickle, or makes no sense; of any kind.
    """
    return _Unpickler(data, _tensor_names()).load()


def read_metadata(data: bytes, path: Path) -> PickledInstance:
    """Reads the `.metadata` of a directory of `torch.distributed.checkpoint`.

    Raises:
        CorruptSaveError: The bytes are not such a file.
        RefusedError: It asks for a name that such a file does not need.
    """
    try:
        found = _Unpickler(data, _metadata_names()).load()
    except UnknownNameError as error:
        raise refusal(path, error.name) from error
    except Exception as error:
        raise CorruptSaveError(f"{path} is no whole pickle: {error!r}.", file=path.name) from error
    if not isinstance(found, PickledInstance) or type(found).__name__ != "Metadata":
        problem = f"holds a {type(found).__name__} instead of a checkpoint's Metadata"
        raise CorruptSaveError(f"{path} {problem}.", file=path.name)
    return found


def load_weights_only(source: Path | io.BytesIO, path: Path, *, mmap: bool) -> Any:
    """Loads what torch itself takes for harmless.

    Args:
        source: A path, or the bytes of one item of the file.
        path: The file, for messages.
        mmap: Whether tensors stay in the file until their pages are touched.

    Raises:
        CorruptSaveError: It is no whole `torch.save` file.
        RefusedError: Loading it could run code.
        OSError, MemoryError: It cannot be read, or says that it holds more than there is room for.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of protocols: what it cannot read it refuses
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        text = str(error)
        name = re.search(r"(?:GLOBAL|instruction for|class) ([\w.]+\.\w+)", text)
        if "Unsupported" in text or "Trying to" in text:
            raise refusal(path, name[1] if name else None) from error
        raise CorruptSaveError(
            f"{path} cannot be unpickled: {text[:200]}.", file=path.name
        ) from error
    except RuntimeError as error:
        if "weights_only" in str(error):
            raise RefusedError(f"{path} cannot be read safely: {error}") from error
        raise CorruptSaveError(
            f"{path} is no whole file of torch.save: {error}.", file=path.name
        ) from error
    except (OSError, MemoryError):  # a pickle may ask for any size
        raise
    except Exception as error:  # torch's reader of pickles is Python: whatever its steps raise
        raise CorruptSaveError(
            f"{path} is no whole file of torch.save: {error!r}.", file=path.name
        ) from error


def refusal(path: Path, name: str | None) -> RefusedError:
    """Returns the error for a pickle that could run code."""
    asked = f"asks for {name}" if name else "asks for more than tensors and plain values"
    return RefusedError(
        f"{path} holds a pickle that {asked}, and loading it could run code; nothing of it was run."
        " If you trust the file, load it with torch.load(..., weights_only=False) and save plain"
        " tensors and values."
    )


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows the names that it was given, and no other. [Note: pickles]"""

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> object:
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if (module, name) in self._names:
            return self._names[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise UnknownNameError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _, num_elements = pid
        is_count = type(num_elements) is int and 0 <= num_elements < _TOO_LARGE
        # Whatever else it is, its text could be longer than memory: lists may share lists.
        if kind != "storage" or not is_count or type(key) not in (str, int):
            raise pickle.UnpicklingError("a storage has no plain name or no size")
        return _Storage(str(key), num_elements, storage_type.dtype)


class _SafeCallable:
    """A callable that a pickle cannot change."""

    __slots__ = ("_call", "dtype")

    def __init__(self, call: Callable[..., Any], dtype: torch.dtype | None = None) -> None:
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "dtype", dtype)

    def __call__(self, *arguments: object) -> object:
        return self._call(*arguments)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


def _tensor_names() -> dict[tuple[str, str], object]:
    calls: dict[tuple[str, str], Callable[..., Any]] = {
        ("_codecs", "encode"): _encode,
        ("builtins", "bytearray"): _bytearray,
        ("builtins", "complex"): complex,
        ("builtins", "set"): _set,
        ("collections", "Counter"): Counter,
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    }
    names: dict[tuple[str, str], Any] = {name: _SafeCallable(call) for name, call in calls.items()}
    for name, dtype in _STORAGES.items():
        names["torch", name] = _SafeCallable(_never, dtype)
    names["torch.storage", "UntypedStorage"] = _SafeCallable(_never)
    return names


def _metadata_names() -> dict[tuple[str, str], Any]:
    dcp = "torch.distributed.checkpoint"
    classes = [
        (f"{dcp}.filesystem", "_StorageInfo"),
        (f"{dcp}.metadata", "BytesStorageMetadata"),
        (f"{dcp}.metadata", "ChunkStorageMetadata"),
        (f"{dcp}.metadata", "Metadata"),
        (f"{dcp}.metadata", "MetadataIndex"),
        (f"{dcp}.metadata", "StorageMeta"),
        (f"{dcp}.metadata", "TensorProperties"),
        (f"{dcp}.metadata", "TensorStorageMetadata"),
    ]
    names: dict[tuple[str, str], Any] = {
        (module, name): type(name, (PickledInstance,), {}) for module, name in classes
    }
    calls: dict[tuple[str, str], Callable[..., Any]] = {
        (f"{dcp}.metadata", "_MEM_FORMAT_ENCODING"): _ignored,
        ("collections", "OrderedDict"): OrderedDict,
        ("torch.serialization", "_get_layout"): _ignored,
        ("torch", "Size"): torch.Size,
    }
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath", "WindowsPath"):
            calls[module, name] = _ignored
    return names | {name: _SafeCallable(call) for name, call in calls.items()}


def _tensor(
    storage: _Storage,
    offset: int,
    shape: Any,
    stride: Any,
    _requires_grad: bool,
    _hooks: Any,
    metadata: Any = None,
    *,
    dtype: torch.dtype | None = None,
) -> PickledTensor:
    if metadata:
        raise UnknownNameError("a tensor with conjugate or negative bits")
    dtype = dtype or storage.dtype or torch.uint8
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise pickle.UnpicklingError("no tensor has a layout that is no whole numbers from 0 on")
    if max(numbers) >= _TOO_LARGE or len(shape) > _MOST_DIMENSIONS:
        raise pickle.UnpicklingError("no tensor is that large")
    storage_bytes = storage.num_elements * (storage.dtype or torch.uint8).itemsize
    return PickledTensor(storage.key, storage_bytes, dtype, offset * dtype.itemsize, shape, stride)


def _tensor_of_dtype(
    storage: _Storage,
    offset: int,
    shape: object,
    stride: object,
    requires_grad: bool,
    hooks: object,
    dtype: torch.dtype,
    metadata: object = None,
) -> PickledTensor:
    return _tensor(storage, offset, shape, stride, requires_grad, hooks, metadata, dtype=dtype)


def _parameter(data: PickledTensor, *_: object) -> PickledTensor:
    return data


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError("bytes are encoded in another way than latin1")
    return text.encode("latin1")


def _bytearray(data: bytes = b"") -> bytearray:
    if not isinstance(data, bytes):  # a number would ask for that many bytes
        raise pickle.UnpicklingError("a bytearray is not made of bytes")
    return bytearray(data)


def _set(items: list[object] | tuple[object, ...] = ()) -> set[object]:
    return set(items)


def _ignored(*_: object) -> None:
    return None


def _never(*_: object) -> object:
    raise pickle.UnpicklingError("a storage is not made in a pickle")
