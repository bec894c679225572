"""Puts compiled simulators into the wheel, where ``RESIDENCY_PREBUILT`` names a folder of them.

That folder is a cache as `residency.sim.build` fills it. Without it the wheel is pure Python, and
the simulator is compiled at its first use.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PLACE = "residency_sim/prebuilt"


class Prebuilt(BuildHookInterface[Any]):
    """The hook that hatchling runs before it makes a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries, and makes the wheel one of this Python and this machine."""
        given = os.environ.get("RESIDENCY_PREBUILT")
        if not given or version == "editable":
            return
        libraries = sorted(Path(given).glob("*/*.so"))
        if not libraries:
            raise FileNotFoundError(
                f"RESIDENCY_PREBUILT is {given!r}, and holds no compiled simulator. Build one with "
                f"RESIDENCY_CACHE={given} python -c 'from residency import sim; sim.build()'."
            )
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for library in libraries:
            place = f"{_PLACE}/{library.parent.name}/{library.name}"
            build_data["force_include"][str(library.resolve())] = place
