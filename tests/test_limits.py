"""Tests wait for other processes as long as the session's limit lets them."""

from __future__ import annotations

import limits
import pytest


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(300, 280), (1200.0, 1180), (10, 5), (0, 3600), (None, 3600)]
)
def test_a_wait_ends_before_the_test_does(timeout: float | None, seconds: float) -> None:
    assert limits.worker_seconds(timeout) == seconds


def test_the_wait_of_this_session_follows_its_limit(pytestconfig: pytest.Config) -> None:
    timeout = pytestconfig.getoption("timeout", None)
    assert limits.worker_seconds(timeout) == limits.WORKER_SECONDS
