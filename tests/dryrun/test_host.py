"""The numbers of weights that a dry run leaves out on the host, and what is drawn after them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from residency._units import MIB

DRAWS = """
import sys
import torch
from torch import nn
torch.manual_seed(3)
own = torch.Generator().manual_seed(5)
nn.Sequential(nn.Embedding(999, 777), nn.Linear(1024, 1023), nn.Conv2d(256, 257, 3)).cuda()
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.half):
    nn.init.trunc_normal_(torch.empty(1001, 1003, dtype=dtype), std=0.02)
    torch.empty(1001, 1003, dtype=dtype).normal_()
    torch.empty(1001, 1003, dtype=dtype).uniform_(generator=own)
drawn = f"{torch.randint(10**9, (3,)).tolist()} {torch.rand(2, generator=own).tolist()}"
print(drawn)
assert sys.argv[1:] in ([], [drawn]), drawn
"""


def test_a_script_draws_what_it_draws_without_a_dry_run(dry_run: Any, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(DRAWS.replace(".cuda()", ""))
    command = [sys.executable, str(script)]
    plain = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    outcome = dry_run(DRAWS, plain.strip())
    assert outcome.has_run, outcome.answer["error"]


MAPPED = """
import sys
import torch
from safetensors.torch import load_file, save_file
names = [str(number) for number in range(8)]
if sys.argv[1] == "save":
    weights = {name: torch.empty(1 << 21) for name in names}
    torch.save(weights, "weights.pt")
    save_file(weights, "weights.safetensors")
else:
    taken = {name: torch.empty(1 << 21) for name in names}
    for loaded in (torch.load("weights.pt", mmap=True), load_file("weights.safetensors")):
        for name in names:
            taken[name].copy_(loaded[name])
        del loaded
    torch.ones(1).cuda()
"""


@pytest.mark.whole
def test_a_file_of_weights_that_is_mapped_is_no_memory_of_the_host(
    dry_run: Any, tmp_path: Path
) -> None:
    script = tmp_path / "plain.py"
    script.write_text(MAPPED)
    subprocess.run([sys.executable, str(script), "save"], check=True, cwd=tmp_path)
    outcome = dry_run(MAPPED, "load", options=("--capacity", "1GiB"))
    assert outcome.has_run, outcome.answer["error"]
    weights = 8 * 8 * MIB
    # The weights, those that safetensors makes of its file, and a process that began.
    assert weights < outcome.answer["host_peak"] < 2 * weights + 40 * MIB
