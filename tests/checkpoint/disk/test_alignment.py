"""Whatever a file system asks of direct writes, and however long the tensors are: what is on the
disk is what was summed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from residency._checkpoint._disk import _image, _write
from residency._checkpoint._disk._manifest import FileRecord, Record
from residency._checkpoint._disk._parts import FilePlan, Part, leased
from residency._checkpoint._disk._system import O_DIRECT, System
from residency._checkpoint._disk._write import write_files
from residency._errors import CheckpointError

CHUNK_BYTES = 8192
SIZES = (
    *(0, 1, 511, 512, 513, 1024, 1536, 3584, 4095, 4096, 4097, 4608, 5120),
    *(CHUNK_BYTES + 512 * k for k in range(-9, 10)),
    65536,
)


class Disk(System):
    """A file system that takes direct writes of some alignments only, on any file system.

    Args:
        memory: What addresses and lengths in memory are multiples of; ``statx`` says it.
        offset: What offsets and lengths in the file are multiples of.
    """

    def __init__(self, memory: int, offset: int = 512) -> None:
        self.num_direct = 0
        self._memory, self._offset = memory, offset
        self._direct: set[int] = set()

    def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
        if name == "fsync":
            return None
        if name == "statx":
            return self._memory
        if name == "open":
            path, flags, *rest = arguments
            fd = function(path, flags & ~O_DIRECT, *rest)
            if flags & O_DIRECT:
                self._direct.add(fd)
            return fd
        if name == "close":
            self._direct.discard(arguments[0])
        if name == "pwritev" and arguments[0] in self._direct:
            self._check(*arguments[1:])
            self.num_direct += 1
        return function(*arguments)

    def _check(self, buffers: list[memoryview], offset: int) -> None:
        lengths = [buffer.nbytes for buffer in buffers]
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers]
        is_fit = all(n % self._memory == 0 for n in (*lengths, *addresses))
        if not is_fit or offset % self._offset or sum(lengths) % self._offset:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class Swapping(System):
    """Puts other bytes into the buffer that a thread gathers in, before any write."""

    def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
        if name == "pwritev":
            buffers = [memoryview(bytearray(each.nbytes)) for each in arguments[1]]
            return function(arguments[0], buffers, arguments[2])
        return function(*arguments)


def write_tensors(
    folder: Path, views: dict[str, memoryview], system: System
) -> tuple[FileRecord, bytes]:
    parts = [
        Part(Record(n, "U8", (v.nbytes,), v.nbytes), lambda v=v: v, lambda: None)
        for n, v in views.items()
    ]
    with leased([FilePlan("file", parts)]) as files:
        written = write_files(folder, files, system=system, chunk_bytes=CHUNK_BYTES)
    return written["file"], (folder / "file").read_bytes()


def check_sums(record: FileRecord, data: bytes) -> None:
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    assert record.num_bytes == len(data)
    assert list(record.crc32) == [zlib.crc32(chunk) for chunk in chunks]


@pytest.mark.parametrize("start", [0, 512])
@pytest.mark.parametrize("offset", [1, 512, 4096, 16384])
@pytest.mark.parametrize("memory", [1, 512, 4096])
def test_what_is_summed_is_what_is_handed_to_the_system(
    saves: ModuleType, tmp_path: Path, memory: int, offset: int, start: int
) -> None:
    import safetensors

    drawn = random.Random(memory + offset + start)
    for num_bytes in SIZES:
        for others in ((), (512,), (1024, 512)):
            sizes = (num_bytes, *others)
            expected = {f"t{i}": drawn.randbytes(size) for i, size in enumerate(sizes)}
            views = {n: saves.in_pages(bytes(start) + d)[start:] for n, d in expected.items()}
            system = Disk(memory, offset)
            record, data = write_tensors(tmp_path, views, system)
            check_sums(record, data)
            found = {n: bytes(f["data"]) for n, f in safetensors.deserialize(data)}
            assert found == expected, f"{sizes} bytes"
            if offset <= 4096 and O_DIRECT:
                assert system.num_direct > 0
            (tmp_path / "file").unlink()


def test_bytes_that_change_between_the_sum_and_the_disk_are_noticed(
    saves: ModuleType, tmp_path: Path
) -> None:
    views = {"t": saves.in_pages(random.Random(0).randbytes(512))}
    record, data = write_tensors(tmp_path, views, Swapping())
    with pytest.raises(AssertionError):
        check_sums(record, data)


def test_a_buffer_that_is_swapped_behind_the_sum_is_noticed(
    saves: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What once went wrong: the sum is of the pieces, and the write takes another buffer.
    stale = saves.in_pages(bytes(4096))
    own = _image.Image.buffers

    def swapped(image: _image.Image, *, padded: bool) -> list[memoryview]:
        return [stale] if padded and image.num_bytes < 4096 else own(image, padded=padded)

    monkeypatch.setattr(_image.Image, "buffers", swapped)
    views = {"t": saves.in_pages(random.Random(0).randbytes(CHUNK_BYTES - 4096 + 512))}
    record, data = write_tensors(tmp_path, views, Disk(512))
    with pytest.raises(AssertionError):
        check_sums(record, data)


def test_a_piece_in_two_alignments_is_padded_with_zeros(saves: ModuleType, tmp_path: Path) -> None:
    handed: list[bytes] = []

    class Watching(Disk):
        def perform(self, name: str, function: Callable[..., object], *given: object) -> object:
            if name == "pwritev":
                handed.append(b"".join(bytes(each) for each in given[1]))
            return super().perform(name, function, *given)

    views = {"t": saves.in_pages(b"\xff" * (CHUNK_BYTES + 512))}
    _, data = write_tensors(tmp_path, views, Watching(512))
    assert sorted(map(len, handed)) == [8192, 8192]
    assert handed[[len(h.rstrip(b"\0")) for h in handed].index(4608)][4608:] == bytes(3584)
    assert len(data) == 4096 + CHUNK_BYTES + 512


class Mapped(Disk):
    """A kernel that takes no bytes from some memory: all of it, or direct writes alone."""

    def __init__(self, memory: memoryview, *, direct_alone: bool) -> None:
        super().__init__(memory=512)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.refused: list[int] = []
        self._mapped = range(first, first + memory.nbytes)
        self._direct_alone = direct_alone

    def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
        if name == "pwritev" and (arguments[0] in self._direct or not self._direct_alone):
            for each in arguments[1]:
                address = ctypes.addressof(ctypes.c_char.from_buffer(each))
                if address in self._mapped:
                    self.refused.append(address)
                    raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return super().perform(name, function, *arguments)


@pytest.mark.parametrize("direct_alone", [True, False], ids=["direct writes", "all writes"])
def test_memory_that_a_driver_has_mapped_is_written_through_a_buffer(
    tmp_path: Path, direct_alone: bool
) -> None:
    data = random.Random(1).randbytes(40 * CHUNK_BYTES)
    memory = memoryview(mmap.mmap(-1, len(data)))
    memory[:] = data
    disk = Mapped(memory, direct_alone=direct_alone)
    record, found = write_tensors(tmp_path, {"a": memory}, disk)
    assert found[-len(data) :] == data
    check_sums(record, found)
    assert 1 <= len(disk.refused) <= _write.NUM_THREADS  # no later chunk was tried from there
    assert disk.num_direct >= 40  # past the cache, as before


def test_a_bad_address_that_is_the_buffers_own_is_an_error(tmp_path: Path) -> None:
    class Faulty(System):
        num_writes = 0

        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            if name == "pwritev":
                self.num_writes += 1
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            return function(*arguments)

    system = Faulty()
    with pytest.raises(CheckpointError, match="Bad address"):
        write_tensors(tmp_path, {"a": memoryview(mmap.mmap(-1, 4096))}, system)
    assert 1 <= system.num_writes <= 2 * _write.NUM_THREADS
