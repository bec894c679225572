"""Whose doing an error is, as far as that can be known: a dry run lacks things, makes objects in
the place of others, and computes nothing.

That a value was not computed is evidence and no proof, so what is said of it says "may". Who read
one is known from the simulator (``[Note: guesses]`` in its sources): each call that led there is a
place. A place stands behind an error where it lies in the statement that failed, in what gave its
names their values, or in the test of a branch around one of these.
"""

from __future__ import annotations

import ast
import collections
import dis
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, ModuleType, TracebackType

import torch

from residency._dryrun._files import files_of_run
from residency._dryrun._paths import givers, path_of
from residency._dryrun._places import folders_of_simulator, is_ours, is_script, line_of, outwards
from residency._dryrun._refusals import chain
from residency._dryrun._sources import TORCH, Parsed, Span, has, span_of
from residency_sim import dry_run

_HERE = ("residency_sim", "residency._dryrun")  # names of modules begin so
_ROOM = os.path.join(os.path.dirname(__file__), "")
_REFUSES = re.compile(r"^Dry mode|^The simulated accelerator|residency_sim_core")
_OF_HOST = re.compile(r'"\w*cpu\w*" not implemented for')
_ON_GPU = "on a GPU it may go on"
_LACKED = f"The dry run lacks this: {_ON_GPU}"
_HOSTS = (
    "This is a kernel of the host's: if the tensors were on the device, the dry run lacks it, and "
    "a GPU has it"
)
# What was guessed of values, and what of it the answer says.
_GUESSES = {
    "mask": "took a mask as all true",
    "each": "took all values to differ",
    "one": "took all values to be one",
    "repeats": "took each row once",
    "counts": "took counts as equal",
}
_NOTES = {
    "mask": "a mask was taken as all true; the figures from there are an upper bound",
    "each": "all values were taken to differ; the figures from there are an upper bound",
    "one": "torch.unique was taken to find one value; the figures from there may be too low",
    "repeats": "each row was taken once, as repeats are not known; the figures from there may be "
    "too low",
    "counts": "counts were taken as equal; the figures from there hold for an even share",
    "drawn": "a number was drawn; the figures from there hold for this draw, and another may "
    "take more",
}
_LEFT_ALONE = "anything"  # stood for it: memory of the host, with what it had before
_MOST_NOTES = 5


class Blame:
    """The record of what a script was given in the place of what a dry run does not have."""

    def __init__(self) -> None:
        """Begins with nothing."""
        # By instruction, of code that is kept: what stood there. Code of two files may be equal.
        self._places: dict[tuple[int, int], tuple[CodeType, str]] = {}
        self._guesses: collections.Counter[tuple[str, str]] = collections.Counter()

    def start(self) -> None:
        """Listens to the simulator from now on."""
        dry_run.attach_guess_observer(self._note)

    def _note(self, what: str, numel: int) -> None:
        if what != "drawn" and (watch := files_of_run()) is not None:
            watch.has_guessed = True
        frames = list(outwards(sys._getframe().f_back))  # none in a thread of autograd
        for frame in frames if what != "drawn" else ():  # as good a number as the card's
            self._places[id(frame.f_code), frame.f_lasti] = frame.f_code, what
        if what not in _NOTES:
            return
        files = [frame.f_code.co_filename for frame in frames]
        asker = next((f for f in files if not f.startswith(TORCH) and not is_ours(f)), "")
        # A library that asks which values there are only checks them.
        if what == "one" and not is_script(asker):
            return
        script = next((f for f in frames if is_script(f.f_code.co_filename)), None)
        if script is not None:
            place = line_of(script.f_code.co_filename, script.f_lineno)
            self._guesses[place, what] = max(self._guesses[place, what], numel)

    def guesses(self) -> list[dict[str, str]]:
        """Returns what sizes were guessed from, of the most values first."""
        most = self._guesses.most_common(_MOST_NOTES)
        return [{"line": place, "what": _NOTES[what]} for (place, what), _ in most]

    def places(self) -> dict[str, set[Span]]:
        """Returns where values were read that are not computed, by file."""
        files = {code.co_filename for code, _ in list(self._places.values())}
        return {file: {span for span, _ in self._spans(file)} for file in files}

    def of(self, error: BaseException, *, with_values: bool = True) -> str:
        """Returns what of the dry run stands behind an error; "" where nothing is known to.

        Args:
            error: What was raised.
            with_values: Whether a value that was not computed can be: not where the script is
                changed, and ends well as it is.
        """
        for each in chain(error):
            if found := self._lacked(each) or (with_values and self._unknown(each)):
                return found
        return ""

    def _lacked(self, error: BaseException) -> str:
        obj = getattr(error, "obj", None)
        owner = obj.__name__ if isinstance(obj, ModuleType) else type(obj).__module__
        if owner.startswith(_HERE) or _is_raised_here(error) or _REFUSES.search(str(error)):
            return _LACKED
        return _HOSTS if _OF_HOST.search(str(error)) else ""

    def _unknown(self, error: BaseException) -> str:
        """Looks for what was not computed behind the statement that failed, innermost first."""
        if not _can_be_of_value(error):
            return ""
        frames = list(_frames(error))
        # What a call has read that has not come back is of the frames inside of it.
        first = error.__traceback__.tb_frame.f_back if error.__traceback__ else None
        around = [(frame, frame.f_lasti) for frame in outwards(first)] + frames[:-1]
        open_calls = {(frame.f_code.co_filename, span_of(frame.f_code, at)) for frame, at in around}
        sources: dict[str, Parsed | None] = {}
        path, called = path_of(error), None
        needed: set[str] | None = None  # parameters of `called` on which the path hangs
        for frame, instruction in reversed(frames):
            inner, called = called, frame
            parameters, needed = needed, None
            file, failed = frame.f_code.co_filename, span_of(frame.f_code, instruction)
            spans = {span: w for span, w in self._spans(file) if (file, span) not in open_calls}
            is_quiet = not spans and not path
            if is_quiet or failed is None or file.startswith(TORCH) or is_ours(file):
                continue
            if file not in sources:
                sources[file] = Parsed.of(file)
            source = sources[file]
            if source is None:
                continue
            call = source.call(failed) if path else None
            start = givers(call, inner, path, parameters) if call else source.statement(failed)
            pieces = list(source.behind(start, is_bound=bool(path)))
            if found := _read_in(pieces, spans):
                return _said(line_of(file, found[0][0]), found[1])
            needed = source.parameters(pieces)
            if path and not needed:
                return ""
        return ""

    def _spans(self, file: str) -> Iterator[tuple[Span, str]]:
        """Yields where a file has read what is not computed, and what stood there."""
        for (_, instruction), (code, what) in list(self._places.items()):
            if code.co_filename == file and (span := span_of(code, instruction)) is not None:
                yield span, what


def _read_in(pieces: Iterable[ast.AST], spans: dict[Span, str]) -> tuple[Span, str] | None:
    """Returns where pieces have read what is not computed, the first, and what stood there."""
    found = ((span, spans[span]) for piece in pieces for span in spans if has(piece, span))
    return next(found, None)


def _said(place: str, what: str) -> str:
    if what == _LEFT_ALONE:
        return (
            f"{place} copied values to the host that a dry run does not compute, so that they mean "
            f"nothing: {_ON_GPU}"
        )
    if what in _GUESSES:
        return f"{place} {_GUESSES[what]}, as a dry run does not compute them: {_ON_GPU}"
    return f"{place} read a value that a dry run does not compute ({what} stood for it): {_ON_GPU}"


def _is_raised_here(error: BaseException) -> bool:
    """Returns whether the simulator or the dry run raised an error, and not what they go around.

    What they raise themselves are CUDA's own errors, but for refusals.
    """
    frame, instruction = next(reversed(list(_frames(error))), (None, 0))
    if frame is None or not frame.f_code.co_filename.startswith((_ROOM, *folders_of_simulator())):
        return False
    name = dis.opname[frame.f_code.co_code[instruction]]
    if name.startswith("RAISE"):
        return isinstance(error, NotImplementedError)
    return "CALL" not in name


def _can_be_of_value(error: BaseException) -> bool:
    """Returns whether a value can be behind an error: a placeholder has the right type and name,
    unless a branch left nothing in its place.
    """
    if isinstance(error, TypeError | AttributeError):
        return "NoneType" in str(error)
    is_of_name = isinstance(error, NameError) and not isinstance(error, UnboundLocalError)
    others = (ImportError, SyntaxError, torch.OutOfMemoryError)
    return isinstance(error, Exception) and not is_of_name and not isinstance(error, others)


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti
        trace = trace.tb_next
