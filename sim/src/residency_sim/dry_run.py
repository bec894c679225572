"""The doors of ``residency dry-run``: what it asks of the enabled device, and what the device asks
of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from residency_sim._backend import core, has_compiled

__all__ = [
    "attach_decider",
    "attach_guess_observer",
    "attach_observer",
    "blas_workspaces",
    "cards_of_plenty",
    "has_compiled",
    "has_context",
    "is_in_bad_fork",
    "keep_journal",
    "set_num_devices",
    "take_journal",
]


def keep_journal() -> None:
    """Lets the allocator note each block that it hands out or takes back, from now on."""
    core().keep_journal(True)


def take_journal() -> bytes:
    """Returns the journal since the last call, in the order of ``Journal::Entry``."""
    journal: bytes = core().take_journal()
    return journal


def cards_of_plenty() -> tuple[Any, Any]:
    """Returns two cards that read journals and have room for each of cuDNN's workspaces: one that
    takes them all, and one that takes none of those in which a plan is tried once.
    """
    return core().Plenty(True), core().Plenty(False)


def attach_observer(observer: Callable[[int, int, int, int], None]) -> None:
    """Calls a function whenever memory runs out.

    Args:
        observer: Takes the device's index and bytes: those asked for, allowed, and free.
    """
    core().attach_observer(observer)


def attach_guess_observer(observer: Callable[[str, int], None] | None) -> None:
    """Calls a function whenever a value is guessed that was not computed; None ends that.

    Args:
        observer: Takes the kind of guess, and of how many elements.
    """
    core().attach_guess_observer(observer)


def attach_decider(decide: Callable[[str, float], float | None]) -> None:
    """Asks a function whenever a program reads a value that was not computed.

    Args:
        decide: Takes what stands for the value, and its number; returns another, or None.
    """
    core().attach_decider(decide)


def has_context(index: int) -> bool:
    """Returns whether this process has used a device."""
    return bool(core().has_context(index))


def is_in_bad_fork() -> bool:
    """Returns whether this process was forked from one that had used the device."""
    return bool(core().is_in_bad_fork())


def blas_workspaces() -> list[int]:
    """Returns the addresses of the workspaces that matrix products keep."""
    addresses: list[int] = core().blas_workspaces()
    return addresses


def set_num_devices(count: int) -> None:
    """Says anew how many devices there are, while no program has used one."""
    core().set_num_devices(count)
