"""The bar of a save, a restore or a check."""

from __future__ import annotations

import re
import types

import pytest

from residency._checkpoint import progress_bar
from residency._checkpoint._once import Once
from residency._checkpoint._progress import follow
from residency._checkpoint._save import PUBLISHED


def test_sizes_and_rates_of_a_bar_are_in_binary_units(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("saving", 2 << 30, is_shown=True) as advance:
        for _ in range(4):
            advance(1 << 29)
    said = capsys.readouterr().err
    assert "saving" in said
    assert "2.0/2.0 GiB" in said
    assert re.search(r"\d [KMGT]iB/s", said)
    assert not re.search(r"[kMGT]B", said)


def test_a_bar_that_is_not_to_be_shown_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("saving", 8, is_shown=False) as advance:
        advance(8)
    assert capsys.readouterr().err == ""


def test_a_bar_follows_a_save_to_its_end_and_no_further() -> None:
    written, save = iter([3, 5, 8]), types.SimpleNamespace(_outcome=Once())

    def statistics() -> types.SimpleNamespace:
        count = next(written)  # a fourth look is an error
        if count == 5:
            save._outcome.set(PUBLISHED)
        return types.SimpleNamespace(written_bytes=count)

    save.statistics = statistics
    advances: list[int] = []
    follow(save, advances.append)
    assert advances == [3, 2, 3]
