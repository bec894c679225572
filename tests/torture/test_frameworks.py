"""Real Lightning, Transformers with PEFT, and accelerate, with random settings: stock beside ours.

Whole runs, and runs that stopped in their midst and were resumed, have the same weights, optimizer
states, losses, schedules and generators, and what stock tools read of their files is the same, bit
for bit; each side resumes from the other's files. The frameworks take the paths that they take on
a GPU, since the simulator is in CUDA's place; so they are in a process of their own,
``framework_program.py``.
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
PROGRAM = Path(__file__).parent / "framework_program.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        found = Server(tmp_path_factory.mktemp("frameworks"), PROGRAM)
    yield found
    found.close()


@pytest.mark.whole
@pytest.mark.parametrize("framework", ["lightning", "trainer", "accelerate"])
def test_a_framework_does_the_same_with_this_library_and_without(
    framework: str, torture: Callable[[Judge], None], server: Server, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        place = tmp_path / "round"
        place.mkdir()
        try:
            running = server.run(framework, seed=chance.randrange(1 << 40), folder=str(place))
            assert running.status == 0, (running.said()[-6000:], running.events())
        finally:
            shutil.rmtree(place)

    torture(judge)
