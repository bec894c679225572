"""How far a step came that an exception ended, and the note that says so.

A parameter is fully updated, with its state, or unchanged, or, if it is processed in cuts, updated
up to some element. Only if the optimizer's own code failed in the middle, for want of memory for
example, may the parameters of that one part be in between. The count is for the note alone: a retry
has the next batch's gradients, and would step the rest only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from residency._dtensor import local_of
from residency._optim._plan import Piece


class Progress:
    """The part of one step that is done.

    Attributes:
        parameters: Those of the step, in group order.
        begun: Pieces that the optimizer's own step may have changed in part.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._pieces: list[Piece] = []
        self.begun: Sequence[Piece] = ()

    def add(self, pieces: Iterable[Piece]) -> None:
        """Takes note of pieces that are stepped, with their state."""
        self._pieces += pieces  # perhaps twice
        self.begun = ()

    @property
    def _counts(self) -> dict[Tensor, int]:
        return {
            piece.parameter: _size(piece.parameter) if piece.stop is None else piece.stop
            for piece in self._pieces
        }

    def num_elements(self, parameter: Tensor) -> int:
        """Returns how many of a parameter's elements, from its first, are stepped."""
        return self._counts.get(parameter, 0)

    def is_stepped(self, parameter: Tensor) -> bool:
        """Returns whether a parameter is stepped as a whole."""
        return self._counts.get(parameter) == _size(parameter)

    def tell(self, error: BaseException) -> None:
        """Adds a note to the exception that ended the step, and lists of parameters."""
        begun = {id(piece.parameter) for piece in self.begun}
        counts = self._counts
        stepped, in_part = [], []
        for parameter in self.parameters:
            if counts.get(parameter) == _size(parameter) and id(parameter) not in begun:
                stepped.append(parameter)
            elif parameter in counts or id(parameter) in begun:
                in_part.append(parameter)
        lists: Any = error
        lists.stepped_parameters, lists.parameters_in_part = stepped, in_part
        error.add_note(self._note(len(stepped), in_part, begun))

    def _note(self, num_stepped: int, in_part: list[Tensor], begun: set[int]) -> str:
        cuts = [p for p in in_part if id(p) not in begun]
        note = f"residency: {num_stepped} of {len(self.parameters)} parameters were stepped."
        for parameter in cuts:
            note += (
                f" Of one of shape {tuple(parameter.shape)} the first {self._counts[parameter]} of "
                f"{_size(parameter)} elements were."
            )
        if begun:
            note += (
                f" {len(begun)} may be changed in part, as the optimizer's own step failed in the "
                "middle of them."
            )
        return note + " All others, and their state, are as they were."


def _size(parameter: Tensor) -> int:
    return local_of(parameter).numel()
