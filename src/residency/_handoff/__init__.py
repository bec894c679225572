"""Makes room on a device: what is not needed goes back, owners are parked, a device is handed over.

Nothing here is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residency._handoff._hand_off import hand_off
    from residency._handoff._park import park, unpark
    from residency._handoff._reclaim import Reclaimed, reclaim
    from residency._handoff._take_over import take_over

__all__ = ["Reclaimed", "hand_off", "park", "reclaim", "take_over", "unpark"]

_MODULE_OF = {
    "Reclaimed": "_reclaim",
    "hand_off": "_hand_off",
    "park": "_park",
    "reclaim": "_reclaim",
    "take_over": "_take_over",
    "unpark": "_park",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
