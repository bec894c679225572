"""The progress bar of a save or a restore that the caller waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from residency._checkpoint._save import Save

_REFRESH_SECONDS = 0.1


@contextmanager
def progress_bar(what: str, num_bytes: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Draws a bar on standard error, and yields what to call with the bytes of each advance."""
    if not is_shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda advance: bar.update(task, advance=advance)


def follow(save: Save, advance: Callable[[int], None]) -> None:
    """Reports the bytes that a save writes, until it is done."""
    reported = 0
    while True:
        is_done = save._done.wait(_REFRESH_SECONDS)
        written = save.statistics().written_bytes
        advance(written - reported)
        reported = written
        if is_done:
            return
