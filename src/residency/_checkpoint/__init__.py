"""Saves of a training state: what they hold, how they are written, and how they are read back.

Read ``_checkpointer`` first, then ``_tree`` (what a state is), ``_blocks`` (which bytes it has),
``_capture`` (how they are taken beside training), and ``_disk`` (files, without torch).

[Note: lazy] Nothing here is imported before it is asked for: ``_disk`` must start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residency._checkpoint._checkpointer import Checkpointer
    from residency._checkpoint._disk._publish import Retention
    from residency._checkpoint._restore._load_into import load_into
    from residency._checkpoint._save import Save, SaveStatistics
    from residency._checkpoint._snapshot import Snapshot, snapshot

__all__ = [
    "Checkpointer",
    "Retention",
    "Save",
    "SaveStatistics",
    "Snapshot",
    "load_into",
    "snapshot",
]

_MODULE_OF = {
    "Checkpointer": "_checkpointer",
    "Retention": "_disk._publish",
    "Save": "_save",
    "SaveStatistics": "_save",
    "Snapshot": "_snapshot",
    "load_into": "_restore._load_into",
    "snapshot": "_snapshot",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
