"""Values of a save that the classes they are for cannot use: damage, though each can be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from residency import _device
from residency._checkpoint._disk._manifest import MANIFEST
from residency._errors import CorruptSaveError


@contextmanager
def unusable_is_damage(what: str) -> Iterator[None]:
    """Takes what a block raises for damage of the save, but for a lack of memory or a lost device.

    Args:
        what: The sentence that the error begins with, without its end.

    Raises:
        CorruptSaveError: The block raised; the message has its error.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each class raises its own
        if _device.is_lost(error):
            raise
        raise CorruptSaveError(f"{what}: {error!r}.", file=MANIFEST) from error
