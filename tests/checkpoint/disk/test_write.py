"""The writer takes each part once, in order, gives it back once, and holds nobody up."""

from __future__ import annotations

import logging
import mmap
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from residency._checkpoint._disk import _image
from residency._checkpoint._disk._manifest import FileRecord, Record
from residency._checkpoint._disk._parts import FilePlan, Part, leased
from residency._checkpoint._disk._system import System
from residency._checkpoint._disk._write import write_files
from residency._errors import CheckpointError

CHUNK_BYTES = 8192
TIMEOUT_SECONDS = 30


def part(
    name: str,
    num_bytes: int,
    acquire: Callable[[], memoryview] | None = None,
    release: Callable[[], None] = lambda: None,
) -> Part:
    data = memoryview(bytearray(name[:1].encode() * num_bytes))
    return Part(Record(name, "U8", (num_bytes,), num_bytes), acquire or (lambda: data), release)


def write(
    folder: Path,
    parts: Sequence[Part],
    system: System | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, FileRecord]:
    with leased([FilePlan("file", parts)]) as files:
        return write_files(
            folder,
            files,
            system=system or System(),
            on_bytes=on_bytes,
            chunk_bytes=CHUNK_BYTES,
        )


class Watching(System):
    """Says when bytes at an offset were written."""

    def __init__(self) -> None:
        self.written: set[int] = set()
        self.changed = threading.Condition()

    def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
        found = function(*arguments)
        if name == "pwritev":
            with self.changed:
                self.written.add(arguments[2])  # type: ignore[arg-type]
                self.changed.notify_all()
        return found

    def wait_for(self, offsets: set[int]) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: offsets <= self.written, TIMEOUT_SECONDS)


def test_a_part_that_is_not_final_yet_does_not_delay_those_before_it(tmp_path: Path) -> None:
    system = Watching()
    seen: list[bool] = []
    data = memoryview(bytearray(8192))

    def late() -> memoryview:
        # The header's page and four pages before: all whole chunks but the one that is shared.
        seen.append(system.wait_for({0, 8192}))
        return data

    write(tmp_path, [part("early", 16384), part("late", 8192, late)], system)
    assert seen == [True]


def test_a_part_is_given_back_while_later_ones_are_still_to_come(tmp_path: Path) -> None:
    released = threading.Event()
    seen: list[bool] = []
    data = memoryview(bytearray(8192))

    def late() -> memoryview:
        seen.append(released.wait(TIMEOUT_SECONDS))
        return data

    # The early part fills its chunks up to the last byte: 4 KiB beside the header, and 8 KiB.
    write(tmp_path, [part("early", 12288, release=released.set), part("late", 8192, late)])
    assert seen == [True]


def test_each_part_is_acquired_once_and_one_without_bytes_never(tmp_path: Path) -> None:
    acquired: Counter[str] = Counter()
    released: Counter[str] = Counter()

    def counting(name: str, num_bytes: int) -> Part:
        data = memoryview(bytearray(num_bytes))

        def acquire() -> memoryview:
            acquired.update([name])
            return data

        return part(name, num_bytes, acquire, lambda: released.update([name]))

    sizes = {f"t{index}": 3000 * index for index in range(12)}
    write(tmp_path, [counting(name, size) for name, size in sizes.items()])
    assert acquired == {name: 1 for name, size in sizes.items() if size}
    assert released == dict.fromkeys(sizes, 1)


def threads_of_writers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("residency-write")]


@pytest.mark.parametrize("failing", ["raises", "is too short", "dies"])
def test_a_part_that_cannot_be_had_fails_the_save_once(tmp_path: Path, failing: str) -> None:
    released: Counter[str] = Counter()

    def acquire() -> memoryview:
        if failing == "raises":
            raise ValueError("the device is gone")
        if failing == "dies":
            raise SystemExit(3)
        return memoryview(b"short")

    words = {
        "raises": "reading the bytes of 'bad' failed: the device is gone",
        "is too short": "'bad' came with 5 bytes, expected 100000",
        "dies": "a writer thread died",
    }[failing]
    names = ["a", "bad", "c"]
    parts = [
        part(n, 100_000, acquire if n == "bad" else None, lambda n=n: released.update([n]))
        for n in names
    ]
    with pytest.raises(CheckpointError, match=words):
        write(tmp_path, parts)
    assert released == dict.fromkeys(names, 1)
    assert threads_of_writers() == []


@pytest.mark.parametrize("is_writable", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 512, 4095])
def test_memory_anywhere_is_written_as_it_is(
    saves: ModuleType, tmp_path: Path, shift: int, is_writable: bool
) -> None:
    sizes = {"a": 40960, "b": 12345, "c": 70001, **{f"many{i}": 3 for i in range(300)}}
    drawn = random.Random(shift)
    expected = {name: drawn.randbytes(size) for name, size in sizes.items()}

    def memory(data: bytes) -> memoryview:
        view = saves.in_pages(bytes(shift) + data)[shift:]
        return view if is_writable else view.toreadonly()

    views = {name: memory(data) for name, data in expected.items()}
    written = write(tmp_path, [part(name, sizes[name], lambda n=name: views[n]) for name in sizes])
    import safetensors

    data = (tmp_path / "file").read_bytes()
    assert {n: bytes(f["data"]) for n, f in safetensors.deserialize(data)} == expected
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    record = written["file"]
    assert record.num_bytes == len(data)
    assert list(record.crc32) == [zlib.crc32(chunk) for chunk in chunks]


def test_progress_counts_every_byte_and_a_callback_that_fails_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts: list[int] = []
    written = write(tmp_path, [part("a", 100_000)], on_bytes=counts.append)
    assert sum(counts) == written["file"].num_bytes

    calls: list[int] = []

    def fail(num_bytes: int) -> None:
        calls.append(num_bytes)
        raise ValueError("no screen")

    with caplog.at_level(logging.ERROR, logger="residency"):
        write(tmp_path, [part("a", 100_000)], on_bytes=fail)
    assert len(calls) == 1
    assert "no screen" in caplog.text


class Aligned(System):
    """Says what memory a file system takes, and takes no other."""

    def __init__(self, alignment: int | None) -> None:
        self.alignment = alignment
        self.is_direct = True  # not every file system has direct writes

    def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
        if name == "statx":
            return self.alignment
        try:
            return function(*arguments)
        except OSError:
            self.is_direct &= name not in ("open", "pwritev")
            raise


@pytest.mark.parametrize(("alignment", "is_copied"), [(512, False), (4096, True), (None, True)])
def test_memory_goes_to_the_disk_uncopied_where_the_file_system_takes_it(
    tmp_path, monkeypatch, alignment, is_copied
):
    memory = memoryview(mmap.mmap(-1, 4 * CHUNK_BYTES))
    home = memory[512 : 512 + 2 * CHUNK_BYTES]  # no page begins there
    home[:] = random.Random(0).randbytes(home.nbytes)
    gathered = []
    gather = _image._gather
    monkeypatch.setattr(_image, "_gather", lambda *given: gathered.append(given) or gather(*given))
    system = Aligned(alignment)
    write(tmp_path, [part("w", home.nbytes, lambda: home)], system)
    if system.is_direct:
        assert bool(gathered) == is_copied
    assert (tmp_path / "file").read_bytes().endswith(home.tobytes())
