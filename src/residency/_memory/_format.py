"""What a recording's writer and its readers agree on. No torch here: a report starts without it."""

from __future__ import annotations

FORMAT = "residency-ledger"
VERSION = 1
PEAKS = ("bounds", "exact")  # the first is the default
# By which `residency record` tells the processes of its command what to do.
PATH_VARIABLE = "RESIDENCY_RECORD"
PEAKS_VARIABLE = "RESIDENCY_RECORD_PEAKS"
