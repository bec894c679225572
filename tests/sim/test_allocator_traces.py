"""The allocator, against what CUDA's did in recorded runs: every address, every growth."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.recorded import replay

from residency import sim

pytestmark = pytest.mark.sim
ROOT = Path(__file__).resolve().parents[2]


def test_every_recorded_allocation_gets_its_recorded_address(trace_files: list[Path]) -> None:
    sim.enable("1GiB")
    for path in trace_files:
        assert replay(path).num_allocations > 1000, path.name


@pytest.mark.whole
def test_what_the_recorder_writes_can_be_replayed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "benchmarks.record_allocations", tmp_path, "--small"]
    done = subprocess.run(
        [*command, "--only", "vit"],
        cwd=ROOT,
        env={**os.environ, "RESIDENCY_TEST_DEVICE": "sim-as-cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sim.enable("1GiB")
    found = {path.name: replay(path).num_allocations for path in tmp_path.iterdir()}
    names = [f"vit_{setting}.json.gz" for setting in ("float32", "bfloat16_fused", "checkpointing")]
    assert sorted(found) == sorted(names)
    assert min(found.values()) > 300
