"""States that share bytes with one another: which of them come apart, and which are refused.

A state moves by itself, and an assignment gives the value and ties nothing. A class may give
several parameters one tensor that it only reads, as bitsandbytes does with its maps: each gets a
copy, as when the class makes them at its first step. Everything else that shares bytes is refused.
Invariant, which ``tests/optim/test_shared_states.py`` tries to break: no two entries of a streamed
state share a byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from torch import Tensor

from residency._dtensor import local_of
from residency._errors import RefusedError
from residency._storages import sharing, span_of, strided_as

_Owner = TypeVar("_Owner")


def repeated(
    values: Mapping[tuple[_Owner, str], Tensor], consequence: str
) -> set[tuple[_Owner, str]]:
    """Returns which states are a tensor that an earlier one is, too.

    Args:
        values: The states by parameter and key.
        consequence: What did not happen, for the error.

    Raises:
        RefusedError: States share bytes and are not one tensor.
    """
    keys, local = list(values), [local_of(value).detach() for value in values.values()]
    found: set[tuple[_Owner, str]] = set()
    for group in sharing(local):
        if len({(span_of(local[index]), *strided_as(local[index])) for index in group}) > 1:
            raise RefusedError(
                f"states {sorted({str(keys[index][1]) for index in group})} share a part of their "
                f"bytes, and each of them moves by itself. {consequence}: put a copy of each into "
                "the state (`tensor.clone()`)."
            )
        found.update(keys[index] for index in group[1:])
    return found


def require_own_mappings(states: Collection[Mapping[str, Any]], consequence: str) -> None:
    """Requires that no two parameters have one mapping as their state.

    Args:
        states: The state of each.
        consequence: What did not happen, for the error.

    Raises:
        RefusedError: Two have.
    """
    if len(set(map(id, states))) < len(states):
        raise RefusedError(
            "two parameters have one mapping as their state in optimizer.state, and each state "
            f"moves by itself. {consequence}: give one of them a copy, "
            "`optimizer.state[p] = dict(optimizer.state[q])`."
        )


def refuse_replaced(key: str) -> None:
    """Refuses to go on with a state whose shown tensor a caller has given other memory."""
    raise RefusedError(
        f"the tensor that optimizer.state gave for {key!r} was put over other memory (`.data =`, "
        "`set_`, `share_memory_`), and the state did not follow it. Nothing was changed: assign "
        "the tensor to its key in optimizer.state, which copies the values."
    )
