"""What the machine itself takes: copies into memory that is there, and plain reads and writes."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from residency._checkpoint._disk import _crc

_PAGE = mmap.PAGESIZE
_CHUNK_BYTES = 1 << 22
_ALIGNMENT = 512


class Arena:
    """Is host memory of which every page was touched, in large pages where the system has them."""

    def __init__(self, sizes: Iterable[int]) -> None:
        num_bytes = sum(map(_align_up, sizes))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._bytes = mmap.mmap(-1, -(-num_bytes // _PAGE) * _PAGE, flags=flags)
        self._bytes.madvise(mmap.MADV_HUGEPAGE)
        self._tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._tensor.fill_(1)

    def copy(self, tensors: Iterable[Tensor]) -> None:
        start = 0
        for tensor in tensors:
            flat = tensor.view(-1).view(torch.uint8)
            self._tensor[start : start + flat.numel()].copy_(flat)
            start += _align_up(flat.numel())  # a copy to an odd address takes twice as long

    def write(self, path: Path, *, threads: int, direct: bool, crc32: bool) -> None:
        """Writes all to a file, durable and under its name."""
        partial = path.with_name(path.name + ".partial")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0))
        view = memoryview(self._bytes)
        os.posix_fallocate(fd, 0, len(view))

        def write(start: int) -> None:
            chunk = view[start : start + _CHUNK_BYTES]
            if crc32:
                _crc.crc32(chunk)
            done = 0
            while done < len(chunk):
                done += os.pwrite(fd, chunk[done:], start + done)

        _in_threads(write, range(0, len(view), _CHUNK_BYTES), threads)
        os.fsync(fd)
        os.close(fd)
        os.rename(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def read_files(
    paths: Sequence[Path], tensors: Sequence[Tensor], *, threads: int, direct: bool = False
) -> None:
    """Reads as many bytes as the tensors have from files straight into them; sums nothing."""
    chunks: list[tuple[int, int, memoryview]] = []
    sizes = [path.stat().st_size for path in paths]
    files = [os.open(path, os.O_RDONLY) for path in paths]
    index, offset = 0, 0
    for tensor in tensors:
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        view = memoryview(memory).cast("B")
        while view.nbytes:
            if offset == sizes[index]:
                index, offset = index + 1, 0
            taken = min(view.nbytes, _CHUNK_BYTES, sizes[index] - offset)
            chunks.append((files[index], offset, view[:taken]))
            view, offset = view[taken:], offset + taken

    def read(chunk: tuple[int, int, memoryview]) -> None:
        fd, start, view = chunk
        done = 0
        while done < view.nbytes:
            done += os.preadv(fd, [view[done:]], start + done)

    _in_threads(read, chunks, threads)
    for fd in files:
        os.close(fd)


def _in_threads(work: Callable[..., None], items: Iterable[object], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, items):
            pass


def _align_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
