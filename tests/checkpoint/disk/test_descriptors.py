"""No file stays open behind an interrupt, wherever it comes."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from types import ModuleType

import pytest
from interruptions import count_lines, interrupted_at, spread

from residency._checkpoint._disk._descriptor import Descriptor
from residency._checkpoint._disk._verify import verify_save

MOST = 400
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


def open_below(path: Path) -> list[str]:
    """The files below a directory that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # of the listing itself
            continue
        if target.startswith(str(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("act", ["save", "check_writable", "verify", "open", "clean_up"])
def test_an_interrupt_at_any_line_leaves_no_file_open(
    saves: ModuleType, tmp_path: Path, act: str
) -> None:
    saves.save(tmp_path, 1, 11)

    def run() -> None:
        where = saves.directory(tmp_path, saves.Unsynced())
        if act == "save":
            where.save(saves.request(2, 22), timeout_seconds=0)
        elif act == "check_writable":
            where.check_writable(1)
        elif act == "verify":
            verify_save(where, 1)
        elif act == "open":
            where.open(1)
        else:
            where.clean_up()

    lines = count_lines(run)
    assert not open_below(tmp_path)
    gc.disable()  # nobody comes round for what was lost
    try:
        for line in spread(lines, MOST, 7):
            at = interrupted_at(line, run, KeyboardInterrupt)
            assert not open_below(tmp_path), f"line {line} of {lines}, {at}"
    finally:
        gc.enable()


def test_a_file_is_open_as_long_as_somebody_has_it(tmp_path: Path) -> None:
    def open_it() -> Descriptor:
        return Descriptor(tmp_path / "x", os.O_WRONLY | os.O_CREAT)

    file = open_it()
    assert open_below(tmp_path) == [str(tmp_path / "x")]
    assert os.pwritev(file, [b"abc"], 0) == 3
    number = file.fileno()
    file.close()
    other = open_it()
    assert other.fileno() == number  # which is no longer the first one's
    file.close()
    del file
    assert open_below(tmp_path) == [str(tmp_path / "x")]
    with pytest.raises(FileNotFoundError):
        Descriptor(tmp_path / "nothing", os.O_RDONLY)
    for line in range(1, 20):
        interrupted_at(line, open_it, KeyboardInterrupt)
        interrupted_at(line, open_it().close, KeyboardInterrupt)
        assert len(open_below(tmp_path)) == 1, line
    del other
    assert not open_below(tmp_path)


def test_threads_that_close_one_file_close_no_other(tmp_path: Path) -> None:
    for _ in range(50):
        file = Descriptor(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
        threads = [threading.Thread(target=file.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not open_below(tmp_path)
