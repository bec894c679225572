"""Makes room on a device: what is not needed goes back, and a device is handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._handoff._agreement import FAILED, agree
    from residency._handoff._hand_off import hand_off
    from residency._handoff._reclaim import Reclaimed, reclaim
    from residency._handoff._take_over import TakenOver, take_over

__all__ = ["FAILED", "Reclaimed", "TakenOver", "agree", "hand_off", "reclaim", "take_over"]

__getattr__ = door(
    __name__,
    {
        "_agreement": ["FAILED", "agree"],
        "_hand_off": ["hand_off"],
        "_reclaim": ["Reclaimed", "reclaim"],
        "_take_over": ["TakenOver", "take_over"],
    },
)
