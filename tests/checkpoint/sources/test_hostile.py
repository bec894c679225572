"""Files that somebody made to do harm end in one of our errors, in little time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import residency

SCRIPT = Path(__file__).with_name("hostile.py")
# A child that never ends is the failure that this is for.
TIMEOUT_SECONDS = 280
LOADED = {"dots.safetensors", "many_dots.safetensors", "many.safetensors"}  # odd, and no damage
MOST_LETTERS = 2000


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_files_made_to_do_harm_are_refused_by_name_in_little_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout)
    assert len(outcomes) > 25
    for name, outcome in outcomes.items():
        if name in LOADED:
            assert outcome == "loaded", name
            continue
        kind, _, length = outcome.partition(" of ")
        assert kind in {"CorruptSaveError", "RefusedError"}, f"{name}: {outcome}"
        assert int(length.split()[0]) < MOST_LETTERS, f"{name}: {outcome}"


def test_an_index_for_which_there_is_no_memory_cannot_be_read(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 1 << 43)
    with pytest.raises(residency.CheckpointError, match="MemoryError"):
        residency.load_into(nn.Linear(2, 2), tmp_path)
