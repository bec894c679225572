"""Restores a whole state from a save of ours: plan, room, bytes, values, in this order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from residency._checkpoint import _rng
from residency._checkpoint._restore._document import DocumentPlan
from residency._checkpoint._restore._fill import fill, staging_bytes_of
from residency._checkpoint._restore._plan import Differences, Plan
from residency._checkpoint._restore._saves import StoredSave, saved_for_rank
from residency._errors import RefusedError

RNG = "rng"  # the top-level name that is not the caller's


def restore_state(
    state: Mapping[str, Any],
    save: StoredSave,
    *,
    rank: int = 0,
    world_size: int = 1,
    strict: bool = True,
    staging: int | str = "64MiB",
    eager: bool = False,
    rng: bool = True,
    on_bytes: Callable[[int], None] | None = None,
) -> Differences:
    """Fills a state from a save, in place.

    Args:
        state: What to fill, by the names that it was saved under; of what the save has besides,
            nothing is read.
        save: What the disk layer opened.
        rank: This process's.
        world_size: How many ranks restore.
        strict: Whether differences are refused; else they are left out, with a warning.
        staging: The ring's bytes, rounded down to a power of two.
        eager: Whether plain optimizers get their state on the device at once, not at their first
            step.
        rng: Whether the random number generators go back, too, last of all.
        on_bytes: Called with the bytes that were read.

    Returns:
        What was left out.

    Raises:
        RefusedError: The state does not fit, or there is no room; nothing was changed.
        CorruptSaveError: The save is damaged. Tensors may hold its bytes: restore another one.

    Memory:
        On the device the ring at the most, and nothing for optimizer state that is not there yet
        unless ``eager``. On the host the ring and what the optimizer needs to live.
    """
    staging_bytes = staging_bytes_of(staging)
    saved = saved_for_rank(save, rank=rank, world_size=world_size)
    plan = Plan(saved.tensors, saved.checksums)
    document = DocumentPlan(plan, saved, state, eager=eager, staging_bytes=staging_bytes)
    document.add(state)
    if rng and RNG in saved.tree and RNG not in state:
        if saved.is_own_rank:
            plan.after.append(_rng_setter(document.value(saved.tree[RNG])))
        else:
            warnings.warn(
                "the save is of another number of ranks, so the random states are left as they "
                "are: none of them is this rank's.",
                stacklevel=2,
            )
    found = plan.check(f"the save {save.folder.name}", strict=strict)
    carry_out(plan, staging_bytes=staging_bytes, on_bytes=on_bytes)
    return found


def carry_out(
    plan: Plan, *, staging_bytes: int, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Makes room, moves the bytes, and puts values in place.

    Raises:
        RefusedError: There is no room, or states of optimizers are not whole; nothing was changed.
    """
    try:
        _carry_out(plan, staging_bytes, on_bytes)
    finally:
        # What puts values in place refers to what planned it, in a circle that holds tensors.
        plan.clear()


def _carry_out(plan: Plan, staging_bytes: int, on_bytes: Callable[[int], None] | None) -> None:
    left_out = plan.differences()
    for make_room in plan.before:
        make_room()
    if plan.differences() != left_out:
        raise RefusedError(
            f"the save does not have all of an optimizer's state; nothing was changed.\n"
            f"{plan.differences()}"
        )
    fill(
        plan.assignments.values(),
        checksums=plan.checksums,
        staging_bytes=staging_bytes,
        on_bytes=on_bytes,
    )
    with torch.no_grad():
        for finish in plan.after:
            finish()


def _rng_setter(thunk: Callable[[], Any]) -> Callable[[], None]:
    return lambda: _rng.restore(thunk())
