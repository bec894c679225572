"""Recognises what a path holds, by what is in it and not by how it is named."""

from __future__ import annotations

import os
from pathlib import Path

from residency._checkpoint._sources import _dcp, _own, _safetensors, _torch_save
from residency._checkpoint._sources._source import Source
from residency._errors import CheckpointError, CorruptSaveError, RefusedError

_PICKLE_MAGIC = b"\x80"  # a file of torch.save from before torch 1.6
_POINTER = b"version https://git-lfs.github.com/spec/"
KNOWN = (
    "a .safetensors file or its index, a file of torch.save, or a directory with a save of"
    " residency, a checkpoint of torch.distributed.checkpoint, or .safetensors files"
)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Opens a checkpoint to read from, whichever of the known formats it has.

    Only headers and layouts are read. Nothing that a file says is run: a pickle may name tensors,
    containers and plain values, and no more.

    Args:
        path: A file or a directory.

    Returns:
        What it holds and where. Close it, or use it in a `with` statement: it may map files.

    Raises:
        CorruptSaveError: The files are damaged or do not fit each other.
        RefusedError: There is nothing, it is of no known format, reading it could run code, or a
            file is git-lfs's pointer to the weights.
        CheckpointError: A file cannot be read, or takes more memory than there is.
    """
    path = Path(path)
    try:
        return _open(path)
    except (CorruptSaveError, RefusedError) as error:
        named = error.file if isinstance(error, CorruptSaveError) else None
        for file in (path, path.parent / (named or ""), path / (named or "")):
            if _is_pointer(file):
                raise RefusedError(
                    f"{file} is a git-lfs pointer, not the weights: run `git lfs pull` in its"
                    " repository."
                ) from error
        raise
    except (OSError, MemoryError) as error:  # an index may be of any size
        raise CheckpointError(
            f"{path} could not be read: {error!r}. Check the path and its permissions."
        ) from error


def _open(path: Path) -> Source:
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise RefusedError(f"There is nothing at {path}. Expected is {KNOWN}.")
    if not path.is_file():
        raise RefusedError(f"{path} is neither a file nor a directory. Expected is {KNOWN}.")
    if path.name.endswith(_safetensors.INDEX_SUFFIX):
        return _safetensors.open_index(path)
    if (save := _own.find_save(path)) is not None:
        return _own.open_source(save)
    if path.name == _dcp.METADATA:
        return _dcp.open_directory(path.parent)
    with path.open("rb") as stream:
        begin = stream.read(16)
    if path.name.endswith(_safetensors.SUFFIX) or _is_safetensors(begin):
        return _safetensors.open_file(path)
    if begin.startswith((_torch_save.ZIP_MAGIC, _PICKLE_MAGIC)):
        return _torch_save.open_file(path)
    if not begin:
        raise CorruptSaveError(f"{path} is empty.", file=path.name, offset=0)
    raise RefusedError(
        f"{path} begins with {begin!r}, as no known format does. Expected is {KNOWN}."
    )


def _open_directory(path: Path) -> Source:
    if (save := _own.find_save(path)) is not None:
        return _own.open_source(save)
    if (path / _dcp.METADATA).is_file():
        return _dcp.open_directory(path)
    files = sorted(file for file in path.iterdir() if file.is_file())
    endings = (_safetensors.SUFFIX, _safetensors.INDEX_SUFFIX)
    if any(file.name.endswith(endings) for file in files):
        return _safetensors.open_directory(path, files)
    names = ", ".join(repr(entry.name) for entry in sorted(path.iterdir())[:5])
    raise RefusedError(f"{path} holds {names or 'nothing'}. Expected is {KNOWN}.")


def _is_pointer(file: Path) -> bool:
    """Returns whether a file is the text that git has where git-lfs has not brought a file yet."""
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return stream.read(len(_POINTER)) == _POINTER
    except OSError:  # what cannot be read is the error that led here
        return False


def _is_safetensors(begin: bytes) -> bool:
    """Returns whether a file begins with a header's length, and a brace."""
    return begin[6:9] == b"\0\0{"
