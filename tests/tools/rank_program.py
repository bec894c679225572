"""A warm process that runs scripts: it has imported what those of ranks need, and used no device.

A fork costs milliseconds, where a process that imports torch's distributed packages takes seconds.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.testing  # noqa: F401 - imported for the scripts, as those above are
from warm_process import Log, serve

import residency.integrations.dcp
import residency.sim  # noqa: F401 - as well


def run_script(request: dict[str, Any], log: Log) -> None:
    """Runs a script as Python would: it finds what is beside it, and on its PYTHONPATH."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    script, *arguments = request["words"]
    sys.argv = [script, *arguments]
    of_environment = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(script).parent), *filter(None, of_environment)]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    serve({"script": run_script})
