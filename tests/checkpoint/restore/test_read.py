"""The read engine: wanted ranges of files reach their places, and damage is named."""

import errno
import os
import random
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from interruptions import count_lines, interrupted_at, spread

import residency
from residency import CheckpointError, CorruptSaveError
from residency._checkpoint._disk import _read, _wanted
from residency._checkpoint._disk._read import read_files
from residency._checkpoint._disk._ring import Ring, Slot
from residency._checkpoint._disk._system import System, use_system
from residency._checkpoint._disk._wanted import Checksums, FileReads, Wanted


def make_file(folder, num_bytes, *, chunk_bytes=4096, seed=1):
    data = random.Random(seed).randbytes(num_bytes)
    path = folder / "part.safetensors"
    path.write_bytes(data)
    cuts = range(0, num_bytes, chunk_bytes)
    sums = [zlib.crc32(data[cut : cut + chunk_bytes]) for cut in cuts]
    return path, data, Checksums(num_bytes, chunk_bytes, sums)


def into_memory(start, num_bytes, name="t"):
    target = bytearray(num_bytes)
    return Wanted(start, num_bytes, name, memoryview(target)), target


def make_ring(num_slots, slot_bytes):
    return Ring([Slot(memoryview(bytearray(slot_bytes))) for _ in range(num_slots)])


class Collector:
    """Carries on what arrives, as the device side does."""

    def __init__(self, ring):
        self.ring = ring
        self.found = {}

    def __call__(self, slot, arrivals):
        for wanted, first, offset, size in arrivals:
            target = self.found.setdefault(wanted, bytearray(wanted.num_bytes))
            target[first : first + size] = slot.memory[offset : offset + size]
        self.ring.give_back(slot)


@pytest.mark.parametrize("num_threads", [0, 1, 2])
@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_ranges_of_any_place_and_size_arrive_whole(
    tmp_path, monkeypatch, is_checked, seed, num_threads
):
    start, begun = threading.Thread.start, []

    def start_or_fail(thread):
        if len(begun) == num_threads:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    monkeypatch.setattr(_read, "_CALL_BYTES", 3000)
    monkeypatch.setattr(_read, "_STEP_BYTES", 800)
    monkeypatch.setattr(_read, "SCRATCH_BYTES", 700)
    monkeypatch.setattr(_wanted, "_BRIDGED_BYTES", 300)
    monkeypatch.setattr(_wanted, "_UNCHECKED_CHUNK_BYTES", 5000)
    monkeypatch.setattr(_read, "_MOST_BUFFERS", 3)
    path, data, sums = make_file(tmp_path, 50_001, chunk_bytes=4096)
    chance = random.Random(seed)
    wanted, targets = [], {}
    for index in range(40):
        size = chance.choice([1, 7, 500, 4096, 9000])
        first = chance.randrange(len(data) - size)
        if index % 2:
            want, target = into_memory(first, size)
            targets[want] = target
        else:
            want = Wanted(first, size, "t")
        wanted.append(want)
    ring = make_ring(3, 1100)
    collector = Collector(ring)
    read_files(
        [FileReads(path, wanted, sums if is_checked else None)], ring=ring, consume=collector
    )
    for want in wanted:
        found = targets.get(want) or collector.found[want]
        assert found == data[want.start : want.stop]


def test_bytes_read_are_told(tmp_path):
    path, data, sums = make_file(tmp_path, 10_000)
    wanted, _ = into_memory(0, len(data))
    told = []
    read_files([FileReads(path, [wanted], sums)], on_bytes=told.append)
    assert sum(told) == len(data)


def test_a_short_read_is_continued(tmp_path, monkeypatch):
    path, data, sums = make_file(tmp_path, 30_000)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real(file, [buffers[0][:777]], at))
    wanted, target = into_memory(5, 20_000)
    read_files([FileReads(path, [wanted], sums)])
    assert target == data[5:20_005]


@pytest.mark.parametrize("place", range(0, 20_000, 997))
def test_a_flipped_byte_is_named_with_file_tensor_and_chunk(tmp_path, place):
    path, data, sums = make_file(tmp_path, 20_000)
    damaged = bytearray(data)
    damaged[place] ^= 1
    path.write_bytes(damaged)
    wanted = [into_memory(start, 5000, f"t{start}")[0] for start in range(0, 20_000, 5000)]
    with pytest.raises(CorruptSaveError) as caught:
        read_files([FileReads(path, wanted, sums)])
    assert caught.value.file == path.name
    assert caught.value.offset == place // 4096 * 4096
    chunk = range(caught.value.offset, min(caught.value.offset + 4096, 20_000))
    owners = {f"t{at // 5000 * 5000}" for at in chunk}
    assert caught.value.tensor in owners
    assert path.name in str(caught.value)


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("length", [0, 1, 4096, 9000, 19_999])
def test_a_truncated_file_is_named_with_the_byte_at_which_it_ends(tmp_path, length, is_checked):
    path, _, sums = make_file(tmp_path, 20_000)
    os.truncate(path, length)
    wanted = [into_memory(start, 5000, f"t{start}")[0] for start in range(0, 20_000, 5000)]
    with pytest.raises(CorruptSaveError, match=r"ends at byte|checksum") as caught:
        read_files([FileReads(path, wanted, sums if is_checked else None)])
    assert caught.value.file == path.name
    assert caught.value.offset >= length // 4096 * 4096


def test_a_range_beyond_the_file_is_refused_before_anything_is_read(tmp_path):
    path, _, sums = make_file(tmp_path, 5000)
    wanted, target = into_memory(4000, 2000)
    with pytest.raises(CorruptSaveError, match="would end at 6000"):
        read_files([FileReads(path, [wanted], sums)])
    assert target == bytearray(2000)


def test_a_missing_file_is_an_error_with_its_cause(tmp_path):
    wanted, _ = into_memory(0, 10)
    with pytest.raises(CheckpointError, match=r"nothing\.bin could not be read") as caught:
        read_files([FileReads(tmp_path / "nothing.bin", [wanted])])
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("failing", ["open", "preadv"])
def test_each_system_call_of_a_read_can_fail(tmp_path, failing):
    class Broken(System):
        def perform(self, name, function, *arguments):
            if name == failing:
                raise OSError(errno.EIO, "the disk is gone")
            return function(*arguments)

    path, _, sums = make_file(tmp_path, 5000)
    use_system(Broken())
    try:
        with pytest.raises(CheckpointError, match="the disk is gone"):
            read_files([FileReads(path, [into_memory(0, 5000)[0]], sums)])
    finally:
        use_system(None)


def test_a_consumer_that_fails_ends_the_threads(tmp_path):
    path, data, sums = make_file(tmp_path, 100_000)
    ring = make_ring(2, 4096)

    def fail(slot, arrivals):
        raise ValueError("the device is gone")

    before = threading.active_count()
    with pytest.raises(ValueError, match="the device is gone"):
        read_files([FileReads(path, [Wanted(0, len(data), "t")], sums)], ring=ring, consume=fail)
    assert threading.active_count() == before


def test_a_slot_is_filled_again_only_when_it_was_given_back(tmp_path):
    path, data, sums = make_file(tmp_path, 40_000)
    ring = make_ring(3, 4096)
    kept, found = [], bytearray(len(data))

    def land():
        slot, arrivals = kept.pop(0)
        for _, first, offset, size in arrivals:
            found[first : first + size] = slot.memory[offset : offset + size]
        ring.give_back(slot)

    def consume(slot, arrivals):
        kept.append((slot, arrivals))
        if len(kept) == 2:
            land()

    read_files([FileReads(path, [Wanted(0, len(data), "t")], sums)], ring=ring, consume=consume)
    land()
    assert found == data


def test_reading_imports_no_torch():
    code = (
        "import sys; from residency._checkpoint._disk import _read; print('torch' in sys.modules)"
    )
    source = str(Path(residency.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == "False"


def test_a_read_that_is_interrupted_writes_nothing_later(tmp_path: Path) -> None:
    """At any line of the caller: its threads are at their end when the exception comes out."""
    num_bytes = 300_000
    (tmp_path / "file").write_bytes(bytes([1]) * num_bytes)
    targets = [bytearray(num_bytes // 3) for _ in range(3)]
    wanted = [Wanted(i * len(t), len(t), f"t{i}", memoryview(t)) for i, t in enumerate(targets)]

    def read() -> None:
        read_files([FileReads(tmp_path / "file", wanted)])

    for line in spread(count_lines(read), 200, seed=1):
        for target in targets:
            target[:] = bytes(len(target))
        interrupted_at(line, read, KeyboardInterrupt("here"))
        seen = [bytes(target) for target in targets]
        for thread in threading.enumerate():
            if thread.name.startswith("residency-read"):
                thread.join()
        assert seen == [bytes(target) for target in targets], line
    read()
    assert all(set(target) == {1} for target in targets)
