"""cuDNN's workspaces: what convolutions would take on a card of plenty, beside what a run needs.

[Note: two figures] A convolution takes its workspace if the card has the room, and does without or
with a smaller one if not. So the verdict and the peaks are those of a run without any, and what a
card of plenty shows is apart: the same allocations once more, with an estimate of each workspace
among them. How large it is follows from the shapes (torch_convolutions.cpp in the simulator). With
``torch.backends.cudnn.benchmark`` each new shape is tried once, with larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from residency._units import format_bytes

_OF_LAYOUT, _OF_TRIAL = 2, 3  # as `Journal::Note` in the simulator counts them
_REASONS = {_OF_LAYOUT: "layout", _OF_TRIAL: "benchmark"}


class Card(Protocol):
    """A card of plenty, which reads a journal."""

    def read(self, journal: bytes) -> None:
        """Does what the journal says, after what an earlier one said."""

    def peaks(self) -> tuple[int, int, int, int, int]:
        """Returns the most bytes held and reserved, the last workspace that raised one of them,
        which is why it was taken and its bytes (0 for none), and how many were of trials.
        """
        ...


class Workspaces:
    """The workspaces of a process."""

    def __init__(self, card: Card, without_trials: Card) -> None:
        """Begins with two empty cards.

        Args:
            card: Takes every workspace.
            without_trials: Takes those alone that are not of a plan that is tried once.
        """
        self._card = card
        self._without_trials = without_trials

    def read(self, journal: bytes) -> None:
        """Takes in what the device did."""
        self._card.read(journal)
        self._without_trials.read(journal)

    def found(self) -> dict[str, object]:
        """Returns the peaks of a card of plenty, or None if no workspace raises them, and whether
        plans were tried.
        """
        allocated, reserved, note, num_bytes, num_trials = self._card.peaks()
        peaks = {
            "peak_allocated": allocated,
            "peak_reserved": reserved,
            "peak_reserved_without_benchmark": self._without_trials.peaks()[1],
            "largest": num_bytes,
            "reason": _REASONS.get(note, "kernels"),
        }
        return {"workspaces": peaks if num_bytes else None, "tries_plans": num_trials > 0}


def most_of_workspaces(found: Mapping[str, Any], peak_reserved: int) -> int:
    """Returns by how many bytes workspaces may raise the peak of a run."""
    workspaces = found["workspaces"]
    return max(0, workspaces["peak_reserved"] - peak_reserved) if workspaces else 0


def lines_of_workspaces(found: Mapping[str, Any], peak_reserved: int) -> Iterator[str]:
    """Yields what cuDNN may take beside the peak, and what makes it less."""
    more, workspaces = most_of_workspaces(found, peak_reserved), found["workspaces"]
    if more:
        yield (
            f"the script needs no more. cuDNN may take up to {format_bytes(more)} more for speed "
            "if the card has them, and goes on without if not: an estimate by an H100's plans"
        )
    largest = format_bytes(workspaces["largest"]) if more else ""
    if more and workspaces["reason"] == "layout":
        yield (
            f"  the largest, {largest}, is for copies in another layout: with model and inputs in "
            "it, .to(memory_format=torch.channels_last), none are made"
        )
    if more and workspaces["reason"] == "benchmark":
        less = max(0, workspaces["peak_reserved_without_benchmark"] - peak_reserved)
        yield (
            f"  the largest, {largest}, is for torch.backends.cudnn.benchmark, which tries every "
            f"plan once for each new shape of inputs; without it the most is {format_bytes(less)}"
        )
    elif found["tries_plans"]:
        yield (
            "the script sets torch.backends.cudnn.benchmark, which tries plans with large "
            "workspaces: " + ("that is in this" if more else "they do not raise the peak")
        )
