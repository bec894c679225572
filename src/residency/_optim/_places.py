"""Where the values of a state live between steps: the rule, and the bound on the bytes that stay on
the device.

Each way in asks here before a byte moves: an offload, a load and a restore of a whole state, by
``Offload.places_of``; an assignment of one value; a step, and ``prime``, of a state to come.
Invariant, which ``tests/optim/test_bounds.py`` tries to break: the bytes that are allowed add up to
at most the budget, at every moment; code that puts a state onto the device to stay asks here first.
Parameters are known by ``id``: a weak reference would keep ``torch.utils.swap_tensors`` from moving
a ``DTensor`` model, and a strong one would keep a replaced parameter's memory. A parameter that
died is forgotten when the next plan is made; one at its address meanwhile inherits no more than the
right to these bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from torch import Tensor

from residency._optim._trial._first_step import Schema, planned_bytes


class StatePlace(enum.Enum):
    """The place of one value between steps."""

    HOST = "the host, where steps use it"
    HOME = "a home, from which steps bring it to the device"
    DEVICE = "the device"


def needs_device(
    key: str,
    value: Tensor,
    before: tuple[int, bool] | None,
    *,
    parameter: Tensor | None = None,
    schema: Schema | None = None,
) -> bool:
    """Returns whether steps see a value on the device.

    Where a scalar lives decides in which arithmetic it advances. Torch's own loading puts NAdam's
    ``mu_product`` on the device and ASGD's ``step`` on the host, unlike their first steps, and a
    run resumed there ends at other bits than an uninterrupted one. A plain optimizer's restore
    knows neither schema nor state: ``tests/optim/test_where_states_live.py`` compares the two.

    Args:
        key: The value's name.
        value: May be anywhere, with a parameter; one that is assigned shows where it belongs.
        before: Dimensions of the tensor that the state has there, and whether steps saw that one on
            the device.
        parameter: Whose state it is; None for one that is assigned.
        schema: What a first step makes; None where it is not known, as in an assignment.

    Source: ``_init_group`` of each class; ``Optimizer._process_value_according_to_param_policy``.
    """
    if schema is not None and key not in schema.unseen:
        made = schema.values.get(key)
        is_of_host = isinstance(made, Tensor) and made.is_cpu
        return key in schema.device or (value.dim() > 0 and not is_of_host)
    if before is not None:
        # Loops that move a whole state to the device and back move the host's scalars, too.
        are_scalars = before[0] == value.dim() == 0
        if parameter is not None or value.is_cpu or are_scalars:
            return before[1]
    if value.dim() > 0:
        return True
    return not value.is_cpu if parameter is None else parameter.dim() == 0 and key != "step"


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

    def allow(self, owner: int, values: Iterable[Tensor]) -> bool:
        """Makes these all that the parameter with this ``id`` may have on the device, and returns
        True, if the budget has room.
        """
        others = sum(n for other, n in self._allowed.items() if other != owner)
        num_bytes = sum(map(planned_bytes, values))
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
