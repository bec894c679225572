"""The whole of torch's tables of operators, modules and optimizers over the device.

Each operator in every layout, in place, with ``out=``, on a side stream, differentiated forwards
and twice, in float32; each in four other dtypes; each in dry mode, whose bytes are those of real
mode. The differences that remain are one table, `tests/tools/operator_differences.py`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from operator_differences import DIFFERENCES
from operator_sweep import Item, MissingError, Names, items_for, stale, surprises, sweep, with_bytes

from residency import sim

pytestmark = [pytest.mark.sim, pytest.mark.whole, pytest.mark.timeout(1800)]

_DTYPES = ("bfloat16", "int64", "bool", "complex64")
_MODES = ("real", "dry")


def _everything(names: Names) -> list[Item]:
    return [
        *items_for("operator", names["operator"], most_samples=2),
        *(
            Item("real", "operator", name, dtype, ("contiguous",), 2)
            for name in names["operator"]
            for dtype in _DTYPES
        ),
        *items_for("module", names["module"], most_samples=2),
        *items_for("optimizer", names["optimizer"], most_samples=4),
        *(
            Item("real", "optimizer", name, "bfloat16", ("loop", "foreach", "fused"), 4)
            for name in names["optimizer"]
        ),
    ]


def test_every_operator_module_and_optimizer_of_torch_is_the_hosts(tmp_path: Path) -> None:
    sim.enable("1GiB")  # compiled here, and not while a worker is waited for
    try:
        answers = with_bytes(sweep(tmp_path, _everything, [_MODES, _MODES]))
    except MissingError as missing:
        pytest.skip(f"torch's own tables do not import: {missing}")
    counts = Counter((key[0], key[1], answer["status"]) for key, answer in answers.items())
    print(*(f"{'/'.join(key)}: {count}" for key, count in sorted(counts.items())), sep="\n")
    found = [*surprises(answers, DIFFERENCES), *stale(answers, DIFFERENCES)]
    assert not found, "\n".join(found)
