"""Generated text in a dry run, which computes no token, has the full length."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from residency._dryrun._frameworks import complete_answers

FREE = -1  # a token that ends no answer


class Trainer:
    """A trainer as TRL has them: it cuts answers by a mask, which reads False."""

    eos_token_ids: tuple[int, ...]
    max_completion_length = 3

    def __init__(self, found: Any) -> None:
        self._found = found

    def _generate_single_turn(self, prompts: object) -> Any:
        return self._found


class NewTrainer(Trainer):
    """A trainer of TRL 1.16, which knows the tokens that end an answer."""

    eos_token_ids = (0, 1)


class OldTrainer(Trainer):
    """A trainer of TRL before: its tokenizer alone knows the one."""

    _tokenizer = SimpleNamespace(eos_token_id=0)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (([[], []], None), ([[FREE] * 3, [FREE] * 3], None)),  # as of GRPO
        ([[], [7]], [[FREE] * 3, [7]]),  # as of RLOO
        (([[5]], [[]], None), ([[5]], [[FREE] * 3], None)),  # with the prompts, as of earlier ones
    ],
)
def test_answers_that_are_cut_to_nothing_are_of_full_length(
    found: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trainer, token in ((NewTrainer, 2), (OldTrainer, 1)):
        module = ModuleType("trl.trainer.grpo_trainer")
        module.__dict__["GRPOTrainer"] = trainer
        monkeypatch.setattr(trainer, "_generate_single_turn", Trainer._generate_single_turn)
        complete_answers("GRPOTrainer", module)
        assert trainer(found)._generate_single_turn([]) == _with(token, expected)


def _with(token: int, expected: Any) -> Any:
    """Puts a token in the place of `FREE`."""
    if isinstance(expected, list | tuple):
        return type(expected)(_with(token, each) for each in expected)
    return token if expected == FREE else expected
