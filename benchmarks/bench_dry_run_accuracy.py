"""Holds the dry run's peaks against those of recorded CUDA runs.

For every trace of others in ``tests/data/cuda_traces`` the recorded peak is that of its replay:
address by address, so that it is what torch reported. The predicted one is ``residency dry-run`` of
a plain CUDA script that makes the same run (``benchmarks/scripts``). Of the traces that were
recorded here ``tests/sim/test_recorded_requests.py`` compares each request.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recorded import Replayed, replay
from residency import sim

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "tests" / "data" / "cuda_traces"
MIB = 1 << 20
# Targets, in percent of the recorded peak.
ALLOCATED, RESERVED = 0.5, 2.0


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        words: The script that makes it, with its arguments; none where it is not known.
        device: The GPU by the dry run's name: its scratch memory shows in the trace.
        part: What the trace was used for.
    """

    words: tuple[str, ...]
    device: str
    part: str


_MEDIUM = "benchmarks/scripts/cs336_medium.py"
# The GPU's kind shows in the size of cuBLAS's workspace; its name was not written down.
RUNS = {
    "w_medium_256_training": Run((_MEDIUM, "--context=256"), "a100-80g", "fit"),
    "w_medium_1024_training": Run(
        (_MEDIUM, "--context=1024", "--autocast"), "a100-80g", "held out"
    ),
    "w_medium_512_inference": Run(
        (_MEDIUM, "--context=512", "--autocast", "--inference"), "a100-80g", "held out (a)"
    ),
}
NOTES = """
fit: the script was written after the course's public code; what that leaves open (number of
batches, where logits live, how positions are rotated) was settled by this trace.
held out: predicted with what was found so, nothing was changed for its peaks. It was not unseen:
the copy in the rotation's gradient showed as a difference in both training traces at once.
(a) that this run was in inference mode was read from its own sequence: under autocast, weights are
cast anew for each use. The scratch of CUDA's kernels follows torch's and cub's public sources, but
that such scratch is taken at all was first seen in both training traces.
The five warm-up steps before the recorded one are read from what is live (five batches). The
sequence of requests is the recorded one in all three; what differs is what lay in the allocator's
cache before, which no trace tells.
Not compared: torch's own optimizers (this one is the course's), flash attention, biases, cublasLt,
convolutions, gradient checkpointing, FSDP, compiled models, several streams, Hopper GPUs.
""".strip()


def main() -> None:
    """Prints a Markdown table, a row for each trace, and what was not compared."""
    sim.enable("1GiB")
    print("| run | part | recorded peak, MiB | predicted, MiB | error | target |")
    print("|---|---|---:|---:|---:|---|")
    missing = []
    for path in sorted(TRACES.glob("[kw]_*.json.gz")):
        name = path.name.removesuffix(".json.gz")
        recorded = replay(path)
        if name not in RUNS:
            missing.append((name, recorded))
            continue
        found = predicted(RUNS[name])
        for row in rows(name, RUNS[name].part, recorded, found):
            print(row, flush=True)
    for name, recorded in missing:
        print(
            f"| {name} | not compared | {recorded.peak_allocated / MIB:.1f} allocated, "
            f"{recorded.peak_reserved / MIB:.0f} reserved | | | |"
        )
    print(f"\n{NOTES}")
    if missing:
        print("The two runs of another model are not: its code was not found in public.")


def predicted(run: Run) -> dict[str, Any]:
    """Returns the dry run's answer."""
    command = [sys.executable, "-m", "residency", "dry-run", "--device", run.device]
    command += ["--steps", "0", "--json", "--", sys.executable, *run.words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    if not answer["is_complete"]:
        raise RuntimeError(f"{run.words}: the script failed: {answer['error']}")
    return answer


def rows(name: str, part: str, recorded: Replayed, answer: dict[str, Any]) -> list[str]:
    """Returns the rows of a run: its peak allocated and its peak reserved."""
    found = []
    for kind, real, dry, target in (
        ("allocated", recorded.peak_allocated, answer["peak_allocated_bytes"], ALLOCATED),
        ("reserved", recorded.peak_reserved, answer["peak_reserved_bytes"], RESERVED),
    ):
        error = 100 * (dry / real - 1)
        verdict = "met" if abs(error) <= target else "MISSED"
        found.append(
            f"| {name}, {kind} | {part} | {real / MIB:.1f} | {dry / MIB:.1f} | {error:+.3f} % | "
            f"{target} %: {verdict} |"
        )
    return found


if __name__ == "__main__":
    main()
