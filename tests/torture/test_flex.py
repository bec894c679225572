"""Random calls of ``flex_attention`` on simulated cards, judged by an oracle that was read in
torch's compiler.

What a compiled call keeps, and what it and its backward pass take at their peaks: of any layout and
type, with masks, captured tensors that learn, few queries, and what else it returns. A call that is
not compiled has its matrices, whatever else the script compiles.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.torture.card_programs import found_on
from tests.torture.flex_cases import draw
from tests.torture.flex_oracle import figures, given, matrices

Torture = Callable[[Callable[[random.Random], None]], None]

PROGRAM = Path(__file__).parent / "flex_program.py"
CARDS = {"l4": 58, "rtx4090": 128, "a100-80g": 108, "h100-80g": 132}  # multiprocessors
# Single numbers: with which a function that changes scores is looked at, or that stand for rows.
SINGLE = 64


def check(case: dict[str, Any], found: dict[str, int], num_processors: int) -> None:
    """Holds one call against the oracle."""
    assert found.get("given", 0) == given(case)
    if case["how"] == "plain":
        forward, backward = matrices(case)
        assert found["forward"] >= forward, forward
        assert found.get("backward", 0) >= backward, backward
        return
    expected = figures(case, num_processors)
    assert 0 <= found["held"] - expected.held <= SINGLE, expected
    for name, (least, most) in (("forward", expected.forward), ("backward", expected.backward)):
        assert least <= found.get(name, 0) <= most + SINGLE, expected


def test_calls_take_what_the_code_of_torchs_compiler_takes(
    torture: Torture, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        card = chance.choice(list(CARDS))
        cases = [draw(chance) for _ in range(30)]
        for case, found in zip(cases, found_on(card, PROGRAM, cases, tmp_path), strict=True):
            try:
                check(case, found, CARDS[card])
            except AssertionError as error:
                error.add_note(f"{card}: {json.dumps(case)}: {found}")
                raise

    torture(judge)
