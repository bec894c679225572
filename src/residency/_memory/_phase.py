"""Named parts of the loop, and the memory figures at their boundaries.

A boundary is one reading of the allocator and one of the device. Torch has one peak register, which
can only be reset: it is left alone unless a recording asks for exact peaks. The peak of a phase is
then exact if the register rose in it, and otherwise an upper bound that says so. [Note: peaks]

[Note: peaks] Let ``before`` and ``after`` be the register at both boundaries. ``after > before``:
the register's maximum was reached inside, and is the phase's. ``after == before``: the phase stayed
at or below it; if the bytes held at a boundary equal it, that is the peak, else it is a bound.
``after < before``: it was reset inside; the phase stayed below the larger of the two.
With exact peaks the register is reset at every boundary, and what it showed is folded into every
phase that is open, in whichever thread.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from residency import _device
from residency._errors import InvalidArgumentError
from residency._memory import _state
from residency._memory._history import held_history
from residency._memory._ledger import Ledger, figures
from residency._memory._post_mortem import explain
from residency._memory._state import MemoryState

_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger("residency")
# A thread starts with an empty one; a task of asyncio with a copy of its maker's.
_open: ContextVar[tuple[Visit, ...]] = ContextVar("residency_phases", default=())


class Visit:
    """One run through a phase.

    Attributes:
        name: What the phase is called.
        path: The names of the phases around it and its own, joined by ``/``.
        number: How often a recording has seen this path before.
        before: The memory at the phase's beginning.
        after: The memory at its end; None until then.
        peak: The most bytes that live tensors held in it, or an upper bound of that.
        is_peak_exact: Whether `peak` is exact.
        seconds: How long it took on the host.
        error: The exception that left it, as ``Name: message``; None where none did.
        is_over: Whether it has ended.
    """

    def __init__(
        self, name: str, outer: tuple[Visit, ...], owner: object, *, is_passing: bool = False
    ) -> None:
        """Describes a visit that has not begun; a passing one ends where the next one begins."""
        self.name = name
        self.path = "/".join([*(visit.name for visit in outer), name])
        self.number = 0
        self.before: MemoryState = _state.measure(None)
        self.after: MemoryState | None = None
        self.peak = 0
        self.is_peak_exact = False
        self.seconds = 0.0
        self.error: str | None = None
        self.is_over = False
        self._is_passing = is_passing
        self._thread = threading.get_ident()
        self._ledger: Ledger | None = None
        self._outer = outer
        self._owner = owner
        self._started = 0.0
        self._seen_peak = 0
        self._tag: object = None
        self._frame: tuple[int, CodeType] | None = None  # without which it is over


class Boundaries:
    """The figures at every boundary of the process, on their way to the recording."""

    def __init__(self) -> None:
        """Starts enabled, with no recording."""
        self.ledger: Ledger | None = None
        self.is_enabled = True
        self._watchers: list[tuple[Callable[[Visit], None], Callable[[Visit], None]]] = []
        # Reentrant: Python may collect, wherever this is held, a generator that is in a phase.
        self._lock = threading.RLock()
        self._visits: list[Visit] = []  # open ones of every thread, while peaks are exact
        # The last error that left a phase, without a reference to it, which would keep its frames
        # and their tensors; and the phase.
        self._failure: tuple[int, str, str] | None = None

    def watch(self, begin: Callable[[Visit], None], end: Callable[[Visit], None]) -> None:
        """Calls functions at every boundary from now on, whether or not phases are measured."""
        self._watchers.append((begin, end))

    def begin(self, visit: Visit) -> None:
        """Takes the figures with which a phase begins."""
        self._observe(self._begin, visit)
        for begin, _ in self._watchers:
            begin(visit)

    def end(self, visit: Visit) -> None:
        """Takes the figures with which a phase ends; one that is over stays as it is."""
        if visit.is_over:
            return
        visit.is_over = True
        self._observe(self._end, visit)
        for _, end in self._watchers:
            end(visit)

    def note_failure(self, error: BaseException, path: str) -> None:
        """Notes the phase in which an error was raised: of those that it leaves, the first."""
        if self.phase_of(error) is None:
            self._failure = (id(error), text_of(error), path)

    def phase_of(self, error: BaseException) -> str | None:
        """Returns the path of the phase in which an error was raised; None outside of all."""
        if self._failure is None or self._failure[:2] != (id(error), text_of(error)):
            return None
        return self._failure[2]

    def _observe(self, take: Callable[[Visit], None], visit: Visit) -> None:
        if not self.is_enabled:
            return
        try:
            take(visit)
        except Exception:
            self.is_enabled = False
            _log.exception("residency stopped measuring phases; the run goes on without")

    def _begin(self, visit: Visit) -> None:
        device = _device.accelerator()
        ledger = self.ledger
        if device is not None:
            visit._tag = _device.tag_memory_history(device, visit.path)
        visit.before = self._read(ledger)
        visit._ledger = ledger
        if ledger is not None:
            if ledger.peaks == "exact":
                with self._lock:
                    self._visits.append(visit)
            visit.number = ledger.count_visit(visit.path)
            ledger.write(_line("begin", visit, visit.before))
        visit._started = time.perf_counter()

    def _end(self, visit: Visit) -> None:
        visit.seconds = time.perf_counter() - visit._started
        visit.after = self._read(self.ledger)
        held_history.note(visit.path, visit.after.held)
        _device.untag_memory_history(visit._tag)
        with self._lock:
            if visit in self._visits:
                self._visits.remove(visit)
                visit.peak = max(visit._seen_peak, visit.before.held, visit.after.held)
                visit.is_peak_exact = True
            else:
                visit.peak, visit.is_peak_exact = _peak(visit.before, visit.after)
        if visit._ledger is not None:  # the one that knows of its beginning
            outcome: dict[str, Any] = {"peak": visit.peak, "is_peak_exact": visit.is_peak_exact}
            outcome |= {"seconds": round(visit.seconds, 6), "error": visit.error}
            visit._ledger.write({**_line("end", visit, visit.after), **outcome})

    def _read(self, ledger: Ledger | None) -> MemoryState:
        device = _device.accelerator()
        state = _state.measure(device)
        if device is not None and ledger is not None and ledger.peaks == "exact":
            with self._lock:
                for visit in tuple(self._visits):
                    visit._seen_peak = max(visit._seen_peak, state.peak_held)
                _device.reset_peak(device)
        return state


def _peak(before: MemoryState, after: MemoryState) -> tuple[int, bool]:
    """Returns the peak between two states and whether it is exact. [Note: peaks]"""
    bound = max(before.peak_held, after.peak_held)
    if after.peak_held > before.peak_held:
        return bound, True
    return bound, bound == max(before.held, after.held)


def _line(kind: str, visit: Visit, state: MemoryState) -> dict[str, object]:
    about = {"kind": kind, "phase": visit.path, "visit": visit.number}
    return {**about, "thread": visit._thread, "device": state.device, **figures(state)}


def text_of(error: BaseException) -> str:
    """Returns what a recording says of an error: its name, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


boundaries = Boundaries()


def open_phases() -> tuple[Visit, ...]:
    """Returns the phases that this thread, or task, is in: the innermost one last."""
    return tuple(visit for visit in _open.get() if not visit.is_over)


class phase:  # noqa: N801 - used as a function, as torch.no_grad is
    """A named part of the loop: a context manager and a decorator.

    Its boundaries are measured, and written to the recording if there is one. Phases nest; each
    thread has its own. An exception passes through and is recorded.

    As a context manager it yields the `Visit`, which has the figures once the block has ended.

    Args:
        name: The name of the phase, such as ``"update_actor"``; without ``/``, which joins the
            names of nested phases.

    Raises:
        InvalidArgumentError: The name is not valid, or the decorated function is a generator.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name.strip() or "/" in name:
            raise InvalidArgumentError(
                f"the phase's name is {name!r}; expected text without a slash, as in 'save'."
            )
        self.name = name

    def __enter__(self) -> Visit:
        return begin_phase(self.name, self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        end_phase(self, error)
        return False

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Makes every call of the function a visit of the phase."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidArgumentError(
                f"{function.__qualname__} is a generator, whose body runs after the call; "
                "use `with residency.phase(...)` inside it."
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with phase(self.name):
                    return await function(*args, **kwargs)

            return awaited  # type: ignore[return-value]  # a coroutine function for another

        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with phase(self.name):
                return function(*args, **kwargs)

        return called


def begin_phase(
    name: str, owner: object, *, is_passing: bool = False, frame: FrameType | None = None
) -> Visit:
    """Begins a visit that `end_phase` ends when it is given the same owner.

    A passing one, such as a forward pass, of which no call says where it ends, also ends at the
    next boundary of its thread.

    Args:
        name: What the phase is called.
        owner: What `end_phase` is given.
        is_passing: Whether it is a passing one.
        frame: A function's that runs as long as the phase: where an error has left it, the phase
            ends at the next boundary of its thread, in an error.
    """
    _leave_failed(frame)
    outer = _open.get()
    if outer and outer[-1]._is_passing:
        boundaries.end(outer[-1])
        outer = outer[:-1]
    visit = Visit(name, outer, owner, is_passing=is_passing)
    visit._frame = None if frame is None else (id(frame), frame.f_code)
    boundaries.begin(visit)
    _open.set((*outer, visit))
    return visit


def _leave_failed(frame: FrameType | None = None) -> None:
    """Ends the phases of this thread whose function an error has left, which is not known sooner.

    Args:
        frame: A function's that has just begun: what it is in is looked at, and not itself.
    """
    visits = _open.get()
    if not any(visit._frame is not None and not visit.is_over for visit in visits):
        return
    running = set()
    at = sys._getframe(1) if frame is None else frame.f_back
    while at is not None:
        running.add((id(at), at.f_code))
        at = at.f_back
    for visit in visits:
        if visit._frame is not None and not visit.is_over and visit._frame not in running:
            end_failed(visit)
            return  # with all that was open in it


def end_phase(owner: object, error: BaseException | None) -> None:
    """Ends the innermost visit of an owner, and what was left open inside it.

    Where the visit is another thread's, nothing is ended: its own thread may still do so. Where a
    phase around it has ended, as of two generators in turn, it was ended with that one.
    """
    if error is None:
        _leave_failed()
    visits = _open.get()
    last = next((i for i in reversed(range(len(visits))) if visits[i]._owner is owner), None)
    if last is None:
        _log.warning(
            "residency: a phase was left that is not open here: another thread had entered it, or "
            "a phase around it had ended before"
        )
        return
    if error is not None:
        innermost = next((v for v in reversed(visits) if not v.is_over), visits[last])
        explain(error, phase=innermost.path)
        boundaries.note_failure(error, innermost.path)
    _end_from(visits[last:], None if error is None else text_of(error))


def end_failed(visit: Visit) -> None:
    """Ends a visit that an error left, and what is open in it, where the error itself is not known:
    the script caught it.
    """
    visits = _open.get()
    number = _state.measure(_device.accelerator()).num_out_of_memory
    is_of_memory = number > visit.before.num_out_of_memory
    name = torch.OutOfMemoryError.__name__ if is_of_memory else "an error"
    _end_from(visits[visits.index(visit) :], f"{name}: the script caught it")


def _end_from(visits: tuple[Visit, ...], error: str | None) -> None:
    """Ends visits, the innermost first, and leaves open what is around them."""
    for visit in reversed(visits):
        if visit.is_over:
            continue
        if error is not None:
            visit.error = error
        elif visit is not visits[0] and not visit._is_passing:
            visit.error = "left open"
        boundaries.end(visit)
    # One around it may have ended within its end, as of a generator that was collected there.
    _open.set(tuple(visit for visit in visits[0]._outer if not visit.is_over))


def end_recorded(ledger: Ledger, error: BaseException) -> None:
    """Ends, with an error that leaves a recording, what this thread has open in it."""
    first = next((visit for visit in _open.get() if visit._ledger is ledger), None)
    if first is not None:
        end_phase(first._owner, error)
