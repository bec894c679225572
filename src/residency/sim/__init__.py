"""A simulated accelerator: a torch device whose memory is the host's and whose rules are CUDA's.

The door to ``residency_sim``, a distribution of its own (``pip install 'residency[sim]'``), whose
page says what it is. Importing this door needs no simulator, and no torch; each function does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency._errors import BuildError, NotInstalledError, RaceError, SimulatorError

if TYPE_CHECKING:
    from residency_sim import (
        Clock,
        Gpu,
        build,
        enable,
        gpu_named,
        is_built,
        is_enabled,
        now_seconds,
        pinned_memory_stats,
        reset_peak_pinned_memory_stats,
        settings,
    )

__all__ = [
    "BuildError",
    "Clock",
    "Gpu",
    "RaceError",
    "SimulatorError",
    "build",
    "enable",
    "gpu_named",
    "is_built",
    "is_enabled",
    "now_seconds",
    "pinned_memory_stats",
    "reset_peak_pinned_memory_stats",
    "settings",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import residency_sim
    except ModuleNotFoundError as error:
        raise missing(error) from None
    return getattr(residency_sim, name)


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns the error of an import of the simulator that failed: it says what to install."""
    if error.name != "residency_sim":  # it is there, and something that it needs is not
        return error
    found = NotInstalledError(
        "The simulated accelerator is not installed. Install it: pip install 'residency[sim]'"
    )
    found.name = error.name
    return found
