"""A script that the tests start as a fork runs as one that Python starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import run_ranks


def test_a_script_finds_modules_on_the_path_of_its_own_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):  # the warm process is there before the second folder
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_module.py").write_text(f"VALUE = {name!r}")
        (tmp_path / f"{name}.py").write_text(f"import {name}_module as m; print(m.VALUE)")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / name), prepend=os.pathsep)
        (said,) = run_ranks([[tmp_path / f"{name}.py"]], tmp_path)
        assert said == f"{name}\n"
