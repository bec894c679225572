"""Random trainings with the first FSDP in dry runs of one rank, beside the same with real peers.

What the allocator had handed out at the end of each pass and at its peak is that of a rank whose
peer is there, to the byte; who held it follows from FSDP's sources.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.torture.flat_cases import draw
from tests.torture.flat_oracle import WORKSPACES, held, passing

pytestmark = pytest.mark.whole  # three processes that import FSDP
Torture = Callable[[Callable[[random.Random], None]], None]

PROGRAM = Path(__file__).parent / "flat_program.py"
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
SMALL = 8 * 512  # numbers: a loss and its gradient, steps


def answer_of(folder: Path, num_ranks: int, name: str) -> dict[str, Any]:
    """Runs the cases as one rank of so many, and returns the answer of the dry run."""
    options = ["--json", "--quiet", "--steps", "0", "--capacity", "4GiB", "--ranks", str(num_ranks)]
    command = [sys.executable, "-m", "residency", "dry-run", *options, "--", "python", str(PROGRAM)]
    command += [str(folder / "cases.json"), str(folder / name)]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


def start_ranks(folder: Path, num_ranks: int) -> list[subprocess.Popen[str]]:
    """Starts all ranks, each of which writes what it took."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    started = []
    for rank in range(num_ranks):
        words = [str(folder / "cases.json"), str(folder / f"rank{rank}.json"), "with peers"]
        started.append(
            subprocess.Popen(
                [sys.executable, str(PROGRAM), *words],
                env=ENVIRONMENT | common | {"RANK": str(rank), "LOCAL_RANK": "0"},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def end(ranks: list[subprocess.Popen[str]]) -> None:
    """Waits for the ranks."""
    try:
        for rank in ranks:
            said = rank.communicate(timeout=600)[1]
            assert rank.returncode == 0, said[-6000:]
    finally:
        for rank in ranks:
            rank.kill()


def check_owners(case: dict[str, Any], num_ranks: int, phases: dict[str, dict[str, int]]) -> None:
    """Holds who held the bytes of each phase against FSDP's sources."""
    expected, step = held(case, num_ranks), phases["optimizer step"]
    found = step["parameters"], step["gradients"], step["optimizer state"]
    assert found == (expected.parameters, expected.gradients, expected.state), expected
    assert step["gathered parameters"] == 0
    for name, most in zip(("forward", "backward"), passing(case, num_ranks), strict=True):
        phase = phases[name]
        assert phase["activations"] <= most, (name, most, phase)
        assert phase["other"] <= WORKSPACES + SMALL, (name, phase)
        assert phase["parameters"] == expected.parameters, (name, phase)


def test_a_rank_without_peers_takes_what_one_with_them_takes(
    torture: Torture, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        cases = [draw(chance) for _ in range(8)]
        num_ranks = chance.choice([2, 2, 4, 8])
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        for each in tmp_path.glob("[dr]*.json"):  # a dry run puts back what was there
            each.unlink()
        ranks = start_ranks(tmp_path, 2) if num_ranks == 2 else []
        try:
            answer = answer_of(tmp_path, num_ranks, "dry.json")
        finally:
            end(ranks)
        phases = {each["name"]: each["at_peak_bytes"] for each in answer["phases"]}
        seen = json.loads((tmp_path / "dry.json").read_text())
        true = json.loads((tmp_path / "rank0.json").read_text()) if ranks else seen
        for i, case in enumerate(cases):
            own = {
                name.partition("/")[2]: peak
                for name, peak in phases.items()
                if name.startswith(f"case{i}/")
            }
            try:
                assert seen[i] == true[i]
                check_owners(case, num_ranks, own)
            except AssertionError as error:
                error.add_note(f"{num_ranks} ranks: {json.dumps(case)}")
                raise

    torture(judge)
