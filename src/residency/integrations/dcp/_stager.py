"""Stages state dicts for ``dcp.async_save`` in page-locked memory that is used again.

Device tensors are copied on the d2h lane behind the gate, homes of an offloaded optimizer are lent,
and everything else is copied at the call. Invariant, which
``tests/integrations/test_dcp_stager.py`` tries to break: a staged tensor has the bytes of the call
until the save that writes it is over; the memory under it serves another save only when no tensor
over it is left.

[Note: when a save is over] Nothing tells a stager. A staged tensor's memory comes back when the
last tensor over it dies; loans, which a step may wait for, end also with the thread that asked for
the staged state, or when that thread asks for another. A planner or an exception's traceback that
is kept so holds memory, and never a step.
"""

from __future__ import annotations

import io
import threading
import weakref
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from residency import _pinned
from residency._checkpoint import spare_bytes
from residency._checkpoint._capture import Capture, Description, Held, capture_described, tree_of
from residency._checkpoint._document import Leaf, tensor_node
from residency._dtensor import local_of
from residency._errors import RefusedError
from residency._optim import lend_homes
from residency._storages import strided_as
from residency._transfer import SlabArena, lending, memory_of, watch_optimizers, written_by_steps
from residency.integrations._common._pickled import Freezer, Thawer

_PATIENCE_SECONDS = 60.0  # ``async_save`` asks at once, in its own thread
_of_thread = threading.local()  # [Note: when a save is over]


class PinnedStager(AsyncStager):
    """A stager for ``dcp.async_save(..., async_stager=stager)`` that lets training go on.

    The call returns when the copies are queued. Training's writes meanwhile wait for them on
    the device: the next step of an optimizer for its own parameters and states, everything else of
    the current stream for the tensors that no optimizer is known to step. State of an offloaded
    optimizer is lent, not copied; its next step writes to a spare. ``async_save`` then returns an
    ``AsyncSaveResponse``; a failure is raised by ``upload_completion.result()``.

    Keep one for all saves, and ``close`` it after the last.

    Args:
        pin: Whether the copies go to page-locked memory; without, they block the host.
        spare: Host memory that steps may take for the state of an offloaded optimizer while a save
            reads it, in bytes or ``"all"``; a step that needs more waits. None leaves it at two
            buckets.

    Memory:
        Device: none. Host: the bytes of the state dict that are not lent (overlapping tensors:
        their common span once), each rounded up to 512, plus the unused end of each slab;
        one set of them, which all saves share: a save waits until the one before is written. A
        planner or an error that is kept keeps its save's set, and the next save makes another.
    """

    def __init__(self, *, pin: bool = True, spare: int | str | None = None) -> None:
        """Begins to watch which tensors optimizers step; allocates nothing yet.

        Raises:
            InvalidArgumentError: ``spare`` does not parse.
        """
        self._spare_bytes = spare_bytes(spare)
        self._pin = pin
        self._arena = self._new_arena()
        self._newest: weakref.ref[_Staged] | None = None
        self._flight: _HandedOut | None = None
        self._is_closed = False
        watch_optimizers()

    def __enter__(self) -> PinnedStager:
        """Returns the stager."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    def _new_arena(self) -> SlabArena:
        return SlabArena(pin=self._pin, reuse=True)

    @property
    def pinned_bytes(self) -> int:
        """The bytes of the slabs, those in use and those that the next save will use."""
        return self._arena.slab_bytes

    def stage(self, state_dict: dict[str, Any], **kwargs: object) -> Future[dict[str, Any]]:
        """Queues the copies; blocks the host only while the save before is being written.

        Args:
            state_dict: Tensors, ``DTensor`` and whatever can be pickled, in any containers.
            kwargs: Not used; torch passes settings of its own stager.

        Returns:
            The result of ``result()``, once the copies are there: the same structure, with host
            tensors that share memory if the given ones did.

        Raises:
            RefusedError: The stager is closed; a tensor has no plain layout of bytes; a value
                cannot be pickled; the host has no room; or the state that was staged before has
                not been asked for in a minute. Nothing is held then.
        """
        if self._is_closed:
            raise RefusedError("this stager is closed. Nothing was saved; make another one.")
        if self._flight is not None:
            self._flight.wait()
        try:
            description, thawer = _described(state_dict, self._spare_bytes)
            captured = capture_described(description, arena=self._arena)
            flight = _HandedOut(captured)
            staged = _Staged(captured, thawer, flight)
            # Held weakly: only who writes it keeps what was staged.
            weakref.finalize(staged, flight.drop_unasked).atexit = False
            self._newest = weakref.ref(staged)
            self._flight = flight
        except BaseException as error:
            if not isinstance(error, RefusedError):
                self._arena = self._new_arena()  # an interrupt may have lost ranges of the other
            raise
        return staged

    def synchronize_staging(self) -> None:
        """Blocks the host until the newest copies are complete; no caller needs to."""
        staged = None if self._newest is None else self._newest()
        if staged is not None:
            staged.wait()

    def close(self) -> None:
        """Gives the slabs back, each when nothing in it is in use; may be called again."""
        self._is_closed = True
        self._flight = None
        self._arena.is_reused = False
        pinned_bytes = self._arena.pinned_bytes
        self._arena.free_all()
        self._arena = SlabArena(pin=False)
        _pinned.give_back_pinned(pinned_bytes)


class _HandedOut:
    """One staged state between its call and the end of its save."""

    def __init__(self, captured: Capture) -> None:
        self._captured = captured  # which owns what is out, to the end
        self._out = {id(held): held for held in captured.held}
        self._lock = threading.RLock()  # a finalizer may run inside
        self._caller = threading.get_ident()
        self._is_own_thread = False
        self._asked = threading.Event()
        self._over = threading.Event()

    def wait(self) -> None:
        """Blocks the host until the save is over.

        Where the caller's own thread has the staged state there is nothing to wait for.
        """
        if not self._asked.wait(_PATIENCE_SECONDS):
            raise RefusedError(
                "the state that was staged before has not been asked for in "
                f"{_PATIENCE_SECONDS:.0f} s. Nothing was staged now; call result() on the value "
                "that stage returned, or drop it."
            )
        if not self._is_own_thread:
            self._over.wait()

    def ask(self) -> None:
        """Notes who has the staged state from now on. [Note: when a save is over]"""
        self._is_own_thread = threading.get_ident() == self._caller
        if self._is_own_thread:  # which waits for itself nowhere
            for held in self._out.values():
                if held.block.lent is not None:
                    lending.make_lasting(held.block.lent.tensor)
        else:
            token = _Token()
            weakref.finalize(token, self.end).atexit = False
            _of_thread.token = token
        self._asked.set()

    def give_back(self, held: Held) -> None:
        """Gives the memory of one block back, or ends its loan; again without effect."""
        with self._lock:
            found = self._out.pop(id(held), None)
        if found is not None:
            found.release()
        if not self._out:
            self._over.set()

    def end(self) -> None:
        """Ends the loans: no thread writes the save any more."""
        with self._lock:
            lent = [held for held in self._out.values() if held.block.lent is not None]
        for held in lent:
            self.give_back(held)
        self._over.set()

    def drop(self) -> None:
        """Gives everything back."""
        self._captured.release()
        self._out.clear()
        self._over.set()

    def drop_unasked(self) -> None:
        """Gives back what was not asked for, and cannot be any more."""
        if not self._asked.is_set():
            self.drop()
            self._asked.set()


class _Token:
    """A token that dies with the thread that has it."""


class _Staged(Future[dict[str, Any]]):
    """The staged state: it is put together by who asks for it first, the writing thread."""

    def __init__(self, captured: Capture, thawer: Thawer, flight: _HandedOut) -> None:
        super().__init__()
        self._capture: Capture | None = captured
        self._thawer = thawer
        self._flight = flight
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Blocks the host until the copies are complete."""
        with self._lock:
            for held in self._capture.held if self._capture is not None else ():
                held.final()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Returns the staged state, once the copies are complete."""
        self._complete()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns what went wrong, or None."""
        self._complete()
        return super().exception(timeout)

    def _complete(self) -> None:
        with self._lock:
            captured, self._capture = self._capture, None
            if captured is None:
                return
            self._flight.ask()
            try:
                spans = {id(held.block): _lasting(held, self._flight) for held in captured.held}
                tensors = tree_of(captured, spans)
                made: dict[str, object] = self._thawer.thaw(tensors)
                captured.description.leaves.clear()  # what the caller drops from now on is free
            except BaseException as error:
                self._flight.drop()
                self.set_exception(error)
                return
        self.set_result(made)


def _lasting(held: Held, flight: _HandedOut) -> Tensor:
    """Returns the final bytes of a block as a storage of their own, with whose end they return."""
    memory = memory_of(held.final())
    if not memory:
        flight.give_back(held)
        return torch.empty(0, dtype=torch.uint8)
    weakref.finalize(memory.obj, flight.give_back, held).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _described(
    state_dict: dict[str, object], spare_bytes: int | None
) -> tuple[Description, Thawer]:
    """Finds the tensors of a state dict; lends those that are homes of an optimizer."""
    file = io.BytesIO()
    freezer = Freezer(file, {})
    try:
        freezer.dump(state_dict)
    except Exception as error:  # whatever a value's own pickling raises
        raise RefusedError(
            f"the state dict has a value that cannot be pickled ({type(error).__name__}: {error})."
            " Nothing was saved; take it out, or give its state_dict()."
        ) from error
    thawer = Thawer(file.getvalue(), freezer.aside)
    names = {name: tensor_node(name) for name in freezer.encoder.leaves}
    description = Description(names, freezer.encoder.leaves)
    try:
        _borrow(description, spare_bytes)
    except BaseException:
        description.loans.end()
        raise
    return description, thawer


def _borrow(description: Description, spare_bytes: int | None) -> None:
    """Notes of each tensor whether it is lent, and whether others than optimizers may change it."""
    found = description.leaves
    of_steps = {_bytes_key(tensor) for tensor in written_by_steps()}
    on_host = [local for leaf in found.values() if (local := local_of(leaf.value)).is_cpu]
    addresses = {local.data_ptr() for local in on_host if local.numel()}
    lent = lend_homes(addresses, description.loans, spare_bytes)
    for name, leaf in found.items():
        local = local_of(leaf.value)
        loan = lent.get(local.data_ptr()) if local.is_cpu else None
        if loan is not None and strided_as(loan.tensor) == strided_as(local):
            del lent[local.data_ptr()]
        else:
            loan = None  # a part of a home, or another tensor over one, is copied
        # The description keeps the loan and not the caller's tensor: a step would wait for a save
        # of whose bytes a caller has a view.
        value = leaf.value if loan is None else loan.value
        found[name] = Leaf(name, value, _bytes_key(local) not in of_steps, loan)


def _bytes_key(tensor: Tensor) -> tuple[torch.device, int]:
    local = local_of(tensor)
    return local.device, local.untyped_storage().data_ptr()
