"""The last error that the script has caught, in words: it may have ended the training.

Each ``except`` of the script's code says so here first (``_rewriting``). Words alone are kept, as
an error keeps the tensors of the frames that it went through.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import sys

from residency._dryrun._places import place_of


class Caught:
    """The last error of the process that was caught.

    Attributes:
        last: Its class, its first line and the script's line that it comes from; "" for none.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self.last = ""

    def caught(self) -> None:
        """Notes the error that is being handled."""
        kind, error, trace = sys.exc_info()
        if kind is None:
            return
        try:
            lines = str(error).strip().splitlines()
        except Exception:  # a class's own, of the script
            lines = []
        place = place_of(trace)
        self.last = ": ".join([kind.__name__, *lines[:1]]) + f" ({place})" * bool(place)


caught = Caught()
