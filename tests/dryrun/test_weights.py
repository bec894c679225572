"""What the dry run leaves out on the host: a weight's random numbers, and waiting for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
# What unfilled memory may hold: drawn again and again, as no number comes to lie inside.
before = torch.empty_like
torch.empty_like = lambda tensor: torch.full_like(tensor, float("inf"))
weight = torch.full((600, 1000), float("inf"))
torch.nn.init.trunc_normal_(weight, std=0.02)
weight.cuda()
torch.empty_like = before
small = torch.nn.init.trunc_normal_(torch.empty(1000))
assert small.abs().max() <= 2 and small.std() > 0.1
"""


def test_torchs_redrawing_of_truncated_weights_ends(tmp_path: Path) -> None:
    script = tmp_path / "weights.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "residency", "dry-run", "--capacity=8GiB", "--json", "--"]
    done = subprocess.run(
        [*command, sys.executable, script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ended"] == "finished", done.stderr
