"""Buffers for bytes that a read brings and its caller carries on, to a device: each is filled,
emptied and filled again.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Slot:
    """One buffer of a ring.

    Attributes:
        memory: Its bytes.
        tag: What the caller wants to find again with the slot, such as where it begins.
    """

    memory: memoryview
    tag: Any = None


class Ring:
    """The slots that are handed out, each to one user at a time."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slot_bytes = min(slot.memory.nbytes for slot in slots)
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)

    def take(self) -> Slot | None:
        """Waits for a slot; None when the ring is closed."""
        slot = self._free.get()
        if slot is None:
            self._free.put(None)  # for the others that wait
        return slot

    def give_back(self, slot: Slot) -> None:
        """Returns a slot whose bytes have been carried on."""
        self._free.put(slot)

    def close(self) -> None:
        """Wakes all who wait for a slot."""
        self._free.put(None)
