"""A change of the library that a test is to see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """A change of the library.

    Attributes:
        module: Whose docstring states the invariant, below ``src/residency``.
        test: What pytest is given: it fails on the change.
        was: What stands once in the changed file.
        now: What takes its place.
        file: The changed file, where that is another one.
    """

    module: str
    test: str
    was: str
    now: str
    file: str = ""

    @property
    def changed(self) -> str:
        """The file that is changed."""
        return self.file or self.module
