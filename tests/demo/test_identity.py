"""Two runs are identical when every byte is, and the first difference has a name."""

import copy
from typing import Any

import torch

from residency._demo._identity import count_values, different_values


def make_outcome() -> dict[str, Any]:
    return {
        "parameters": {"weight": torch.tensor([0.0, float("nan")])},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
        "losses": [2.0, float("nan")],
        "heldout_loss": 1.0,
    }


def test_equal_outcomes_have_no_differences_even_with_nan() -> None:
    assert different_values(make_outcome(), copy.deepcopy(make_outcome())) == []
    assert count_values(make_outcome()) == 6


def test_each_kind_of_value_is_compared() -> None:
    other = make_outcome()
    other["losses"][0] = 2.0000000000000004
    other["parameters"]["weight"][0] = -0.0
    other["optimizer"]["state"][0]["exp_avg"][2] = 1.0000001
    other["optimizer"]["param_groups"][0]["lr"] = 0.2
    assert different_values(make_outcome(), other) == [
        "parameters.weight",
        "optimizer.state.0.exp_avg",
        "optimizer.param_groups[0].lr",
        "losses[0]",
    ]


def test_a_value_that_only_one_side_has_is_a_difference() -> None:
    other = make_outcome()
    other["optimizer"]["state"][0]["step"] = torch.tensor(1.0)
    other["losses"].pop()
    assert different_values(make_outcome(), other) == ["losses[1]", "optimizer.state.0.step"]


def test_another_dtype_or_shape_is_a_difference() -> None:
    for tensor in (torch.ones(3, dtype=torch.float64), torch.ones(1, 3)):
        other = make_outcome()
        other["optimizer"]["state"][0]["exp_avg"] = tensor
        assert different_values(make_outcome(), other) == ["optimizer.state.0.exp_avg"]
