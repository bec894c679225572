"""Files of every format that is read are made hostile: each reader ends soon, and harms nothing.

An error is one that the documentation names, or the bytes are right; a reader takes no more than
64 MiB and two seconds of a processor for files of a few KiB, and stays out of other folders.
``hostile_program.py`` reads, in a process that can be ended.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_process import Server

Judge = Callable[[random.Random], None]

PROGRAM = Path(__file__).parent / "hostile_program.py"
CASES = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("hostile"), PROGRAM)
    yield server
    server.close()


@pytest.mark.whole
def test_hostile_files_do_no_harm(
    torture: Callable[[Judge], None], server: Server, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        place = tmp_path / "round"
        place.mkdir()
        request = {
            "folder": str(place),
            "seed": chance.randrange(4),
            "first": chance.randrange(1 << 40),
            "count": CASES,
            "many": False,
        }
        try:
            running = server.run("read", **request)
            found = [event for event in running.events() if event["event"] == "found"]
            assert not found, "\n".join(event["trace"] for event in found)
            assert running.status == 0, (running.said(), running.events()[-2:])
        finally:
            shutil.rmtree(place)

    torture(judge)
