"""Generated text in a dry run, which computes no token, has the full length."""

from types import ModuleType
from typing import Any

import pytest

from residency._dryrun._frameworks import complete_answers


class Trainer:
    """A trainer as TRL has them: it cuts answers by a mask, which reads False."""

    eos_token_ids = (0, 1)
    max_completion_length = 3

    def __init__(self, found: Any) -> None:
        self._found = found

    def _generate_single_turn(self, prompts: object) -> Any:
        return self._found


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (([[], []], None), ([[2, 2, 2], [2, 2, 2]], None)),  # as of GRPO
        ([[], [7]], [[2, 2, 2], [7]]),  # as of RLOO
        (([[5]], [[]], None), ([[5]], [[2, 2, 2]], None)),  # with the prompts, as of earlier ones
    ],
)
def test_answers_that_are_cut_to_nothing_are_of_full_length(
    found: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("trl.trainer.grpo_trainer")
    module.__dict__["GRPOTrainer"] = Trainer
    monkeypatch.setattr(Trainer, "_generate_single_turn", Trainer._generate_single_turn)
    complete_answers("GRPOTrainer", module)
    assert Trainer(found)._generate_single_turn([]) == expected
