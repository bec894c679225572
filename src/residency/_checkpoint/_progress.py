"""The progress bar of a save or a restore that the caller waits for."""

from __future__ import annotations

from residency._checkpoint._save import Save

_REFRESH_SECONDS = 0.1


def show_progress(save: Save, num_bytes: int) -> None:
    """Draws a bar until a save is done, on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"saving step {save.step}", total=num_bytes)
        while not save._done.wait(_REFRESH_SECONDS):
            bar.update(task, completed=save.statistics().written_bytes)
        bar.update(task, completed=save.statistics().written_bytes)
