"""Starts and ends the recording of a process: opens its file (``Ledger``) and makes phases of known
calls (``KnownCalls``).
"""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from residency import _device
from residency._errors import InvalidArgumentError, RefusedError
from residency._memory._format import PATH_VARIABLE, PEAKS, PEAKS_VARIABLE
from residency._memory._known_calls import KnownCalls
from residency._memory._ledger import Ledger
from residency._memory._phase import boundaries, end_recorded, text_of
from residency._memory._post_mortem import explain, explain_uncaught
from residency._memory._state import measure
from residency._ranks import has_ranks, rank_and_world_size

_LONGEST_COMMAND = 2000  # letters: a line of a record stays one that can be looked at
_log = logging.getLogger("residency")


@contextmanager
def record(
    path: str | os.PathLike[str], *, peaks: str = "bounds", calls: bool = True
) -> Iterator[Ledger]:
    """Writes the memory figures of every phase in the block to a file, as they come.

    The file is JSON Lines, each written at once: a killed process leaves a readable record.
    ``residency report`` shows it. With several ranks each writes a file of its own:
    ``run.rank0.jsonl`` for ``run.jsonl``.

    Args:
        path: The file; an existing record is replaced.
        peaks: ``"bounds"`` leaves torch's peak register alone: a phase's peak is exact when the
            register rose in it, and marked as an upper bound otherwise. ``"exact"`` resets the
            register at every boundary, so that ``max_memory_allocated`` of the script itself then
            shows the peak since the last boundary only.
        calls: Whether known calls become phases, too: forward and backward passes, optimizer steps,
            saves, loads, evaluation and generation of torch and frameworks, until the block ends.

    Yields:
        The `Ledger`.

    Raises:
        InvalidArgumentError: The path cannot be written, its file is not a record, or ``peaks`` is
            invalid.
        RefusedError: Another block records this process already.

    Memory:
        Nothing on the device; on the host, a number for each path of phases.
    """
    if peaks not in PEAKS:
        raise InvalidArgumentError(f"peaks is {peaks!r}; expected 'bounds' or 'exact'.")
    outer = boundaries.ledger
    if outer is not None and not outer.is_shared:
        raise RefusedError(
            f"this process is recorded to {str(outer.path)!r} already; end that recording first."
        )
    ledger = Ledger(Path(path), peaks=peaks, ranks=_ranks, is_shared=False, about=_about())
    # Under `residency record` the block has a file of its own, and known calls are there already.
    with _recording(ledger, calls and outer is None):
        yield ledger


@contextmanager
def _recording(ledger: Ledger, calls: bool) -> Iterator[None]:
    known, outer = KnownCalls(is_recording=True), boundaries.ledger
    boundaries.is_enabled = True
    boundaries.ledger = ledger
    if ledger.peaks == "exact":
        _log.info("residency resets torch's peak register at every boundary of a phase")
    try:
        if calls:
            known.start()
        yield
    except BaseException as error:
        ledger.failure = _failure(ledger, error)
        raise
    finally:
        known.stop()
        boundaries.ledger = outer
        ledger.close(_last_figures())


def _last_figures() -> dict[str, int]:
    """Returns what the last line says of the time since the last boundary."""
    try:
        state = measure(_device.accelerator())
    except Exception:  # a device that is lost; the record ends all the same
        _log.warning("residency could not read the memory at the end", exc_info=True)
        return {}
    return {"peak": state.peak_held, "num_out_of_memory": state.num_out_of_memory}


def _failure(ledger: Ledger, error: BaseException) -> dict[str, str | None] | None:
    """Ends the open phases with an error that leaves them, and says what the record says of it.

    Returns:
        None for what is no error: a script that is left with the status 0.
    """
    if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return None
    end_recorded(ledger, error)
    explain(error)  # where no phase was open
    return {"error": text_of(error), "phase": boundaries.phase_of(error)}


def record_process() -> None:
    """Records the process from here to its end, as the environment says.

    The process gets a file with its first phase, as launchers and helpers import torch, too. For
    the time of a `record` of the program's own, its phases go to that one's file.
    """
    peaks = os.environ[PEAKS_VARIABLE]
    path = Path(os.environ[PATH_VARIABLE])
    ledger = Ledger(path, peaks=peaks, ranks=_ranks, is_shared=True, about=_about())
    block = _recording(ledger, calls=True)
    block.__enter__()
    atexit.register(block.__exit__, None, None, None)

    def tell(error: BaseException) -> None:
        failure = _failure(ledger, error)
        # Other errors of processes without a phase are those of launchers and helpers.
        if ledger.num_visits or isinstance(error, torch.OutOfMemoryError):
            ledger.failure = failure

    explain_uncaught(tell)


def _about() -> dict[str, str]:
    """Returns what the first line of a record says of the process."""
    command = shlex.join(sys.orig_argv)
    if len(command) > _LONGEST_COMMAND:
        command = command[:_LONGEST_COMMAND] + " ..."
    try:
        ours = importlib.metadata.version("residency")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        ours = "unknown"
    python = platform.python_version()
    return {"command": command, "torch": torch.__version__, "residency": ours, "python": python}


def _ranks() -> tuple[int, int]:
    """Returns the rank of this process and how many there are."""
    if has_ranks():
        return rank_and_world_size()
    try:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        return 0, 1
    return rank, max(1, world_size)
