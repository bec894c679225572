"""The second tier in parts: a run in CI has time for one of them, which its tree of files draws.

Each file of tests is in one part, by its name, so that a file that is added moves no other.
"""

from __future__ import annotations

import os
import zlib

VARIABLE = "TEST_PART"  # "2/4" is the third of four; empty, all


def is_in_part(name: str, part: str) -> bool:
    """Returns whether a file of tests is in a part.

    Args:
        name: The file's name, from the folder of tests on.
        part: The number of the part, from 0, and of how many: ``"2/4"``; ``""`` is the whole.

    Raises:
        ValueError: ``part`` is neither.
    """
    if not part:
        return True
    number, _, of = part.partition("/")
    if not number.isdecimal() or not of.isdecimal() or int(number) >= int(of):
        raise ValueError(f"{VARIABLE}={part} is no part: write 0/4, 1/4, 2/4 or 3/4, or nothing.")
    return zlib.crc32(name.encode()) % int(of) == int(number)


def part_of_now() -> str:
    """Returns the part that the environment asks for: of a run that a test starts, the whole."""
    is_within_a_test = "PYTEST_CURRENT_TEST" in os.environ
    return "" if is_within_a_test else os.environ.get(VARIABLE, "")
