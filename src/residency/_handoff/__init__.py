"""Makes room on a device: what is not needed goes back, and a device is handed over."""

from residency._handoff._agreement import FAILED as FAILED, agree as agree
from residency._handoff._hand_off import hand_off as hand_off
from residency._handoff._reclaim import Reclaimed as Reclaimed, reclaim as reclaim
from residency._handoff._take_over import TakenOver as TakenOver, take_over as take_over
