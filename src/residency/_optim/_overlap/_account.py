"""The memory of one device: what its run has there by itself, and the state that is beside it.

All optimizers with overlap on a device have one account, one schedule, and one lock, because each
one's state is no memory of the run's, and each one's passes may need the room. They keep one bound
together, which ``tests/optim/test_overlap_together.py`` reads from the allocator's journal.

[Note: whose peak it is] Torch has one register for the peak, of the run and of state together. So
what the run has by itself is known only of a time in which no state comes or goes: the register is
read before a block comes or goes, and reset after it.

[Note: one stream] Everything here is done on the default stream, on which torch's allocator has the
blocks and the step its slots, whatever thread or stream a hook runs on.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from residency import _device
from residency._errors import RaceError
from residency._optim._overlap import _blocks
from residency._optim._overlap._reserve import Reserve
from residency._optim._overlap._schedule import RoomSchedule, Trigger, TriggerKind
from residency._transfer import Mover, on_default_stream

_logger = logging.getLogger("residency")


class Tenant(Protocol):
    """One optimizer's state beside the run, as the account of its device sees it."""

    @property
    def held_bytes(self) -> int:
        """The bytes of its blocks, and of the state that stays."""
        ...

    @property
    def passing_bytes(self) -> int:
        """The bytes of its blocks."""
        ...

    @property
    def oldest(self) -> int | None:
        """The number of the block that it took first; None without any."""

    def drop_oldest(self, mover: Mover) -> None:
        """Gives that block back."""

    def drop_all(self, mover: Mover) -> None:
        """Gives all memory back, when what is newer in it has gone home."""

    def forward_passes(self, mover: Mover) -> None:
        """Takes note that a module begins its forward pass."""

    def evaluation_begins(self, mover: Mover) -> None:
        """Takes note of the first module of an evaluation."""

    def gradient_arrives(self, trigger: Trigger, room: int, mover: Mover) -> None:
        """Takes note of a gradient of its own."""

    def stop(self) -> None:
        """Takes its hooks away."""


class Account:
    """The bytes of a run on a device, and the optimizers whose state is there beside it.

    Attributes:
        lock: Of all that comes and goes; hooks of a backward pass run on a thread of autograd's.
        schedule: The rooms.
        level: What the run had by itself at the newest trigger.
        is_off: Whether an error has ended all overlap on this device.
        numbers: Gives a number to each parameter, optimizer and block.
        reserve: The room for state that stays.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.schedule = RoomSchedule()
        self.level = 0
        self.is_off = False
        self.numbers = itertools.count()
        self._device = device
        self._tenants: list[weakref.ref[Tenant]] = []
        self.reserve = Reserve(device)
        self._is_evaluating = False
        self._own_peak = 0  # since the newest trigger, up to the newest change of blocks

    def join(self, tenant: Tenant) -> None:
        """Adds an optimizer, which is not kept alive."""
        self._tenants = [ref for ref in self._tenants if ref() is not None]
        self._tenants.append(weakref.ref(tenant))

    @property
    def tenants(self) -> list[Tenant]:
        """The optimizers that are alive."""
        return [tenant for ref in self._tenants if (tenant := ref()) is not None]

    @property
    def passing_bytes(self) -> int:
        """The bytes of all blocks, without state that stays."""
        return sum(tenant.passing_bytes for tenant in self.tenants)

    @property
    def staying_bytes(self) -> int:
        """The bytes of state that stays."""
        return sum(tenant.held_bytes - tenant.passing_bytes for tenant in self.tenants)

    def at(self, trigger: Trigger, of: Tenant) -> None:
        """Moves state at a trigger; does nothing while another thread moves some.

        Args:
            trigger: The one that the loop passes.
            of: Whose parameter it is.
        """
        if self.is_off or not self.lock.acquire(blocking=False):
            return
        try:
            if _device.is_capturing(self._device):
                return
            with self.moving() as mover:
                room = self.room_at(trigger)
                self.drop_to(room, mover)
                was_evaluating = self._is_evaluating
                self._is_evaluating = trigger.kind == TriggerKind.OTHER
                if self._is_evaluating and not was_evaluating:
                    for tenant in self.tenants:
                        tenant.evaluation_begins(mover)
                elif trigger.kind == TriggerKind.FORWARD:
                    for tenant in self.tenants:
                        tenant.forward_passes(mover)
                elif trigger.kind == TriggerKind.BACKWARD:
                    of.gradient_arrives(trigger, room, mover)
        except Exception as error:  # a pass of the caller's, which is not to end for this
            if _device.is_lost(error) or isinstance(error, RaceError):
                raise
            self.is_off = True
            for tenant in self.tenants:
                tenant.stop()
            why = f"{type(error).__name__}: {error}"
            _logger.warning("an offloaded step goes on without overlap: %s", why)
        finally:
            self.lock.release()

    def room_at(self, trigger: Trigger) -> int:
        """Returns the room for the blocks of all optimizers from a trigger on."""
        self.level, peak = self._own_level_and_peak()
        self._own_peak = 0
        return self.schedule.at(trigger, self.level, peak)

    def drop_to(self, room: int, mover: Mover) -> None:
        """Gives blocks back, in the order in which they were taken, until the rest has room."""
        while self.passing_bytes > room:
            having = [tenant for tenant in self.tenants if tenant.oldest is not None]
            min(having, key=lambda tenant: tenant.oldest or 0).drop_oldest(mover)

    @contextmanager
    def moving(self) -> Iterator[Mover]:
        """Yields a mover for the default stream, with which blocks may come and go; after an error
        nothing is under way, and all that a step has written is at home. [Note: one stream]
        """
        with self.lock, on_default_stream(self._device):
            mover = Mover(self._device)
            try:
                if self.schedule.is_measuring:
                    self._own_peak = self._own_level_and_peak()[1]
                yield mover
                if self.schedule.is_measuring:
                    _device.reset_peak(self._device)  # [Note: whose peak it is]
            except BaseException:
                mover.settle()
                for tenant in self.tenants:
                    tenant.drop_all(mover)
                mover.settle()
                raise

    def _own_level_and_peak(self) -> tuple[int, int]:
        held = sum(tenant.held_bytes for tenant in self.tenants)
        allocated, peak = _blocks.allocated_and_peak(self._device)
        level = allocated - held
        return level, max(self._own_peak, peak - held if self.schedule.is_measuring else level)


_accounts: weakref.WeakValueDictionary[torch.device, Account] = weakref.WeakValueDictionary()


def account_of(device: torch.device) -> Account:
    """Returns the account of a device, which its optimizers keep alive."""
    account = _accounts.get(device)
    if account is None:
        account = _accounts[device] = Account(device)
    return account
