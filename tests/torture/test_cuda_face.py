"""Random programs on the simulated accelerator in CUDA's place, judged by CUDA's and torch's rules.

Each program is a process of its own, forked from a warm one: it may use up a context, lose the
device, or leave a capture broken. What is right follows from the documentation of CUDA and torch
and from arithmetic on the host. ``cuda_program.py`` serves the programs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_process import Server

Judge = Callable[[random.Random], None]

PROGRAM = Path(__file__).parent / "cuda_program.py"
KINDS = [
    "captures",
    "contexts",
    "devices",
    "generators",
    "inputs",
    "lost devices",
    "memory",
    "page-locked memory",
    "refused captures",
    "streams",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("cuda"), PROGRAM)
    yield server
    server.close()


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_the_face_keeps_the_rules_of_cuda(
    torture: Callable[[Judge], None], server: Server, kind: str
) -> None:
    def judge(chance: random.Random) -> None:
        program = server.run(kind, seed=chance.randrange(1 << 40))
        assert program.status == 0, f"{kind}: {program.status}\n{program.said()}"

    torture(judge)
