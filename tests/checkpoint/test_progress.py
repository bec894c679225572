"""The bar of a save, a restore or a check."""

from __future__ import annotations

import re

import pytest

from residency._checkpoint import progress_bar


def test_sizes_and_rates_of_a_bar_are_in_binary_units(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("saving", 2 << 30, is_shown=True) as advance:
        for _ in range(4):
            advance(1 << 29)
    said = capsys.readouterr().err
    assert "saving" in said
    assert "2.0/2.0 GiB" in said
    assert re.search(r"\d [KMGT]iB/s", said)
    assert not re.search(r"[kMGT]B", said)
