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
    from residency._dryrun._answer import (
        Answer as Answer,
        answer_of as answer_of,
        print_answer as print_answer,
    )
    from residency._dryrun._child import start_child as start_child
    from residency._dryrun._fit import settings_that_fit as settings_that_fit
    from residency._dryrun._largest import (
        TriedNumber as TriedNumber,
        largest_seen as largest_seen,
        largest_that_fits as largest_that_fits,
    )
    from residency._dryrun._launch import Command as Command, dry_run as dry_run
    from residency._dryrun._page import write_page as write_page
    from residency._dryrun._settings import RunSettings as RunSettings

__getattr__ = door(
    __name__,
    {
        "_answer": ["Answer", "answer_of", "print_answer"],
        "_child": ["start_child"],
        "_fit": ["settings_that_fit"],
        "_largest": ["TriedNumber", "largest_seen", "largest_that_fits"],
        "_launch": ["Command", "dry_run"],
        "_page": ["write_page"],
        "_settings": ["RunSettings"],
    },
)
