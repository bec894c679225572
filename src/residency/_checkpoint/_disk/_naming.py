"""Has an error of damage say of which save it speaks: what finds damage sees one file, or less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from residency._errors import CorruptSaveError

ADVICE = "Restore from another save, or from a whole copy of this one."


@contextmanager
def damage_named(place: Path, *, file: str | None = None, advice: str = ADVICE) -> Iterator[None]:
    """Adds to an error of damage where it is, and what to do, unless a block within has done so.

    Args:
        place: The save's directory, or the only file.
        file: The name, in the directory, of the file that errors mean which name none.
        advice: What to do.
    """
    try:
        yield
    except CorruptSaveError as error:
        if ADVICE in str(error):
            raise
        folder = place if place.is_dir() else place.parent
        error.file = error.file or file or (place.name if folder != place else None)
        message = str(error)
        if error.file is not None and message.startswith(error.file):
            message = f"{folder / message}"
        elif str(folder) not in message:
            message = f"{folder / (error.file or '')}: {message}"
        error.args = (f"{message} {advice}", *error.args[1:])
        raise
