"""Host memory that is lent to a save: until it is given back, nobody writes into it.

An optimizer whose state lives on the host lends a save the very tensors instead of copies. Whoever
would write into one, the next step first of all, asks here and writes elsewhere, or waits. A loan
ends on whatever thread, and at the latest with the memory itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

from torch import Tensor


class Lending:
    """Counts the loans of each storage."""

    def __init__(self) -> None:
        self._loans: dict[int, int] = {}
        self._kept: set[int] = set()
        self._returned = threading.Condition()

    def __bool__(self) -> bool:
        return bool(self._loans)

    def lend(self, tensor: Tensor, *, keep: bool = False) -> None:
        """Begins a loan of a host tensor's storage; the borrower keeps the tensor until it ends.

        Args:
            tensor: Host memory.
            keep: Whether the loan may last for good, so that nobody must wait for its end.
        """
        key = tensor.data_ptr()
        if not key:  # it has no bytes
            return
        with self._returned:
            self._loans[key] = self._loans.get(key, 0) + 1
            if keep:
                self._kept.add(key)

    def keep(self, tensor: Tensor) -> None:
        """Says of a loan that it may last for good after all; who waits for its end need not."""
        with self._returned:
            if tensor.data_ptr() in self._loans:
                self._kept.add(tensor.data_ptr())
                self._returned.notify_all()

    def give_back(self, tensor: Tensor) -> None:
        """Ends a loan; may be called from any thread."""
        with self._returned:
            left = self._loans.get(tensor.data_ptr(), 0) - 1
            if left > 0:
                self._loans[tensor.data_ptr()] = left
            else:
                self._forget(tensor.data_ptr())
            self._returned.notify_all()

    def end_at(self, address: int) -> None:
        """Ends all loans of memory that is in use no more; may be called from a finalizer."""
        if address in self._loans:
            with self._returned:
                self._forget(address)
                self._returned.notify_all()

    def _forget(self, address: int) -> None:
        self._loans.pop(address, None)
        self._kept.discard(address)

    def is_lent(self, tensor: Tensor) -> bool:
        """Says whether somebody reads the tensor's storage."""
        return bool(self._loans) and tensor.data_ptr() in self._loans

    def is_kept(self, tensor: Tensor) -> bool:
        """Says whether one of the loans of the tensor's storage may last for good."""
        return tensor.data_ptr() in self._kept

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Blocks the host until ``is_done``, which is asked again whenever a loan ends."""
        with self._returned:
            self._returned.wait_for(is_done)

    def wait_for(self, tensors: Iterable[Tensor]) -> None:
        """Blocks the host until none of these is lent."""
        if self._loans:
            waited = list(tensors)
            self.wait_until(lambda: not any(self.is_lent(tensor) for tensor in waited))


lending = Lending()


def _forget_all() -> None:
    lending.__init__()  # type: ignore[misc]  # everybody has this very object


# The parent's threads, which end loans, are not in a forked process; one may have held the lock.
os.register_at_fork(after_in_child=_forget_all)
