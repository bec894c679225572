"""An open file that cannot get lost: it is closed when it is let go of, whatever came between."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress

# With this, a pipe in the place of a file is opened at once and reads as an empty file; without it,
# `open` would wait for a writer, without end.
_O_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)


class Descriptor:
    """An open file or directory; system calls take it in the place of its number.

    Python takes a signal between any two of its own instructions, and none within a call of C. So
    the number passes from the system to this object, and from it to the system, within one such
    call: an interrupt finds the file open and owned, or closed
    (``tests/checkpoint/disk/test_descriptors.py`` tries to break it).

    Args:
        path: Of the file.
        flags: As for ``os.open``. Where another program is executed, the file is closed.
    """

    _numbers: list[int] = []  # noqa: RUF012 - where an interrupt came before `__init__`

    def __init__(self, path: str | os.PathLike[str], flags: int) -> None:
        self._numbers = []
        self._numbers.extend(map(os.open, (path,), (flags | _O_NONBLOCK,), (0o666,)))

    def fileno(self) -> int:
        """Returns the number.

        Raises:
            ValueError: The file is closed.
        """
        if not self._numbers:
            raise ValueError("this file is closed")
        return self._numbers[0]

    __index__ = fileno

    def __str__(self) -> str:
        return str(self._numbers[0]) if self._numbers else "closed"

    def close(self) -> None:
        """Closes the file; again, does nothing."""
        if self._numbers:
            deque(map(os.close, map(list.pop, (self._numbers,))), maxlen=0)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # modules are empty then, and the system closes it
            with suppress(OSError):
                self.close()
