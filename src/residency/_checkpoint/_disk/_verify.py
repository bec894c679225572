"""Reads a save and compares every byte's checksum with what was written.

Memory: one buffer of 4 MiB on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from residency._checkpoint._disk._check import Damage, FileCheck, damage_of
from residency._checkpoint._disk._manifest import MANIFEST
from residency._checkpoint._disk._open_save import read_manifest
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._disk._system import SYSTEM, System
from residency._errors import CheckpointError

__all__ = ["Damage", "Verification", "verify_save"]


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of reading one save.

    Attributes:
        step: The training step.
        num_bytes: What was read of its files.
        damages: What is not as it was written; empty for a whole save.
    """

    step: int
    num_bytes: int
    damages: tuple[Damage, ...]


def verify_save(
    directory: CheckpointDirectory,
    step: int,
    *,
    system: System = SYSTEM,
    on_bytes: Callable[[int], None] | None = None,
) -> Verification:
    """Reads everything that a save holds, and returns what of it is damaged.

    Args:
        directory: Where the save is.
        step: Its step.
        system: Makes the system calls.
        on_bytes: Is called with each number of bytes read.

    Raises:
        CheckpointError: There is no such save.
    """
    folder = directory.folder(step)
    try:
        manifest = read_manifest(folder, step, system=system)
    except CheckpointError as error:
        return Verification(step, 0, (damage_of(error, MANIFEST),))
    damages: list[Damage] = []
    num_bytes = 0
    for rank in manifest.ranks:
        for name, record in rank.files.items():
            check = FileCheck(system, folder, name, record, on_bytes)
            damages += check.damages()
            num_bytes += check.num_bytes
    return Verification(step, num_bytes, tuple(damages))
