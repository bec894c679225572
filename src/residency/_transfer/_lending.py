"""Host memory that is lent to a save: until it is given back, no step writes into it.

An optimizer whose state lives on the host lends a save the very tensors instead of copies. Code
that would write into one, the next step first of all, asks here and writes elsewhere, or waits. A
loan ends on whatever thread, and at the latest with its borrower or with the memory itself.
Invariant, which ``tests/transfer/test_lending.py`` tries to break: a loan ends once, however often
its end is asked for, and an exception between any two lines here neither loses its end nor ends
another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

from residency._nesting import half_done
from residency._system import in_forked_child


class Lending:
    """The loans of each storage, by who has borrowed it."""

    def __init__(self) -> None:
        self._loans: dict[int, set[object]] = {}
        self._lasting: set[int] = set()
        # Loans end in finalizers, too, at any moment and on any thread: those only append here.
        self._ended: deque[tuple[int, object]] = deque()
        # Not the condition's own `with`, which is Python: an interrupt could leave it locked.
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)

    def __bool__(self) -> bool:
        with self._lock:
            self._collect()
            return any(self._loans.values())

    @half_done("a save or a step")
    def lend(self, tensor: Tensor, borrower: object, *, is_lasting: bool = False) -> None:
        """Begins a loan of a host tensor's storage; the borrower keeps the tensor until it ends.

        Args:
            tensor: Host memory.
            borrower: Stands for the loan; no other loan has it.
            is_lasting: Whether the loan may last for good, so that no step must wait for its end.
        """
        address = tensor.data_ptr()
        if not address:  # it has no bytes
            return
        with self._lock:
            self._collect()  # what ended at this address before is no end of this loan
            if is_lasting:
                self._lasting.add(address)
            self._loans.setdefault(address, set()).add(borrower)

    @half_done("a save or a step")
    def make_lasting(self, tensor: Tensor) -> None:
        """Notes of a loan that it may last for good after all, and ends the waits for its end."""
        with self._lock:
            if tensor.data_ptr() in self._loans:
                self._returned.notify_all()
                self._lasting.add(tensor.data_ptr())

    def give_back(self, tensor: Tensor, borrower: object) -> None:
        """Ends a loan; from any thread, from a finalizer, and again without effect."""
        self._end(tensor.data_ptr(), borrower)

    def end_at(self, address: int) -> None:
        """Ends all loans of memory that is in use no more; may be called from a finalizer."""
        if address in self._loans:
            self._end(address, None)

    def _end(self, address: int, borrower: object) -> None:
        self._ended.append((address, borrower))
        with self._lock:
            self._returned.notify_all()

    @half_done("a save or a step")
    def _collect(self) -> None:
        """Takes out the loans that ended; the caller has the lock."""
        while self._ended:
            address, borrower = self._ended[0]
            left = self._loans.get(address, set())
            if borrower is not None:
                left.discard(borrower)
            if borrower is None or not left:
                self._lasting.discard(address)
                self._loans.pop(address, None)
            self._ended.popleft()  # last: an interrupt before does it again

    def is_lent(self, tensor: Tensor) -> bool:
        """Returns whether a copy reads the tensor's storage."""
        return self.is_any_lent([tensor])

    def is_any_lent(self, tensors: Iterable[Tensor]) -> bool:
        """Returns whether a copy reads the storage of one of these tensors."""
        if not self._loans:
            return False
        with self._lock:
            self._collect()
            return any(map(self._loans.get, map(Tensor.data_ptr, tensors)))

    def has_one_borrower(self, tensor: Tensor) -> bool:
        """Returns whether one loan of the tensor's storage is left, and no other."""
        with self._lock:
            self._collect()
            return len(self._loans.get(tensor.data_ptr(), ())) == 1

    def is_lasting(self, tensor: Tensor) -> bool:
        """Returns whether one of the loans of the tensor's storage may last for good."""
        return self.is_lent(tensor) and tensor.data_ptr() in self._lasting

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Blocks the host until ``is_done``, which is asked again whenever a loan ends."""
        with self._lock:
            self._returned.wait_for(is_done)  # the end of a loan notifies

    def wait_for(self, tensors: Iterable[Tensor]) -> None:
        """Blocks the host until none of these is lent."""
        if self._loans:
            waited = list(tensors)
            self.wait_until(lambda: not any(self.is_lent(tensor) for tensor in waited))


lending = Lending()


def _forget_all() -> None:
    lending.__init__()  # type: ignore[misc]  # all modules have this very object


# The parent's threads, which end loans, are not in a forked process; one may have held the lock.
in_forked_child(_forget_all)
