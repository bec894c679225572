"""What may be said of a script: one verdict, which follows from what was found of its run.

The first line, the notes, the JSON, the exit status and the searches all have it from here. A
script fits if something that it is run for came to its end, after the last error for memory if
there was one: an optimizer step of a training, a backward pass of a script without an optimizer, a
forward pass of one that only infers. One that means no training fits if it came to its own end and
no error is known of it; the first line says that no training was seen.
`tests/dryrun/test_verdict.py` tries to have it said of less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

_ENDED = ("finished", "left", "stopped")  # as the script has it, in its loop, or after enough
# What is counted of a run (``_evidence``).
STEPS, BACKWARD, FORWARD = "steps", "backward_passes", "forward_passes"
BEGUN, SAVES = "begun_passes", "saves"
WITHOUT_GRADIENTS = ("evaluate", "generate")  # how the names of such phases end
Found = Mapping[str, Any]


class Verdict(Enum):
    """A verdict; its value is how the first line begins."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    FAILED = "the script failed"
    UNSEEN = "nothing of a training was seen"
    KILLED = "killed"
    INTERRUPTED = "interrupted"

    @property
    def status(self) -> int:
        """The exit status: 0 where it fits, 1 where it does not, 3 where nothing is known."""
        return {Verdict.FITS: 0, Verdict.DOES_NOT_FIT: 1}.get(self, 3)


def verdict_of(found: Found) -> Verdict:
    """Decides what may be said of a run, from what its training process found."""
    if found["was_interrupted"] or found["signals"]:
        return Verdict.INTERRUPTED
    if found["out_of_memory"] and not went_on(found):
        return Verdict.DOES_NOT_FIT
    if found["ended"] == "running":
        return Verdict.KILLED
    if found["ended"] not in _ENDED:
        return Verdict.FAILED
    has_come = found["seen"][aim_of(found)] or is_of_no_training(found)
    return Verdict.FITS if has_come and found["peak_reserved"] else Verdict.UNSEEN


def is_of_no_training(found: Found) -> bool:
    """Returns whether a script that means no training came to its own end, such as a merge or an
    export: it made no optimizer and began no pass with gradients, and no error is known, be it one
    that the script caught or one that ended another process of the command.
    """
    seen = found["seen"]
    is_meant = found["has_optimizer"] or any(seen[each] for each in (STEPS, BACKWARD, BEGUN))
    has_erred = found["caught"] or found["has_failed"] or found["out_of_memory"]
    return found["ended"] == "finished" and not is_meant and not has_erred


def is_whole(found: Found) -> bool:
    """Returns whether a script came to its end, or to where enough was seen."""
    return found["ended"] in _ENDED and not found["was_interrupted"] and not found["signals"]


def aim_of(found: Found) -> str:
    """Returns what a script is run for, by the name under which it is counted.

    One that makes an optimizer and begins a pass with gradients trains: its steps count. One with
    an optimizer that makes no such pass evaluates.
    """
    seen = found["seen"]
    if seen[STEPS] or (found["has_optimizer"] and seen[BEGUN]):
        return STEPS
    return BACKWARD if seen[BACKWARD] else FORWARD


def went_on(found: Found) -> bool:
    """Returns whether a script made room after its last error for memory.

    An error in an evaluation or a save that comes after the training is followed by no step, as
    its loops were ended: another such pass, or save, is enough there.
    """
    since, phase = found["since_error"], found["phase_of_error"].rpartition("/")[2]
    if since is None:
        return not found["out_of_memory"]
    if since[aim_of(found)]:
        return True
    if not found["seen"][STEPS]:
        return False
    return bool(
        (phase in WITHOUT_GRADIENTS and since[FORWARD]) or (phase == "save" and since[SAVES])
    )


def left_out(found: Found) -> Iterator[str]:
    """Yields what was left out of a script, for the lines below the first.

    A later round may have larger inputs: a schedule of sizes, a longest batch. A batch is smaller
    than it was asked for where the data at hand are few.
    """
    data = found["left_out"]["data"]
    if data:
        yield (
            f"the data set has {data['samples']:,} samples, fewer than a batch of "
            f"{data['batch']:,}: no batch was that large"
        )
    parts = [f"{_rounds(each)} the loop at {each['line']}" for each in found["left_out"]["loops"]]
    number = found["left_out"]["evaluations"]
    if number:
        parts.append(f"batches of {number} pass{'es' * (number > 1)} of an evaluation")
    if found["is_cut"] and found["has_framework"] and not found["left_out"]["loops"]:
        parts.append("a trainer's work after these steps")
    if found["ended"] == "left":
        parts.append("all that comes after the loop in which the script was left")
    if parts:
        yield f"left out: {', '.join(parts)}. If the inputs are larger there, it takes more"
    if branches := found["left_out"]["branches"]:
        where = ", ".join(branches)
        yield f"no round entered the branches at {where}: their memory is not in this"


def _rounds(cut: Mapping[str, Any]) -> str:
    if cut["left"] is None:
        return f"everything after round {cut['rounds']:,} of"
    return f"{cut['left']:,} of {cut['rounds'] + cut['left']:,} rounds of"
