"""Writes one rank's files: a few threads take chunk after chunk of all files in order, wait for the
bytes of that chunk only, sum them and write them.

The chunks of a file are independent: what comes later never delays what is at hand. O_DIRECT is
used where the file system takes it; that it does not may show when the file is opened or only when
it is written, and the file then goes on without. Bytes that lie as the file system wants them (at a
multiple of 512, or at a page where it does not say) go to the disk from where they are, others
through a buffer of one chunk that each thread has. So do all from then on where the kernel cannot
take bytes from where they are: memory that a driver has mapped, as page-locked memory may be.

Invariant, which ``tests/checkpoint/disk/test_alignment.py`` tries to break: the bytes that are
summed are those that are handed to the system. An `Image` has both the sum and the write of a
chunk, over the same buffers, padding included; there is no other way to either
(`test_what_is_summed_is_what_is_handed_to_the_system`).

Memory: 4 x (chunk + 4 KiB) on the host for buffers, plus the files' headers.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from residency._checkpoint._disk._crc import crc32
from residency._checkpoint._disk._descriptor import Descriptor
from residency._checkpoint._disk._dry import note_file
from residency._checkpoint._disk._header import ALIGNMENT, layout_order, make_header
from residency._checkpoint._disk._image import Image
from residency._checkpoint._disk._manifest import FileRecord
from residency._checkpoint._disk._parts import FilePlan, Lease, Part
from residency._checkpoint._disk._system import (
    O_DIRECT,
    UNSUPPORTED,
    System,
    close_quietly,
    system_in_use,
)
from residency._errors import CheckpointError
from residency._threads import begin
from residency._units import MIB

__all__ = ["CHUNK_BYTES", "FilePlan", "Part", "write_files"]

CHUNK_BYTES = 4 * MIB
NUM_THREADS = 4  # two keep a disk busy, while two sum

_logger = logging.getLogger("residency")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A range of a file.

    Attributes:
        leases: What has its bytes, in their order; None is the header.
        start: Where in the first of them it begins.
    """

    file: _File
    index: int
    offset: int
    num_bytes: int
    leases: Sequence[Lease | None]
    start: int


class _File:
    """One file on its way to the disk.

    It is opened with the first chunk and closed, durable, with the last.
    """

    def __init__(
        self, system: System, path: Path, leases: Sequence[Lease], *, chunk_bytes: int
    ) -> None:
        self.path = path
        self.is_direct = O_DIRECT != 0
        self._system = system
        self._chunk_bytes = chunk_bytes
        order = layout_order([lease.record for lease in leases])
        self._leases = [leases[index] for index in order]
        header = make_header([lease.record for lease in self._leases], file=path.name)
        self._header_crc32 = crc32(header)
        # Memory of its own begins at a page, so that the first chunk needs no copy either.
        self.header = memoryview(mmap.mmap(-1, len(header)))
        self.header[:] = header
        sizes = [lease.record.num_bytes for lease in self._leases]
        self.num_bytes = len(header) + sum(sizes)
        self.crc32 = [0] * -(-self.num_bytes // chunk_bytes)
        self._num_pending = len(self.crc32)
        self.memory_alignment = ALIGNMENT
        self._fds: dict[bool, Descriptor] = {}
        self._lock = threading.Lock()

    def chunks(self) -> Iterator[_Chunk]:
        """Yields the file's chunks in order, and says to each lease how many it lies in."""
        size = self._chunk_bytes
        start = len(self.header)
        for lease in self._leases:
            stop = start + lease.record.num_bytes
            lease.expect((stop - 1) // size - start // size + 1)
            start = stop
        position, room, first = 0, size, 0
        leases: list[Lease | None] = []
        for source in (None, *self._leases):
            done, num_bytes = 0, len(self.header) if source is None else source.record.num_bytes
            while done < num_bytes:
                if not leases:
                    first = done
                leases.append(source)
                taken = min(room, num_bytes - done)
                done, room = done + taken, room - taken
                if room == 0:
                    yield _Chunk(self, position // size, position, size, leases, first)
                    position, leases, room = position + size, [], size
        if leases:
            yield _Chunk(self, position // size, position, size - room, leases, first)

    def opens_direct(self) -> bool:
        """Returns whether the file is to be written past the page cache, as far as is known."""
        if self.is_direct:
            try:
                self.descriptor(direct=True)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                self.is_direct = False
        return self.is_direct

    def descriptor(self, *, direct: bool) -> Descriptor:
        """Returns the open file, for aligned writes or for any; opens it at the first call."""
        with self._lock:
            if direct not in self._fds:
                is_first = not self._fds
                flags = os.O_WRONLY | os.O_CREAT | (O_DIRECT if direct else 0)
                fd = self._fds[direct] = self._system.open(self.path, flags)
                if is_first:
                    self._reserve(fd)
                if direct:
                    self._ask_for_alignment(fd)
            return self._fds[direct]

    def _reserve(self, fd: Descriptor) -> None:
        # A disk without the room is known before the first byte, and the blocks lie together.
        try:
            self._system.fallocate(fd, self.num_bytes)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def _ask_for_alignment(self, fd: Descriptor) -> None:
        # Homes of optimizer states begin at multiples of 512, which most disks take as they are.
        try:
            found = self._system.direct_alignment(fd)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        else:
            self.memory_alignment = min(found or ALIGNMENT, ALIGNMENT)

    def written(self) -> None:
        """Says that one more chunk is written; the last makes the file durable and closes it."""
        with self._lock:
            self._num_pending -= 1
            if self._num_pending:
                return
        if True in self._fds and self.num_bytes % ALIGNMENT:
            self._system.ftruncate(self._fds[True], self.num_bytes)  # the last page was padded
        for fd in self._fds.values():
            self._system.fsync(fd)
        for direct in list(self._fds):
            self._system.close(self._fds.pop(direct))
        note_file(self.path)

    def abandon(self) -> None:
        """Closes what is open, after a failure."""
        while self._fds:
            close_quietly(self._system, self._fds.popitem()[1])

    def record(self) -> FileRecord:
        """Returns what the manifest is to say of the file."""
        return FileRecord(
            self.num_bytes,
            len(self.header),
            self._header_crc32,
            self._chunk_bytes,
            tuple(self.crc32),
        )


def write_files(
    folder: Path,
    files: Sequence[tuple[str, Sequence[Lease]]],
    *,
    system: System | None = None,
    on_total: Callable[[int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, FileRecord]:
    """Writes files and returns what is to be known of each, by its name, once all are on the disk.

    Args:
        folder: The directory, which exists and has no such files yet.
        files: The name of each file and the leases of its parts.
        system: Makes the system calls; None for those of this process's saves.
        on_total: Is called once, first, with the size of all files.
        on_bytes: Is called with the size of each piece written, one call at a time. One that raises
            is logged and not called again.
        chunk_bytes: What is summed and written at once; a multiple of 4096.

    Raises:
        CheckpointError: The bytes of a part could not be read, or a call failed (the first, as the
            cause). No thread runs any more and every file is closed; their contents are invalid.
    """
    system = system or system_in_use()
    images = [
        _File(system, folder / name, leases, chunk_bytes=chunk_bytes) for name, leases in files
    ]
    if on_total is not None:
        on_total(sum(image.num_bytes for image in images))
    crew = _Crew(system, images, on_bytes, chunk_bytes)
    try:
        crew.run()
    finally:
        for image in images:
            image.abandon()
    return {image.path.name: image.record() for image in images}


class _Crew:
    """The threads of one save, the chunks they share, and the first failure."""

    def __init__(
        self,
        system: System,
        files: Sequence[_File],
        on_bytes: Callable[[int], None] | None,
        chunk_bytes: int,
    ) -> None:
        self._system = system
        self._chunk_bytes = chunk_bytes
        self._chunks = (chunk for file in files for chunk in file.chunks())
        self._on_bytes = on_bytes
        self._failure: BaseException | None = None
        self._copies_all = False
        self._lock = threading.Lock()
        self._reporting = threading.Lock()

    def run(self) -> None:
        """Returns when all is written; raises the first failure when no thread runs any more."""
        threads = [
            threading.Thread(target=self._work, name=f"residency-write-{index}", daemon=True)
            for index in range(NUM_THREADS)
        ]
        try:
            if not begin(threads):
                self._work()
            for thread in threads:
                if thread.ident is not None:  # it was begun
                    thread.join()
        except BaseException as error:  # an interrupt: the threads end with their present chunk
            self._fail(error)
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:  # it was started
                    thread.join()
        if isinstance(self._failure, CheckpointError):
            raise self._failure
        if self._failure is not None:
            raise CheckpointError(f"a writer thread died: {self._failure!r}") from self._failure

    def _work(self) -> None:
        bounce: memoryview | None = None
        try:
            while (chunk := self._next_chunk()) is not None:
                if bounce is None:
                    bounce = memoryview(mmap.mmap(-1, self._chunk_bytes + ALIGNMENT))
                with _naming(chunk.file.path):
                    is_written = self._write(chunk, bounce)
                if is_written:
                    self._report(chunk.num_bytes)
        except BaseException as error:
            self._fail(error)

    def _next_chunk(self) -> _Chunk | None:
        with self._lock:
            return None if self._failure is not None else next(self._chunks, None)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error

    def _report(self, num_bytes: int) -> None:
        with self._reporting:
            if self._on_bytes is None:
                return
            try:
                self._on_bytes(num_bytes)
            except Exception:
                _logger.exception("the progress callback of a save failed; it is not called again")
                self._on_bytes = None

    def _write(self, chunk: _Chunk, bounce: memoryview) -> bool:
        """Returns whether the chunk is written; not, when another one failed meanwhile."""
        file = chunk.file
        direct = file.opens_direct()
        buffers = []
        start, left = chunk.start, chunk.num_bytes
        for lease in chunk.leases:
            if self._failure is not None:
                return False  # what comes later may never be final
            view = file.header if lease is None else lease.view()
            if start > 0 or view.nbytes > left:
                view = view[start : start + left]
            if lease is not None:
                view = self._system.source(view, lease.record.num_bytes)
            buffers.append(view)
            start, left = 0, left - view.nbytes
        alignment = file.memory_alignment if direct else None
        image = Image(buffers, bounce, alignment, copy=self._copies_all)
        try:
            self._write_image(chunk, image, direct=direct)
        except OSError as error:
            # The kernel pins no page of a mapping that is marked VM_IO or VM_PFNMAP: EFAULT, from
            # `check_vma_flags` in its mm/gup.c. Source: github.com/ikwzm/udmabuf/issues/117.
            if error.errno != errno.EFAULT or image.is_copy:
                raise
            self._copies_all = True
            image.let_go()
            image = Image(buffers, bounce, alignment, copy=True)
            self._write_image(chunk, image, direct=file.is_direct)
        image.let_go()  # no thread looks at a part's bytes after its release
        buffers.clear()
        for lease in chunk.leases:
            if lease is not None:
                lease.written()
        file.written()
        return True

    def _write_image(self, chunk: _Chunk, image: Image, *, direct: bool) -> None:
        chunk.file.crc32[chunk.index] = image.crc32(self._system)
        if not (direct and self._write_direct(chunk, image)):
            fd = chunk.file.descriptor(direct=False)
            _write_all(self._system, fd, image.buffers(padded=False), chunk.offset, multiple=1)

    def _write_direct(self, chunk: _Chunk, image: Image) -> bool:
        """Returns whether the file system took it; if not, it has to go through the page cache."""
        fd = chunk.file.descriptor(direct=True)
        buffers = image.buffers(padded=True)
        try:
            _write_all(self._system, fd, buffers, chunk.offset, multiple=ALIGNMENT)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            chunk.file.is_direct = False
            return False
        return True


def _write_all(
    system: System, fd: Descriptor, buffers: Sequence[memoryview], offset: int, *, multiple: int
) -> None:
    """Writes all of the buffers; goes on after a write that was cut short, at a multiple."""
    left = list(buffers)
    while left:
        num_bytes = system.pwritev(fd, left, offset)
        num_bytes -= num_bytes % multiple
        if num_bytes == 0 and multiple > 1:
            raise OSError(errno.EINVAL, "less than a page was written")
        if num_bytes == 0:
            raise OSError(errno.EIO, "the file system wrote nothing, and named no error")
        offset += num_bytes
        while left and num_bytes >= left[0].nbytes:
            num_bytes -= left.pop(0).nbytes
        if num_bytes:
            left[0] = left[0][num_bytes:]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Gives an error of the system the name of the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error}. Check its permissions and the free space, then "
            "save again."
        ) from error
