"""Starts a command in whose Python processes something of ours runs first: a ``sitecustomize`` on
their path, so that it does not matter how they are started.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from residency._errors import InvalidArgumentError


def start_command(
    words: Sequence[str], *, site: Path, variables: Mapping[str, str], **options: Any
) -> subprocess.Popen[Any]:
    """Starts a command.

    Args:
        words: The program and its arguments.
        site: The folder of the ``sitecustomize``, which runs the environment's own, too.
        variables: What it reads from the environment.
        options: Those of `subprocess.Popen`.

    Raises:
        InvalidArgumentError: It cannot be started.
    """
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    try:
        return subprocess.Popen(words, env=environment, **options)
    except OSError as error:
        raise InvalidArgumentError(
            f"{words[0]!r} cannot be started: {error.strerror}. Nothing was changed; write after "
            "-- the command that you would type without this, as in: -- python train.py"
        ) from None
