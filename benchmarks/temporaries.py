"""Prints which operations the simulator charges temporaries for, with the source of each rule.

``python -m benchmarks.temporaries`` prints the page ``docs/reference/temporaries.md``, and with
``--write`` writes it: the table is the simulator's own (``scratch_table`` in torch_scratch.h).
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from residency_sim._build import load_extension

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "temporaries.md"
HEAD = """# Operations with temporaries

The simulator charges these operations for memory beside their results: for as long as CUDA's
kernel holds it, in the order in which the kernel asks. Each rule was read in the source that its
row names, below `aten/src/ATen/native` in torch unless another library is named. The last column
has the versions of torch between which the rule was read or held against a card; some files were
read in copies that are near these versions, not exactly theirs. Other versions use the same rule,
unconfirmed. [The page of the simulator](simulated-accelerator.md#scratch-of-libraries-and-kernels)
says which memory is charged beside it, which is left out, and how near the rules are to an H100.

| operations (`aten::`) | what | source | torch |
|---|---|---|---|
"""
FOOT = """
`python -m benchmarks.temporaries --write` writes this page from the simulator's table.
"""


def page() -> str:
    """Returns the page, a row for the operations of one source."""
    rules = load_extension().scratch_rules()
    rows = [_row(list(group)) for _, group in groupby(rules, key=_of_one_row)]
    return HEAD + "".join(rows) + FOOT


def _of_one_row(rule: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(value for key, value in rule.items() if key != "operation")


def _row(rules: list[dict[str, Any]]) -> str:
    names = ", ".join(f"`{rule['operation'].removeprefix('aten::')}`" for rule in rules)
    rule = rules[0]
    kinds = {
        "temporaries": rule["takes_temporaries"] and not rule["orders_results"],
        "temporaries, some before the results": rule["takes_temporaries"]
        and rule["orders_results"],
        "a storage larger than the result": rule["keeps_storage"],
    }
    what = [kind for kind, holds in kinds.items() if holds]
    what += [f"measured, in no source: {rule['measured']}"] * bool(rule["measured"])
    versions = rule["first_torch"]
    if rule["last_torch"] != versions:
        versions += f" to {rule['last_torch']}"
    source = ", ".join(f"`{part}`" for part in rule["source"].split("; "))
    return (
        f"| {names} | {'; '.join(what) or 'results in another order'} | {source} | {versions} |\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8") if "--write" in sys.argv else print(page(), end="")
