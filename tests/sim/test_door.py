"""``residency.sim`` is the door to ``residency_sim``, and says so where that is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import residency_sim
from residency import sim
from residency.sim import compat as compat_by_door
from residency_sim import compat

pytestmark = pytest.mark.sim

PROGRAM = Path(__file__).parents[1] / "tools" / "library_alone.py"
MISSING = "The simulated accelerator is not installed. Install it: pip install 'residency[sim]'\n"
# A finder before all others, for which the package is nowhere.
HIDDEN = """
import runpy, sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name == "residency_sim":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nowhere())
from residency import *
"""


def _without_simulator(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDDEN + program], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("name", residency_sim.__all__)
def test_the_door_gives_the_simulators_own_objects(name: str) -> None:
    assert getattr(sim, name) is getattr(residency_sim, name)


def test_the_door_has_the_same_names() -> None:
    assert sim.__all__ == residency_sim.__all__
    assert compat_by_door.__all__ == compat.__all__
    assert all(vars(compat_by_door)[name] is vars(compat)[name] for name in compat.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sim.nothing


def test_the_library_alone_saves_and_restores_and_says_what_to_install() -> None:
    done = _without_simulator(f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')")
    assert (done.returncode, done.stdout) == (0, 2 * MISSING), done.stderr


def test_a_dry_run_without_the_simulator_says_what_to_install() -> None:
    words = ["dry-run", "--capacity=1GiB", "--", "python"]
    done = _without_simulator(f"from residency._cli import main; sys.exit(main({words}))")
    assert (done.returncode, done.stderr) == (2, f"residency: {MISSING}"), done.stdout


def test_the_library_knows_a_simulator_that_was_enabled_past_the_door() -> None:
    program = (
        "import sys, residency_sim\n"
        "residency_sim.enable('64MiB')\n"
        "from residency import _device\n"
        "print(_device.is_simulated(), 'residency.sim' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
