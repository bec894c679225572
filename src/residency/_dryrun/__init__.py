"""The dry run: a user's own training script on a simulated GPU, for its memory alone.

``residency dry-run`` starts the script in a child process, in which the simulator stands in CUDA's
place and runs kernels for their shapes only. The child (``_child``) keeps books of who holds how
much of the device (``_books``), phase by phase (``_phases``), ends when it has seen enough
(``_stopping``), and leaves what it found in a file; the parent (``_launch``) reads it and answers
(``_answer``). Nothing is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._dryrun._answer import Answer, answer_of, print_answer
    from residency._dryrun._child import start_child
    from residency._dryrun._fit import TriedChange, settings_that_fit
    from residency._dryrun._largest import TriedNumber, largest_seen, largest_that_fits
    from residency._dryrun._launch import Command, NoAnswerError, dry_run
    from residency._dryrun._page import write_page
    from residency._dryrun._settings import RunSettings

__all__ = [
    "Answer",
    "Command",
    "NoAnswerError",
    "RunSettings",
    "TriedChange",
    "TriedNumber",
    "answer_of",
    "dry_run",
    "largest_seen",
    "largest_that_fits",
    "print_answer",
    "settings_that_fit",
    "start_child",
    "write_page",
]

__getattr__ = door(
    __name__,
    {
        "_answer": ["Answer", "answer_of", "print_answer"],
        "_child": ["start_child"],
        "_fit": ["TriedChange", "settings_that_fit"],
        "_largest": ["TriedNumber", "largest_seen", "largest_that_fits"],
        "_launch": ["Command", "NoAnswerError", "dry_run"],
        "_page": ["write_page"],
        "_settings": ["RunSettings"],
    },
)
