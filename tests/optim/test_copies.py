"""Values that two trials of a step left are compared by what they are made of."""

from __future__ import annotations

from residency._optim._trial._copies import is_equal


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def up(self) -> float:
        return self.factor

    def down(self) -> float:
        return 1 / self.factor


def test_bound_methods_are_equal_by_their_function_and_by_what_they_are_bound_to() -> None:
    assert is_equal(Scale(2.0).up, Scale(2.0).up)
    assert not is_equal(Scale(2.0).up, Scale(3.0).up)
    assert not is_equal(Scale(2.0).up, Scale(2.0).down)


def test_no_number_is_equal_to_itself_alone() -> None:
    assert is_equal(float("nan"), float("nan"))
    assert not is_equal(float("nan"), 1.0)
    assert not is_equal([1.0, float("nan")], [float("nan"), 1.0])
