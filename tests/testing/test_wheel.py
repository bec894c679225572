"""The built wheels, installed elsewhere, bring the plugin and the simulator's sources, or the
simulator compiled.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
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
def test_the_wheels_bring_the_plugin_to_another_project(
    run_tests, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    _pip("wheel", ROOT, ROOT / "sim", "--no-build-isolation", "--wheel-dir", wheels)
    _pip("install", *sorted(wheels.glob("*.whl")), "--target", site)
    monkeypatch.setenv("PYTHONPATH", str(site))  # before an editable install of this tree
    pytester.makepyfile(
        f"""
        import residency, residency_sim, torch

        def test_it(sim_device):
            assert residency.__file__.startswith({str(site)!r})
            assert residency_sim.__file__.startswith({str(site)!r})
            assert torch.ones(3, device=sim_device).sum() == 3
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=300)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["plugins:*residency-*"])
    assert "building the simulated accelerator" not in result.stdout.str()  # the very same sources


def _built_wheel(project: Path, folder: Path) -> zipfile.ZipFile:
    # In a process of its own: hatchling keeps the hooks that it has imported.
    build = "import sys; from hatchling.builders.wheel import WheelBuilder as Builder; "
    build += "print(*Builder(sys.argv[1]).build(directory=sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-c", build, project, folder], capture_output=True, text=True, check=True
    )
    return zipfile.ZipFile(done.stdout.strip())


def test_compiled_simulators_go_into_the_wheel_where_a_folder_of_them_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RESIDENCY_PREBUILT", raising=False)
    with _built_wheel(ROOT / "sim", tmp_path) as wheel:
        assert wheel.filename is not None
        assert wheel.filename.endswith("-none-any.whl")
        assert not [name for name in wheel.namelist() if name.endswith(".so")]
    library = tmp_path / "prebuilt" / "core-0123" / "core.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"compiled")
    monkeypatch.setenv("RESIDENCY_PREBUILT", str(tmp_path / "prebuilt"))
    with _built_wheel(ROOT / "sim", tmp_path) as wheel:
        assert wheel.filename is not None
        assert "-none-any" not in wheel.filename
        assert wheel.read("residency_sim/prebuilt/core-0123/core.so") == b"compiled"


def test_the_library_has_no_sources_of_the_simulator(tmp_path: Path) -> None:
    with _built_wheel(ROOT, tmp_path) as wheel:
        names = wheel.namelist()
        assert {Path(name).suffix for name in names} == {".py", ".typed", ".txt", ""}
        assert not [name for name in names if name.startswith("residency_sim/")]
