"""Runs made-up test files of another project with the plugin, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from residency_sim import _build

Run = Callable[..., pytest.RunResult]
_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = (str(_ROOT / "src"), str(_ROOT / "sim" / "src"))


@pytest.fixture(scope="session")
def built_extensions() -> str:
    """The cache of this run, read before pytester gives the test another home folder."""
    return str(_build.cache_directory())


@pytest.fixture
def run_tests(
    built_extensions: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs pytest on a test file's source, in a new process; warnings are errors there, too."""
    monkeypatch.setenv("RESIDENCY_CACHE", built_extensions)
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*_SOURCES, path])))
    monkeypatch.delenv("RESIDENCY_TEST_DEVICE", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(source: str, *arguments: str, ini: str = "") -> pytest.RunResult:
        pytester.makeini(f"[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n{ini}")
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess(
            "-p", "residency.testing.plugin", "-p", "no:cacheprovider", *arguments, timeout=300
        )

    return run
