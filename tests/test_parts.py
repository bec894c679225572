"""The parts of the second tier: each file is in one of them."""

from pathlib import Path

import pytest
from parts import VARIABLE, is_in_part, part_of_now

FILES = [
    str(path.relative_to(Path(__file__).parent)) for path in Path(__file__).parent.rglob("*.py")
]


@pytest.mark.parametrize("num_parts", [1, 3, 4])
def test_each_file_is_in_one_part_and_none_is_empty(num_parts: int) -> None:
    parts = [[f for f in FILES if is_in_part(f, f"{n}/{num_parts}")] for n in range(num_parts)]
    assert sorted(name for part in parts for name in part) == sorted(FILES)
    assert all(parts)


def test_the_whole_is_no_part() -> None:
    assert all(is_in_part(name, "") for name in FILES)


@pytest.mark.parametrize("part", ["4/4", "1", "a/4", "-1/4", "0/0"])
def test_what_is_no_part_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="is no part"):
        is_in_part("test_units.py", part)


def test_a_run_within_a_test_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1/4")
    assert part_of_now() == ""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert part_of_now() == "1/4"
