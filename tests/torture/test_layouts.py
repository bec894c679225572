"""Saves of sharded tensors, models and optimizers, restored by other ranks in other layouts.

The judge is torch: it distributes what was saved over the layouts that are restored into, and
gathers whole parameters and states on both sides.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks
from tests.torture.layout_program import Drawn

PROGRAM = Path(__file__).with_name("layout_program.py")
Torture = Callable[[Callable[[random.Random], None]], None]


@pytest.mark.whole
def test_what_some_ranks_saved_others_restore_in_their_own_layouts(
    torture: Torture, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        seed = chance.randrange(1 << 30)
        folder = tmp_path / str(seed)
        folder.mkdir()
        for phase, size in Drawn(seed).ranks.items():
            run_ranks([(PROGRAM, phase, rank, folder, seed) for rank in range(size)], folder)
        shutil.rmtree(folder)

    torture(judge)
