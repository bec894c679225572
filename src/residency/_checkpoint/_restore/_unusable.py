"""Values of a save that the classes they are for cannot use: damage, though each can be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from residency import _device
from residency._checkpoint._disk._manifest import MANIFEST
from residency._errors import CheckpointError, CorruptSaveError, RefusedError


@contextmanager
def unusable_is_damage(what: str) -> Iterator[None]:
    """Takes what a block raises for damage of the save, but for a lack of memory, a lost device,
    what is refused by name and the damage of a file.

    Args:
        what: The sentence that the error begins with, without its end.

    Raises:
        CorruptSaveError: The block raised; the message has its error.
    """
    try:
        yield
    except (MemoryError, OSError, torch.OutOfMemoryError, RefusedError):
        raise
    except CheckpointError as error:
        if not isinstance(error, CorruptSaveError) or error.file is not None:
            raise
        raise CorruptSaveError(f"{what}: {error}", file=MANIFEST, tensor=error.tensor) from error
    except Exception as error:  # each class raises its own
        if _device.is_lost(error):
            raise
        raise CorruptSaveError(f"{what}: {error!r}.", file=MANIFEST) from error
