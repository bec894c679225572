"""Torch's own tables of operators, modules and optimizers over the device, equal to the host.

What training uses runs each time, with a sample of the others, which follows from
``RESIDENCY_TEST_OPERATORS_SEED``; ``make test-all`` runs every name (`test_all_operators.py`). The
workers are processes: one that dies names the operator that it died of, and another goes on.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from operator_differences import DIFFERENCES
from operator_sweep import Item, MissingError, Names, items_for, surprises, sweep, with_bytes

from residency import sim

pytestmark = pytest.mark.sim

_NUM_OTHERS = 12

# fmt: off
_OPERATORS = [
    "abs", "add", "addmm", "argmax", "baddbmm", "bernoulli", "bmm", "cat", "clamp", "cumsum",
    "div", "embedding_bag", "eq", "exp", "expand", "gather", "index_add", "index_select",
    "index_put", "log_softmax", "masked_fill", "masked_select", "matmul", "max.binary", "mean",
    "mul", "nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.cross_entropy",
    "nn.functional.dropout", "nn.functional.embedding", "nn.functional.gelu",
    "nn.functional.group_norm", "nn.functional.layer_norm", "nn.functional.linear",
    "nn.functional.max_pool2d", "nn.functional.mse_loss", "nn.functional.rms_norm",
    "nn.functional.scaled_dot_product_attention", "nn.functional.silu", "nonzero", "norm",
    "permute", "pow", "prod", "rsqrt", "scatter_add", "sigmoid", "softmax", "sort", "split",
    "sqrt", "squeeze", "stack", "sub", "sum", "tanh", "topk", "tril", "unfold", "where",
]
# fmt: on
_MODULES = ["nn.Linear", "nn.LayerNorm", "nn.Conv2d", "nn.CrossEntropyLoss"]
_OPTIMIZERS = ["AdamW", "SGD"]


def _seed() -> int:
    return int(os.environ.get("RESIDENCY_TEST_OPERATORS_SEED") or 0)


def test_operators_of_training_and_a_sample_of_others_are_the_hosts(tmp_path: Path) -> None:
    sim.enable("1GiB")  # compiled here, and not while a worker is waited for
    seed = _seed()
    print(f"RESIDENCY_TEST_OPERATORS_SEED={seed}")

    def choose(names: Names) -> list[Item]:
        usual = [name for name in names["operator"] if name in _OPERATORS]
        others = sorted(set(names["operator"]) - set(usual))
        return [
            *items_for("operator", usual, most_samples=1),
            *items_for("module", _MODULES, most_samples=1),
            *items_for("optimizer", _OPTIMIZERS, most_samples=1),
            *items_for("operator", random.Random(seed).sample(others, _NUM_OTHERS), most_samples=1),
        ]

    try:
        answers = sweep(tmp_path, choose, [("dry",), ("real",)])
    except MissingError as missing:
        pytest.skip(f"torch's own tables do not import: {missing}")
    assert len(answers) > len(_OPERATORS)
    found = surprises(with_bytes(answers), DIFFERENCES)
    assert not found, "\n".join([f"RESIDENCY_TEST_OPERATORS_SEED={seed} repeats it", *found])
