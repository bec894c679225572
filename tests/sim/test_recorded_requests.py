"""The requests of whole training steps: a dry run of the recorder's own models makes those that
CUDA's allocator had on an H200, in their order, but for what is named here.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.recorded import requests

pytestmark = [pytest.mark.sim, pytest.mark.whole]
ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "cuda_traces"
MODELS = ("llama", "qwen3", "resnet", "vit")
Difference = tuple[tuple[int, ...], tuple[int, ...]]  # on the card, in the dry run
# Of language models: what the card asks for, what the dry run asks for there, and why.
NAMED: dict[Difference, str] = {
    # Transformers 5.17 turns positions by a product of matrices, 5.23 by one of elements.
    ((33554432,), ()): "cuBLAS's workspace, taken for it",
    ((), (33554432,)): "the same, taken for the next product",
}
# Of models with convolutions so many differences, which may only become fewer: cuDNN's workspaces.
MOST = {"resnet": 400, "vit": 9}


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("requests")
    command = [sys.executable, "-m", "benchmarks.record_allocations", str(folder), "--dry", "h200"]
    environment = {**os.environ, "RESIDENCY_TEST_DEVICE": "sim-as-cuda"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def differences(card: list[int], dry: list[int]) -> Iterator[Difference]:
    """Yields where two sequences of requests differ."""
    for kind, i, j, m, n in difflib.SequenceMatcher(None, card, dry, False).get_opcodes():
        if kind != "equal":
            yield tuple(card[i:j]), tuple(dry[m:n])


@pytest.mark.timeout(1200)  # the first makes the requests of all
@pytest.mark.parametrize(
    "name",
    [path.name for model in MODELS for path in sorted(RECORDED.glob(f"{model}_*.json.gz"))],
)
def test_a_dry_run_makes_the_requests_of_the_card(name: str, predicted: Path) -> None:
    card, dry = requests(RECORDED / name), requests(predicted / name)
    assert len(card) > 3000
    found = [each for each in differences(card, dry) if each not in NAMED]
    most = MOST.get(name.partition("_")[0], 0)
    assert len(found) <= most, found[:5]
