"""Previews with their owners parked on the host change no bit of a training, and take no room.

What is judged, and why it has a process of its own, stands in ``parking_program.py``.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_process import Server

pytestmark = pytest.mark.sim

Judge = Callable[[random.Random], None]
PROGRAM = Path(__file__).parent / "parking_program.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("parking"), PROGRAM)
    yield found
    found.close()


@pytest.mark.whole
def test_a_training_goes_on_from_its_parked_previews_as_stock_without_them(
    torture: Callable[[Judge], None], server: Server, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        place = tmp_path / "round"
        place.mkdir()
        try:
            running = server.run("parked", seed=chance.randrange(1 << 40), folder=str(place))
            assert running.status == 0, (running.said()[-6000:], running.events())
        finally:
            shutil.rmtree(place)

    torture(judge)
