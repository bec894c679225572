"""The plugin for Axolotl: with Axolotl itself where it is installed, which pins other versions of
its frameworks, and with a stand-in for its published interface where it is not.

With axolotl 0.19.0, transformers 5.16.1, peft 0.20.0, accelerate 1.13.0 and trl 1.9.0 all cases
passed (2026-11-24, ``make test-frameworks``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, judge, run_cases

pytestmark = pytest.mark.whole  # a process that imports Transformers
WORKER = Path(__file__).with_name("axolotl_worker.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases(
        WORKER, tmp_path_factory.mktemp("axolotl"), "transformers", "datasets", "pydantic"
    )


@pytest.mark.parametrize("case", [name for _, name in cases_of(WORKER, {"case"})])
def test_with_axolotl(outcomes: dict[str, str], case: str) -> None:
    judge(outcomes.get(case))


def test_without_axolotl_the_error_gives_the_line_that_installs_it() -> None:
    pytest.importorskip("transformers")
    sys.modules.pop("residency.integrations.axolotl", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "axolotl", None)
        with pytest.raises(ImportError, match=r"run: pip install 'axolotl>=0.19'"):
            import residency.integrations.axolotl  # noqa: F401  # is imported to fail
