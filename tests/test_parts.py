"""The parts of the second tier: each file is in one of them."""

from pathlib import Path

import pytest
from parts import is_in_part

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
