"""Makes room on a device: what is not needed goes back, and a device is handed over.

Nothing is imported before it is asked for: ``_peer`` starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._handoff._agreement import FAILED as FAILED, agree as agree
    from residency._handoff._hand_off import hand_off as hand_off
    from residency._handoff._reclaim import Reclaimed as Reclaimed, reclaim as reclaim
    from residency._handoff._take_over import TakenOver as TakenOver, take_over as take_over

__getattr__ = door(
    __name__,
    {
        "_agreement": ["FAILED", "agree"],
        "_hand_off": ["hand_off"],
        "_reclaim": ["Reclaimed", "reclaim"],
        "_take_over": ["TakenOver", "take_over"],
    },
)
