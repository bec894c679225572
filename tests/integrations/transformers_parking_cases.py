"""An optimizer whose state waits on the host while a trainer evaluates."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import transformers
from transformers_lab import (
    Each,
    Lines,
    Mixed,
    assert_same,
    case,
    inside,
    make,
    ours,
    tiny_model,
    weights,
)

from residency.integrations.transformers import ResidencyCallback


def parking() -> ResidencyCallback:
    return ours(offload=False, park_in_evaluation=True)


def is_there(optimizer: Any) -> bool:
    """Whether the state is on the device."""
    found = {state["exp_avg"].is_cuda for state in optimizer.optimizer.state.values()}
    assert len(found) == 1
    return found.pop()


class Looks(transformers.TrainerCallback):
    """Notes at each event whether the state is on the device."""

    def __init__(self) -> None:
        self.seen: dict[str, list[bool]] = {"predicting": [], "saved": []}

    def on_prediction_step(self, *args: Any, optimizer: Any = None, **others: Any) -> None:
        self.seen["predicting"].append(is_there(optimizer))

    def on_save(self, *args: Any, optimizer: Any = None, **others: Any) -> None:
        self.seen["saved"].append(is_there(optimizer))


@case
def an_evaluation_has_the_room_of_the_state_and_the_run_the_bits_of_a_stock_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = make(tiny_model(), inside(folder))
        plain.train()
        for kind in (transformers.Trainer, Mixed):
            looks = Looks()  # in front of ours, whose turn of an event comes after
            found = make(tiny_model(), inside(folder), looks, parking(), kind=kind)
            found.train()
            assert_same(weights(found.model), weights(plain.model))
            assert_same(found.optimizer.state_dict(), plain.optimizer.state_dict())
            assert looks.seen == {"predicting": [False] * 6, "saved": [True] * 2}


@case
def the_mixin_makes_room_for_each_data_set_and_for_predictions() -> None:
    seen: list[bool] = []

    class Metered(Mixed):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(is_there(self.optimizer))
            return super().prediction_step(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        settings = {"load_best_model_at_end": False, "eval_strategy": "no"}
        trainer = make(tiny_model(), inside(folder), parking(), kind=Metered, **settings)
        trainer.train()
        trainer.evaluate({"one": Lines(), "two": Lines()})
        trainer.predict(Lines())
    assert len(seen) == 9
    assert not any(seen)
    assert is_there(trainer.optimizer)


@case
def a_run_goes_on_after_an_evaluation_that_failed() -> None:
    for kind in (transformers.Trainer, Mixed):
        with tempfile.TemporaryDirectory() as folder:
            fails = [True]

            def fail(*args: Any, fails: list[bool] = fails, **others: Any) -> None:
                if fails.pop():
                    fails.append(False)
                    raise ValueError("of the test")
                fails.append(False)

            breaks = Each(on_prediction_step=fail)
            settings = {"load_best_model_at_end": False, "save_strategy": "no"}
            trainer = make(tiny_model(), inside(folder), parking(), breaks, kind=kind, **settings)
            with pytest.raises(ValueError, match="of the test"):
                trainer.train()
            trainer.train()
            assert is_there(trainer.optimizer)
