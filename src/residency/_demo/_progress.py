"""The progress bars: one a run, on stderr, so that stdout holds nothing but the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

Show = Callable[[str, str, int, int], None]
"""Is called with a run's label, the phase that begins, its step (0 before the first) and the last
step.
"""


@contextmanager
def show_progress() -> Iterator[Show]:
    """Shows a bar per run while the block runs; on a stream that is no terminal, a line as each run
    begins.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[phase]}"),
    )
    tasks: dict[str, TaskID] = {}
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def show(label: str, phase: str, step: int, num_steps: int) -> None:
            for other, task in tasks.items():
                if other != label and progress.tasks[task].stop_time is None:
                    progress.stop_task(task)
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=num_steps, phase=phase)
                if not console.is_terminal:
                    print(f"residency: {label}: {phase}", file=sys.stderr, flush=True)
            completed = num_steps if phase == "eval" else max(0, step - 1)
            progress.update(tasks[label], total=num_steps, completed=completed, phase=phase)

        yield show
