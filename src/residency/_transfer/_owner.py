"""How a save and a restore reach an optimizer whose state another package keeps on the host.

The packages that move bytes do not know one another: the owner of such a state says here how it
lends its bytes to a save and how it takes a restore's.
"""

from __future__ import annotations

from typing import Any, Protocol


class StateOwner(Protocol):
    """Lends and takes the state of one kind of optimizer."""


_owners: dict[type, StateOwner] = {}


def register_owner(kind: type, owner: StateOwner) -> None:
    """Makes ``owner`` speak for the instances of a class."""
    _owners[kind] = owner


def owner_of(optimizer: Any) -> StateOwner | None:
    """Returns who speaks for an optimizer, or None for one that keeps its state itself."""
    return next((owner for kind, owner in _owners.items() if isinstance(optimizer, kind)), None)
