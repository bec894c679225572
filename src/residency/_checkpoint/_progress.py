"""The progress bar of a save, a restore or a check that the caller waits for. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from residency._units import format_figure

if TYPE_CHECKING:
    from rich.progress import Task

    from residency._checkpoint._save import Save

_REFRESH_SECONDS = 0.1


@contextmanager
def progress_bar(
    what: str, num_bytes: int | Callable[[], int], *, is_shown: bool
) -> Iterator[Callable[[int], None]]:
    """Draws a bar on standard error, and yields what to call with the bytes of each advance.

    Args:
        what: The text before it.
        num_bytes: The total, or what says it at each advance, where it is not yet known.
        is_shown: Whether there is a bar at all.
    """
    if not is_shown:
        yield lambda _: None
        return
    from rich import console, progress, text

    class RateColumn(progress.ProgressColumn):
        """The rate in binary units; rich's own column has decimal ones."""

        def render(self, task: Task) -> text.Text:
            return text.Text(_rate_of(task), style="progress.data.speed")

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        RateColumn(),
    )
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        total = num_bytes if callable(num_bytes) else lambda: num_bytes
        task = bar.add_task(what, total=total())
        yield lambda advance: bar.update(task, advance=advance, total=total())


def _rate_of(task: Task) -> str:
    return format_figure("bytes_per_second", task.finished_speed or task.speed)


def follow(save: Save, advance: Callable[[int], None]) -> None:
    """Reports the bytes that a save writes, until it is done."""
    reported = 0
    while True:
        is_done = save._outcome.wait(_REFRESH_SECONDS) is not None
        written = save.statistics().written_bytes
        advance(written - reported)
        reported = written
        if is_done:
            return
