"""Errors of files, which name the save and what to do: the code that finds damage sees one file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from residency._errors import CheckpointError, CorruptSaveError

ADVICE = "Restore from another save, or from a whole copy of this one."


def unreadable(path: str | os.PathLike[str], error: OSError, *, at: str = "") -> CheckpointError:
    """Returns the error of a file of a save that the system does not let this process read.

    Args:
        path: The file or the directory.
        error: The error of the system.
        at: Where in the file, in words.
    """
    return CheckpointError(
        f"{os.fspath(path)} could not be read{at}: {error}. Check the path and its permissions, "
        "or restore another step."
    )


@contextmanager
def damage_named(path: Path, *, file: str | None = None, advice: str = ADVICE) -> Iterator[None]:
    """Adds to an error of damage where it is, and what to do, unless a block within has done so.

    Args:
        path: The save's directory, or the only file.
        file: The name, in the directory, of the file that errors mean which name none.
        advice: What to do.
    """
    try:
        yield
    except CorruptSaveError as error:
        if ADVICE in str(error):
            raise
        folder = path if path.is_dir() else path.parent
        error.file = error.file or file or (path.name if folder != path else None)
        message = str(error)
        if error.file is not None and message.startswith(error.file):
            message = f"{folder / message}"
        elif str(folder) not in message:
            message = f"{folder / (error.file or '')}: {message}"
        error.args = (f"{message} {advice}", *error.args[1:])
        raise
