"""The tool that raises an exception at every line leaves Python itself as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from interruptions import count_lines, interrupted_at

from residency._transfer import _host_memory
from residency._transfer._lending import Lending


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_no_exception_stays_one_that_is_being_handled(error: type[BaseException]) -> None:
    def act() -> None:
        assert _host_memory._text(Path("/no such file")) is None

    num_lines = count_lines(act)
    assert num_lines >= 3
    for line in range(1, num_lines + 1):
        assert interrupted_at(line, act, error)
        assert sys.exc_info() == (None, None, None), line


def test_no_lock_stays_taken_where_a_value_is_returned_from_within_it() -> None:
    tensor, borrower, lending = torch.zeros(1), object(), Lending()
    lending.lend(tensor, borrower)

    def act() -> None:
        assert lending
        assert lending.is_lent(tensor)

    for line in range(1, count_lines(act) + 1):
        assert interrupted_at(line, act, KeyboardInterrupt)
        assert not lending._lock._is_owned(), line
