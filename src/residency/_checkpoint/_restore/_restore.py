"""Restores a whole state from a save of ours: plan, room, bytes, values, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from residency._checkpoint import _rng
from residency._checkpoint._disk._open_save import StoredSave
from residency._checkpoint._document._encode import check_is_finite
from residency._checkpoint._restore._document import DocumentPlan
from residency._checkpoint._restore._fill import fill, staging_bytes_of
from residency._checkpoint._restore._overlaps import settle_overlaps
from residency._checkpoint._restore._plan import Differences, RestorePlan
from residency._checkpoint._restore._values import SavedValue, unusable_is_damage
from residency._checkpoint._sources._own import saved_for_rank
from residency._checkpoint._sources._source import Source
from residency._errors import RefusedError, warn


def plan_state(
    state: Mapping[str, object],
    save: StoredSave,
    *,
    rank: int = 0,
    world_size: int = 1,
    strict: bool = True,
    staging: int | str = "64MiB",
    eager: bool = False,
    rng: bool = True,
) -> RestorePlan:
    """Plans to fill a state from a save, in place; moves no byte.

    Args:
        state: What to fill, by the names that it was saved under; of what the save has besides,
            nothing is read.
        save: What the disk layer opened.
        rank: This process's.
        world_size: How many ranks restore.
        strict: Whether differences are refused; else they are left out, with a warning.
        staging: The ring's bytes, rounded down to a power of two.
        eager: Whether plain optimizers get their state on the device at once, not at their first
            use.
        rng: Whether the random number generators go back, too, last of all.

    Raises:
        RefusedError: The state does not fit; nothing was changed.
        CorruptSaveError: The save is damaged; nothing was changed.
    """
    staging_bytes = staging_bytes_of(staging)
    check_is_finite(state, done="changed")
    saved = saved_for_rank(save, rank=rank, world_size=world_size)
    plan = RestorePlan(saved, staging_bytes)
    DocumentPlan(plan, state, eager=eager).add(state)
    if rng and _rng.RNG not in state and _rng.is_saved(saved.values.get(_rng.RNG)):
        _plan_generators(plan, saved)
    settled(plan, f"the save {save.folder.name}", strict=strict)
    return plan


def settled(plan: RestorePlan, what: str, *, strict: bool) -> Differences:
    """Refuses a plan that cannot be carried out, and reads the values in it; changes nothing.

    Returns:
        What is left out.

    Raises:
        RefusedError: There are differences, and ``strict`` is set.
        CorruptSaveError: A value makes no sense, or cannot be read.
    """
    try:
        plan.differing += settle_overlaps(plan)
        found = plan.check(what, strict=strict)
        if plan.of_values:
            fill(plan.of_values, checksums=plan.source.checksums, staging_bytes=plan.staging_bytes)
        with torch.no_grad():
            for each in plan.values:
                each.understand(plan.fresh.__getitem__)
            for check in plan.checks:
                check()
    except BaseException:
        plan.clear()  # as in ``carry_out``
        raise
    return found


def carry_out(plan: RestorePlan, on_bytes: Callable[[int], None] | None = None) -> None:
    """Makes room, moves the bytes, and puts values in place.

    Args:
        plan: Is empty afterwards, whatever happened.
        on_bytes: Called with the bytes that were read.

    Raises:
        RefusedError: There is no room, or states of optimizers are not whole; nothing was changed.
        CorruptSaveError: The save is damaged. Tensors may hold its bytes: restore another one.

    Memory:
        On the device the ring at the most, and nothing for optimizer state that is not there
        yet unless ``eager``. On the host the ring and what the optimizer needs to live.
    """
    try:
        _carry_out(plan, on_bytes)
    finally:
        # What puts values in place refers to what planned it, in a circle that holds tensors.
        plan.clear()


def _carry_out(plan: RestorePlan, on_bytes: Callable[[int], None] | None) -> None:
    left_out = plan.differences()
    for make_room in plan.before:
        make_room()
    if plan.differences() != left_out:
        raise RefusedError(
            "the save does not have all of an optimizer's state; nothing was changed. Pass an "
            f"optimizer like the one that was saved.\n{plan.differences()}"
        )
    overlaps = settle_overlaps(plan)
    if overlaps:
        raise RefusedError(
            "the save does not fit the state of an optimizer; nothing was changed. Pass an "
            "optimizer like the one that was saved.\n" + "\n".join(overlaps)
        )
    fill(
        plan.targets,
        checksums=plan.source.checksums,
        staging_bytes=plan.staging_bytes,
        on_bytes=on_bytes,
    )
    try:
        with torch.no_grad():
            for finish in plan.after:
                finish()
    except Exception as error:
        error.add_note(
            "All tensors have the bytes of the save already; of other values some are as before."
        )
        raise


def _plan_generators(plan: RestorePlan, saved: Source) -> None:
    if not saved.is_own_rank:
        warn(
            "the save is of another number of ranks, so the random states are left as they "
            "are: none of them is this rank's.",
        )
        return
    node = saved.values[_rng.RNG]
    for name, size in _rng.sizes(node).items():
        [stored] = plan.source.tensors.get(name, [None])[:1]
        if stored is not None and tuple(stored.shape) != size:
            plan.differing.append(
                f"{name}: saved a state of {tuple(stored.shape)} bytes, here of {size}"
            )
            return
    states = plan.value(node, _rng.RNG, _rng.check)
    plan.after.append(partial(_restore_generators, states, saved.path.name))


def _restore_generators(states: SavedValue, save: str) -> None:
    with unusable_is_damage(f"the random states in {save} are none"):
        _rng.restore(states())
