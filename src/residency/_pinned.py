"""Page-locked host memory: allocated for copies that do not wait, and given back.

Up to 64 MiB it is torch's, which keeps what is freed for reuse. More of it is mapped here for
CUDA, in large pages that several threads touch first, and registered with the driver as one range:
torch's own way, one thread and small pages, takes 2.3 GB/s on an H200, and this one 18 GB/s.
Invariant, which ``tests/transfer/test_page_locking.py`` tries to break: memory is registered from
the moment at which it is handed out until no copy uses it and no tensor over it is left.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from residency import _device
from residency._modes import callers_modes_off
from residency._system import in_forked_child, num_processors
from residency._threads import begin
from residency._units import MIB, format_bytes, parse_bytes

_log = logging.getLogger("residency")
_LARGE_PAGE = 2 * MIB
PAGE = parse_bytes("4KiB")
_LEAST_MAPPED_BYTES = 128 * MIB  # less is torch's, which has it at once when it is asked again
_MOST_THREADS = 12  # more were not tried
# Of the pages that one call touches: more would be shared among torch's own threads.
_TOUCHED_AT_ONCE = 128 * MIB
_MOST_LEFT_PINNED_BYTES = 64 * MIB


class _Mapping:
    """A range of host memory that is page-locked here.

    Attributes:
        num_bytes: Its size.
        process: Whose registration it is.
    """

    __slots__ = ("_address", "_memory", "_offset", "num_bytes", "process")

    def __init__(self, memory: mmap.mmap, num_bytes: int) -> None:
        whole = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._offset = -ctypes.addressof(whole) % _LARGE_PAGE
        self._address = ctypes.addressof(whole) + self._offset
        self._memory, self.num_bytes, self.process = memory, num_bytes, os.getpid()

    def lock(self) -> bool:
        """Page-locks the range; returns whether the driver did so."""
        return _device.register_host(self._address, self.num_bytes)

    def data(self, *, then: Callable[[_Mapping], None] | None = None) -> Tensor:
        """Returns the range as bytes.

        Args:
            then: Called with this, from a finalizer, once nothing has these bytes.
        """
        buffer = (ctypes.c_char * self.num_bytes).from_buffer(self._memory, self._offset)
        if then is not None:  # on the buffer: at the mapping's own end the range is gone already
            weakref.finalize(buffer, then, self).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def unlock(self) -> None:
        """Gives the range back to the system; no copy uses it."""
        if self.process == os.getpid():  # a forked child has neither the range nor its lock
            _device.unregister_host(self._address)
        self._memory.close()


class _Left:
    """The ranges over which no tensor is left, until they are handed out again or given back.

    They come from finalizers, at any moment and on any thread, which only append; the lock is of
    those who take them.
    """

    ranges: ClassVar[deque[_Mapping]] = deque()
    lock: ClassVar[Any] = threading.RLock()


def _forget_lock() -> None:
    _Left.lock = threading.RLock()


in_forked_child(_forget_lock)  # a thread of the parent's may have held it
_waits: dict[torch.device, Callable[[], None]] = {}


def wait_by(waits: Mapping[torch.device, Callable[[], None]]) -> None:
    """Takes what waits for copies, which may use a range over which no tensor is left.

    Args:
        waits: For each accelerator, blocks until all copies that this library has queued there have
            ended.
    """
    _waits.clear()
    _waits.update(waits)


def _wait_for_copies() -> None:
    for wait in list(_waits.values()):
        wait()


def allocate_pinned(num_bytes: int) -> Tensor:
    """Allocates host bytes, page-locked where there is an accelerator.

    Memory:
        Torch rounds a page-locked allocation up to a power of two; ask for powers of two.

    Returns:
        An uninitialised ``uint8`` tensor of shape ``[num_bytes]`` on the host.
    """
    with callers_modes_off():
        device = _device.accelerator()
        if device is not None and device.type == "cuda" and num_bytes >= _LEAST_MAPPED_BYTES:
            if (data := _left_over(num_bytes)) is not None:
                return data
            if (data := _mapped(num_bytes)) is not None:
                return data
        return _device.unfilled_bytes(num_bytes, torch.device("cpu"), pin=device is not None)


def _mapped(num_bytes: int) -> Tensor | None:
    """Maps and registers memory; None where the system or the driver does not."""
    try:
        memory = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a child has no use of what is registered
        try:
            memory.madvise(getattr(mmap, advice))
        except (AttributeError, OSError):  # a system without it goes on with small pages
            continue
    mapping = _Mapping(memory, num_bytes)
    if not _device.is_dry():
        _touch(mapping.data())
    if not mapping.lock():
        _log.warning(
            "residency: the driver did not page-lock %s in large pages; torch does it, more slowly",
            format_bytes(num_bytes),
        )
        return None
    return mapping.data(then=_Left.ranges.append)


def _left_over(num_bytes: int) -> Tensor | None:
    """Returns a range of this size over which nothing was left; gives back those of other sizes."""
    with _Left.lock:
        for mapping in list(_Left.ranges):
            if mapping.num_bytes == num_bytes and mapping.process == os.getpid():
                _wait_for_copies()
                _Left.ranges.remove(mapping)
                return mapping.data(then=_Left.ranges.append)
        _unlock_left()
    return None


def _touch(data: Tensor) -> None:
    """Touches a byte of each page, so that the system finds them now, in several threads."""
    num_threads = max(1, min(_MOST_THREADS, num_processors()))
    parts = data.chunk(num_threads)
    threads = [
        threading.Thread(target=_touch_part, args=(part,), name="residency-pages", daemon=True)
        for part in parts[1:]
    ]
    begun = begin(threads)
    for part in (parts[0], *parts[begun + 1 :]):
        _touch_part(part)
    for thread in threads[:begun]:
        thread.join()


def _touch_part(part: Tensor) -> None:
    for start in range(0, part.numel(), _TOUCHED_AT_ONCE):
        part[start : start + _TOUCHED_AT_ONCE : PAGE].zero_()


def _unlock_left() -> None:
    """Gives the ranges over which nothing is left back to the system."""
    with _Left.lock:
        found = list(_Left.ranges)
        # A forked child, which is no process of the device's, has nothing to wait for.
        if any(mapping.process == os.getpid() for mapping in found):
            _wait_for_copies()
        for mapping in found:
            mapping.unlock()
            _Left.ranges.remove(mapping)


def release_pinned_cache() -> None:
    """Gives freed page-locked memory back to the system instead of keeping it for reuse.

    Waits for the device first: a freed block that a copy may still use is not free yet.
    """
    if not _device.used_accelerators():
        return
    _device.synchronize()  # a block that a copy may still use is not free yet
    _unlock_left()
    _empty_host_cache()


def give_back_pinned(num_bytes: int) -> None:
    """Gives page-locked memory that the caller has just freed back to the system.

    Torch keeps what one caller frees for the next that asks, and can only give back all of it. So
    up to 64 MiB, as much as a restore moves through, stay there for the next one; only for more do
    others, a ``DataLoader`` that pins, lose theirs. Memory of torch's that a caller still copies
    stays, too.

    Args:
        num_bytes: What was freed; no copy of it is under way.
    """
    _unlock_left()
    if num_bytes > _MOST_LEFT_PINNED_BYTES and _device.accelerator() is not None:
        _empty_host_cache()


def _empty_host_cache() -> None:
    release = getattr(torch.accelerator, "empty_host_cache", None)
    if release is None:  # before torch 2.12; only builds for an accelerator have it
        release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
