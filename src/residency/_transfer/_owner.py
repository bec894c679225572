"""How a save and a restore reach an optimizer whose state another package keeps on the host.

The packages that move bytes do not know one another: the owner of such a state says here how it
lends its bytes to a save and how it takes a restore's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from residency._dtensor import remade, write_count
from residency._errors import RefusedError
from residency._registries import WeakRegistry
from residency._transfer._lending import lending
from residency._transfer._slab import Region


class Lent:
    """A state on the host that its owner lends: no step writes it until it is given back.

    Made by ``Loans``. A loan without a reference ends by itself.

    Attributes:
        tensor: The bytes; of a sharded state, the local tensor.
        value: What callers see: the tensor, or a ``DTensor`` around it.
        written: The event after which the bytes are final, or None when they are.
        region: The range of a slab that the bytes are, where the owner says so.
        num_writes: Returns a number that grows when a caller writes into the bytes, where the owner
            has other tensors over them.
        own_bytes: Returns the final bytes in memory that the borrower alone has; None of one who
            reads and no more.
    """

    _is_over = True  # of one that an interrupt left half made, which lends nothing

    def __init__(
        self,
        tensor: Tensor,
        value: Tensor,
        written: torch.Event | None,
        num_writes: Callable[[], int] | None = None,
    ) -> None:
        self.region: Region | None = None
        self.own_bytes: Callable[[Tensor], Tensor] | None = None
        self.tensor = tensor
        self.value = value
        self.written = written
        self._borrower = object()
        self._num_writes = num_writes or partial(write_count, tensor)
        self._num_before = self._num_writes()
        self._made: tuple[Tensor, bool] | None = None
        self._is_over = False

    def is_written(self) -> bool:
        """Returns whether a caller has written into it in place since the loan began; not through
        ``.data``. To be asked after the bytes were read, and before the loan ends.
        """
        return self._num_writes() > self._num_before

    def begin(self, *, is_lasting: bool) -> None:
        """Begins the loan; see ``Lending.lend``."""
        lending.lend(self.tensor, self._borrower, is_lasting=is_lasting)

    def give_back(self) -> None:
        """Ends the loan; from any thread, and again without effect."""
        if not self._is_over:
            lending.give_back(self.tensor, self._borrower)
            self._is_over = True  # last: an interrupt before ends it again, without effect

    def for_good(self, final: Tensor) -> Tensor:
        """Returns the final bytes in memory that the borrower alone has. Where that is the memory
        which was lent, the loan lasts as long as it does.

        Raises:
            RefusedError: Others still have them, and the host no room for a copy.
        """
        if self._made is None:  # else an interrupt came after it
            made = final if self.own_bytes is None else self.own_bytes(final)
            self._made = made, made is final
        made, is_final = self._made
        if is_final:
            self._is_over = True
        else:
            self.give_back()
        return made

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # modules are empty then
            self.give_back()


class Loans:
    """The loans that were taken together; they end together, at the latest."""

    def __init__(self) -> None:
        self._all: list[Lent] = []

    def lend(
        self,
        tensor: Tensor,
        value: Tensor,
        written: torch.Event | None,
        *,
        is_lasting: bool = False,
        num_writes: Callable[[], int] | None = None,
    ) -> Lent:
        """Begins a loan, of which these know before it begins.

        Args:
            tensor: The bytes; of a sharded state, the local tensor.
            value: What callers see: the tensor, or a ``DTensor`` around it.
            written: The event after which the bytes are final, or None when they are.
            is_lasting: Whether the loan may last for good, so that no step must wait for its end.
            num_writes: See ``Lent``.
        """
        lent = Lent(tensor, value, written, num_writes)
        self._all.append(lent)
        lent.begin(is_lasting=is_lasting)
        return lent

    def __iter__(self) -> Iterator[Lent]:
        return iter(self._all)

    def end(self, *, but: Collection[Lent] = ()) -> None:
        """Ends all loans except these, and forgets them, with the memory; again without effect.

        Args:
            but: Loans whose borrower goes on reading.
        """
        exempt = set(but)
        for lent in self._all:
            if lent not in exempt:
                lent.give_back()
        self._all = [lent for lent in self._all if lent in exempt]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A saved state tensor whose bytes are still to come.

    Attributes:
        dtype: As it was saved.
        shape: The whole tensor's.
        is_host: Whether it was kept on the host between steps.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_host: bool

    def like(self, parameter: Tensor, device: torch.device) -> Tensor:
        """Makes an unfilled state: of its parameter's shape, the shard that the parameter is."""
        if self.shape != tuple(parameter.shape) or not self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        form = torch.preserve_format
        like = partial(torch.empty_like, dtype=self.dtype, device=device, memory_format=form)
        return remade(parameter, like)


class Reception(Protocol):
    """The place that an optimizer has made for a saved state."""

    @property
    def targets(self) -> Mapping[tuple[Tensor, str], Tensor]:
        """What the bytes go into, by parameter and key."""
        ...

    def finish(
        self, values: Mapping[tuple[Tensor, str], object], by_other_key: Mapping[object, object]
    ) -> None:
        """Makes what was filled the optimizer's state; nothing is left that can fail.

        Args:
            values: By parameter and key, what is no tensor.
            by_other_key: What else the state has, by its keys.
        """


class StateOwner(Protocol):
    """An owner of the state of one kind of optimizer, who lends it and takes it."""

    def lend(
        self, optimizer: object, loans: Loans, *, is_lasting: bool = False, is_watched: bool = False
    ) -> Mapping[Any, Mapping[str, Any]]:
        """Returns the state by parameter and key, without a wait; what is on the host is lent.

        Args:
            optimizer: Whose state.
            loans: Who has borrowed it: all loans are among these.
            is_lasting: Whether the loans may last for good: room for a second set is made at once.
            is_watched: Whether the borrower asks the loans for writes of callers, who may hold what
                is lent, and only reads; else a copy of it is lent for good.

        Returns:
            Device tensors and Python values as they are; states at home on the host as ``Lent``.

        Raises:
            RefusedError: The host has no room for what steps take meanwhile.
        """
        ...

    def set_spare(self, optimizer: object, num_bytes: int | None) -> None:
        """Sets how much host memory steps may take while states are lent, and allocates it.

        Args:
            optimizer: One that is on the host.
            num_bytes: The most bytes beside the homes, of which no more are allocated than the
                state has; a step that needs more waits. None leaves what was set before.

        Raises:
            RefusedError: The host has no room.
        """

    def staying(self, optimizer: object) -> Mapping[str, Tensor]:
        """Returns the states that stay on the device between steps, by their sites."""
        ...

    def receive(
        self, optimizer: object, states: Mapping[Tensor, Mapping[str, Incoming | None]]
    ) -> Reception | None:
        """Makes room for a saved state, without a change to the state there is.

        Args:
            optimizer: Whose state it is to be.
            states: By parameter and key, in the saved order; None stands for what is no tensor.

        Returns:
            None where this optimizer keeps its state as any other does.

        Raises:
            RefusedError: A state does not fit, or the host has no room.
        """

    def bring_home(self, optimizer: object) -> None:
        """Gives back the device memory of state that is there between two steps; the host does not
        wait.
        """


class Visitor(Protocol):
    """A thing whose bytes live on the host and are on the device for a while."""

    def drop_all(self) -> None:
        """Gives the device's memory back, behind all that reads it."""


_owners: dict[type, StateOwner] = {}
_forecasters: list[Callable[[Any], list[Tensor]]] = []
_owned: WeakRegistry[Any] = WeakRegistry()
_visitors: WeakRegistry[Visitor] = WeakRegistry()


def register_owner(kind: type, owner: StateOwner) -> None:
    """Makes ``owner`` speak for the instances of a class."""
    _owners[kind] = owner


def owner_of(optimizer: object) -> StateOwner | None:
    """Returns who speaks for an optimizer, or None for one that keeps its state itself."""
    return next((owner for kind, owner in _owners.items() if isinstance(optimizer, kind)), None)


def note_visitor(visitor: Visitor) -> None:
    """Adds a visitor, for its life, to those whose device memory ``bring_all_home`` gives back."""
    _visitors.add(visitor)


def bring_all_home() -> None:
    """Gives back the device memory of all owned state that is there between two steps, and of
    visitors.
    """
    for visitor in _visitors:
        visitor.drop_all()
    for optimizer in owned_optimizers():
        owner = owner_of(optimizer)
        if owner is not None:
            owner.bring_home(optimizer)


def refuse_hidden_state(optimizer: torch.optim.Optimizer, remedy: str) -> None:
    """Refuses an optimizer that hides its state and what it steps, as torchao's CPUOffloadOptimizer
    does, which steps copies of the parameters on the host.

    Raises:
        RefusedError: It has no ``state``, which ``Optimizer.__init__`` makes.
    """
    if not (hasattr(type(optimizer), "state") or hasattr(optimizer, "state")):
        raise RefusedError(
            f"this {type(optimizer).__name__} has no attribute state: it keeps its state by "
            f"itself, and may step copies of the parameters. Nothing was changed; {remedy}."
        )


def defining_class(kind: type, name: str) -> type:
    """Returns the class that a method comes from, those left out that keep an optimizer's state
    elsewhere: they hand on what the optimizer's own class does.
    """
    return next(each for each in kind.__mro__ if name in vars(each) and each not in _owners)


def note_owned(optimizer: object, *, is_owned: bool) -> None:
    """Takes an optimizer among those of ``owned_optimizers``, or out of them."""
    (_owned.add if is_owned else _owned.discard)(optimizer)


def owned_optimizers() -> list[Any]:
    """Returns every living optimizer whose state another package keeps on the host, for who sees
    the tensors of a state and not the optimizer.
    """
    return list(_owned)


def register_forecast(forecast: Callable[[Any], list[Tensor]]) -> None:
    """Makes ``forecast`` the one that ``states_to_come`` asks."""
    _forecasters[:] = [forecast]


def states_to_come(optimizer: object) -> list[Tensor]:
    """Returns tensors without bytes, like those that an optimizer's first step will make and a save
    will copy; none where that cannot be foreseen.
    """
    return [like for forecast in _forecasters for like in forecast(optimizer)]
