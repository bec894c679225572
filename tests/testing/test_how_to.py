"""The how-to page's example finds its two bugs, in the words that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sim, pytest.mark.whole]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "test-memory-in-ci.md"


def test_the_page_holds_a_budget_and_finds_two_bugs_and_passes_without_them(
    run_tests, pytester: pytest.Pytester
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, flags=re.DOTALL)
    names = ["test_budget.py", "snapshots.py", "test_snapshots.py", "snapshots.py"]
    assert [name for name, _ in files] == names
    budget, wrong, source, right = (text for _, text in files)
    peaks, output = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)

    more = budget.replace("_step_fits", "_step_with_a_copy_of_the_state_does_not_fit") + (
        "    copy = [v.clone() for s in optimizer.state.values() for v in s.values()]\n"
        "    optimizer.step()\n"
    )
    result = run_tests(budget + more, "-rA")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*torch.OutOfMemoryError: sim out of memory.*"])
    result.stdout.fnmatch_lines([*peaks.strip().splitlines()])

    pytester.path.joinpath("snapshots.py").write_text(wrong, encoding="utf-8")
    result = run_tests(source)
    result.assert_outcomes(failed=4)
    said = [re.sub(r"\s+", " ", line) for line in result.stdout.lines]
    for shown in output.splitlines():
        pattern = ".*".join(re.escape(re.sub(r"\s+", " ", part)) for part in shown.split("..."))
        assert any(re.fullmatch(pattern, line) for line in said), (shown, said)

    pytester.path.joinpath("snapshots.py").write_text(right, encoding="utf-8")
    run_tests(source).assert_outcomes(passed=4)
