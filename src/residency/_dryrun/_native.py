"""Compiled libraries of packages, which a dry run calls without effect.

bitsandbytes allocates what its CUDA kernels write in Python, and hands them addresses. So its own
code runs as it does on a GPU, block for block, and the calls into its library do nothing.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from types import ModuleType

from residency._memory import ImportWatch

_LOGGER = "bitsandbytes.cextension"  # of the module, too; it logs that the library is not there


def leave_out_kernels() -> None:
    """Makes the library of bitsandbytes one without effect, once it is imported."""
    logging.getLogger(_LOGGER).disabled = True
    ImportWatch({_LOGGER: _replace_library}).start()


class NoLibrary:
    """A library with each function that is asked for, all of which do nothing.

    Attributes:
        compiled_with_cuda: What bitsandbytes asks.
    """

    compiled_with_cuda = True

    def __init__(self) -> None:
        self._managed: list[mmap.mmap] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: 0

    def __getitem__(self, name: str) -> Callable[..., int]:
        found: Callable[..., int] = getattr(self, name)
        return found

    def cget_managed_ptr(self, num_bytes: ctypes.c_size_t) -> int:
        """Returns the address of memory that paged optimizers have from the driver.

        It is none of torch's, and leaves the device where others need the room.
        """
        self._managed.append(mmap.mmap(-1, max(1, num_bytes.value)))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._managed[-1]))


def _replace_library(module: ModuleType) -> None:
    logging.getLogger(_LOGGER).disabled = False
    module.__dict__["lib"] = NoLibrary()
