"""Starts and ends the recording of a process: the ledger, the known calls, and which rank it is."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed

from residency._errors import InvalidArgumentError, RefusedError
from residency._memory._format import PATH_VARIABLE, PEAKS, PEAKS_VARIABLE
from residency._memory._known_calls import KnownCalls
from residency._memory._ledger import Ledger
from residency._memory._phase import boundaries
from residency._memory._post_mortem import explain, explain_uncaught

_log = logging.getLogger("residency")


@contextmanager
def record(
    path: str | os.PathLike[str], *, peaks: str = "bounds", calls: bool = True
) -> Iterator[Ledger]:
    """Writes the memory figures of every phase in the block to a file, as they come.

    The file is JSON Lines, each written at once: what was recorded can be read after a kill.
    ``residency report`` shows it. With several ranks each writes a file of its own:
    ``run.rank0.jsonl`` for ``run.jsonl``.

    Args:
        path: The file; a record that is there is replaced.
        peaks: ``"bounds"`` leaves torch's peak register alone: a phase's peak is exact when the
            register rose in it, and marked as an upper bound otherwise. ``"exact"`` resets the
            register at every boundary, so that ``max_memory_allocated`` of the script itself then
            shows the peak since the last boundary only.
        calls: Make phases of known calls as well: optimizer steps, saves, loads, evaluation and
            generation of torch and of frameworks. Taken back at the end of the block.

    Yields:
        The `Ledger`.

    Raises:
        InvalidArgumentError: The path cannot be written, a file is there that is no record, or
            ``peaks`` means nothing.
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
    ledger = Ledger(Path(path), peaks=peaks, place=_place, is_shared=False)
    # Under `residency record` the block has a file of its own, and known calls are there already.
    with _recording(ledger, calls and outer is None):
        yield ledger


@contextmanager
def _recording(ledger: Ledger, calls: bool) -> Iterator[None]:
    known, outer = KnownCalls(), boundaries.ledger
    boundaries.is_enabled = True
    boundaries.ledger = ledger
    if ledger.peaks == "exact":
        _log.info("residency resets torch's peak register at every boundary of a phase")
    try:
        if calls:
            known.start()
        yield
    except torch.OutOfMemoryError as error:
        explain(error)
        raise
    finally:
        known.stop()
        boundaries.ledger = outer
        ledger.close()


def record_process() -> None:
    """Records the process from here to its end, as the environment says.

    The process gets a file with its first phase. For the time of a `record` of the program's own,
    its phases go to that one's file.
    """
    peaks = os.environ[PEAKS_VARIABLE]
    path = Path(os.environ[PATH_VARIABLE])
    block = _recording(Ledger(path, peaks=peaks, place=_place, is_shared=True), calls=True)
    block.__enter__()
    atexit.register(block.__exit__, None, None, None)
    explain_uncaught()


def _place() -> tuple[int, int]:
    """Returns the rank of this process and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        return 0, 1
    return rank, max(1, world_size)
