"""Tests of memory behaviour and of missing waits, for any project and without a GPU.

``plugin`` is the pytest plugin, which pytest finds by itself if this package is installed: the
fixtures `sim_device` and `tested_device`, the markers ``sim_device`` and ``device_memory``. The
names here are for tests and fixtures that want more than that; ``verify_resume`` proves that a run
resumes exactly. Importing this package imports
neither torch nor pytest.
"""

from typing import TYPE_CHECKING

from residency._errors import QueuedWorkError
from residency._lazy import door
from residency.testing._settings import simulated_device_type, tested_device_type

if TYPE_CHECKING:
    from residency.testing._rest import settle
    from residency.testing._verify_resume import ResumeError, ResumeProof, verify_resume

__all__ = [
    "QueuedWorkError",
    "ResumeError",
    "ResumeProof",
    "settle",
    "simulated_device_type",
    "tested_device_type",
    "verify_resume",
]

__getattr__ = door(
    __name__,
    {"_rest": ["settle"], "_verify_resume": ["ResumeError", "ResumeProof", "verify_resume"]},
)
