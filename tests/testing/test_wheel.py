"""The built wheel, installed elsewhere, brings the plugin and the simulator's sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim

ROOT = Path(__file__).resolve().parents[2]


def _pip(*arguments: object) -> None:
    offline = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
    done = subprocess.run(
        [*offline, *map(str, arguments), "--no-deps", "--no-index"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.whole
def test_the_wheel_brings_the_plugin_to_another_project(
    run_tests, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    _pip("wheel", ROOT, "--no-build-isolation", "--wheel-dir", wheels)
    (wheel,) = wheels.glob("residency-*.whl")
    _pip("install", wheel, "--target", site)
    monkeypatch.setenv("PYTHONPATH", str(site))  # before an editable install of this tree
    pytester.makepyfile(
        f"""
        import residency, torch

        def test_it(sim_device):
            assert residency.__file__.startswith({str(site)!r})
            assert torch.ones(3, device=sim_device).sum() == 3
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=300)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["plugins:*residency-*"])
    assert "building the simulated accelerator" not in result.stdout.str()  # the very same sources
