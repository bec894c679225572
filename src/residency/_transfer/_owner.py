"""How a save and a restore reach an optimizer whose state another package keeps on the host.

The packages that move bytes do not know one another: the owner of such a state says here how it
lends its bytes to a save and how it takes a restore's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from residency._transfer._lending import lending


class Lent:
    """Is a state on the host that its owner lends: nobody writes it until it is given back.

    Attributes:
        tensor: The bytes; of a sharded state, the local tensor.
        value: What callers see: the tensor, or a ``DTensor`` around it.
        written: The event after which the bytes are final, or None when they are.
    """

    def __init__(
        self, tensor: Tensor, value: Tensor, written: torch.Event | None, *, keep: bool = False
    ) -> None:
        self.tensor = tensor
        self.value = value
        self.written = written
        self._is_out = True
        lending.lend(tensor, keep=keep)

    def give_back(self) -> None:
        """Ends the loan; from any thread, and again without effect."""
        if self._is_out:
            self._is_out = False
            lending.give_back(self.tensor)


@dataclass(frozen=True, slots=True)
class Incoming:
    """Describes a saved state tensor whose bytes are still to come.

    Attributes:
        dtype: As it was saved.
        shape: The whole tensor's.
        is_host: Whether it was kept on the host between steps.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_host: bool


class Reception(Protocol):
    """Is the place that an optimizer has made for a saved state."""

    @property
    def targets(self) -> Mapping[tuple[Tensor, str], Tensor]:
        """What the bytes go into, by parameter and key."""

    def finish(self, values: Mapping[tuple[Tensor, str], Any], loose: Mapping[Any, Any]) -> None:
        """Makes what was filled the optimizer's state; nothing is left that can fail.

        Args:
            values: By parameter and key, what is no tensor.
            loose: What else the state has, by its keys.
        """


class StateOwner(Protocol):
    """Lends and takes the state of one kind of optimizer."""

    def lend(self, optimizer: Any, *, keep: bool = False) -> Mapping[Any, Mapping[str, Any]]:
        """Returns the state by parameter and key, without a wait; what is on the host is lent.

        Args:
            optimizer: Whose state.
            keep: Whether the loans may last for good: room for a second set is made at once.

        Returns:
            Device tensors and Python values as they are; states at home on the host as ``Lent``,
            each of which the borrower gives back.

        Raises:
            RefusedError: The host has no room for what steps take meanwhile.
        """

    def set_spare(self, optimizer: Any, num_bytes: int | None) -> None:
        """Sets how much host memory steps may take while states are lent, and allocates it.

        Args:
            optimizer: One that is on the host.
            num_bytes: The most bytes beside the homes, of which no more are allocated than the
                state has; a step that needs more waits. None leaves what was set before.

        Raises:
            RefusedError: The host has no room.
        """

    def receive(
        self, optimizer: Any, states: Mapping[Tensor, Mapping[str, Incoming | None]]
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


_owners: dict[type, StateOwner] = {}
_forecasters: list[Callable[[Any], list[Tensor]]] = []
_owned: weakref.WeakSet[Any] = weakref.WeakSet()


def register_owner(kind: type, owner: StateOwner) -> None:
    """Makes ``owner`` speak for the instances of a class."""
    _owners[kind] = owner


def owner_of(optimizer: Any) -> StateOwner | None:
    """Returns who speaks for an optimizer, or None for one that keeps its state itself."""
    return next((owner for kind, owner in _owners.items() if isinstance(optimizer, kind)), None)


def note_owned(optimizer: Any, *, is_owned: bool) -> None:
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


def states_to_come(optimizer: Any) -> list[Tensor]:
    """Returns tensors without bytes, like those that an optimizer's first step will make and a save
    will copy; none where nobody can tell.
    """
    return [like for forecast in _forecasters for like in forecast(optimizer)]
