"""Which parameters have their state on the device, and the one bound on the bytes of it.

Invariant, which ``tests/optim/test_bounds.py`` tries to break: the bytes that are allowed add up to
at most the budget, at every moment; code that puts a state onto the device to stay asks here first.
Parameters are known by ``id``: a weak reference would keep ``torch.utils.swap_tensors`` from moving
a ``DTensor`` model, and a strong one would keep a replaced parameter's memory. A parameter that
died is forgotten when the next plan is made; one at its address meanwhile inherits no more than the
right to these bytes.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor


class Residents:
    """The parameters whose state stays on the device, with the bytes that each may have there."""

    def __init__(self, budget_bytes: int = 0) -> None:
        self._budget_bytes = budget_bytes
        self._allowed: dict[int, int] = {}

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._allowed

    def __len__(self) -> int:
        return len(self._allowed)

    def has(self, owner: int) -> bool:
        """Returns whether the parameter with this ``id`` is one of them."""
        return owner in self._allowed

    def allow(self, parameter: Tensor, num_bytes: int) -> bool:
        """Sets what a parameter's state may take, and returns True, where the budget has room."""
        return self.allow_owner(id(parameter), num_bytes)

    def allow_owner(self, owner: int, num_bytes: int) -> bool:
        """Does what ``allow`` does, for the parameter with this ``id``."""
        others = sum(n for other, n in self._allowed.items() if other != owner)
        if others + num_bytes > self._budget_bytes:
            return False
        self._allowed[owner] = num_bytes
        return True

    def become(self, others: Residents) -> None:
        """Takes over what others were allowed."""
        self._allowed = others._allowed

    def revoke(self, owner: int) -> None:
        """Makes the state of the parameter with this ``id`` one that streams."""
        self._allowed.pop(owner, None)

    def forget_others(self, owners: Collection[int]) -> None:
        """Forgets the parameters with other ``id`` than these."""
        self._allowed = {owner: n for owner, n in self._allowed.items() if owner in owners}
