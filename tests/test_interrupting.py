"""The tool that raises an exception at every line leaves Python itself as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from interruptions import count_lines, interrupted_at

from residency._transfer import _host_memory


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_no_exception_stays_one_that_is_being_handled(error: type[BaseException]) -> None:
    def act() -> None:
        assert _host_memory._text(Path("/no such file")) is None

    num_lines = count_lines(act)
    assert num_lines >= 3
    for line in range(1, num_lines + 1):
        assert interrupted_at(line, act, error)
        assert sys.exc_info() == (None, None, None), line
