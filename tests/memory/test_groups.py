"""The lines of a note that name who holds memory."""

from __future__ import annotations

from residency._memory._groups import grouped, holder_lines
from residency.types import Holder

MIB = 1 << 20


def test_a_second_name_follows_an_and_and_what_cpp_holds_is_described() -> None:
    tensor = Holder(num_bytes=2 * MIB, path="a", kind="tensor", others=("b", "c"))
    blocks = Holder(num_bytes=MIB, path="held by C++", kind="c++", others=("2 blocks",))
    assert [line.split() for line in holder_lines(grouped([blocks, tensor]))] == [
        ["the", "largest:"],
        ["2.00", "MiB", "a"],
        ["and", "b"],
        ["1.00", "MiB", "held", "by", "C++"],
        ["2", "blocks"],
    ]
