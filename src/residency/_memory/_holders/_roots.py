"""Where the search for holders begins: the names that running Python code has.

Locals of every thread's frames, threads, context variables, and the globals of modules.

[Note: locals] Before Python 3.13, to read a running frame's locals leaves a dict of them on the
frame, which would keep every tensor in it alive until that function returns. A search therefore
notes the frames that it read, and when all else is done takes out again what it put there. It does
not where other code has that dict, nor while a debugger or profiler runs: its trace function
writes the dict back to the frame.
"""

from __future__ import annotations

import contextvars
import inspect
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from residency._memory import _objects

_OWN = f"{_objects.__package__}."  # frames of the package around this one hold no tensor
_HOLDERS_OF_A_SNAPSHOT = 3  # the frame, the local here, the argument of getrefcount
_MODULE_DICT: Any = _objects.type_dict(types.ModuleType)["__dict__"]


def named_objects(touched: list[types.FrameType]) -> Iterator[tuple[object, str]]:
    """Yields objects that have a name of their own, with it; the most telling names come first.

    Args:
        touched: Takes the frames whose locals were read, see `frames_read`.
    """
    locals_of_torch = []
    for thing, name, is_of_torch in _locals_of_threads(touched):
        if is_of_torch:  # which has a user's value under a name that tells a user nothing
            locals_of_torch.append((thing, name))
        else:
            yield thing, name
    yield from _threads_and_variables()
    yield from named_by_modules()
    yield from locals_of_torch


def named_by_threads(touched: list[types.FrameType]) -> Iterator[tuple[object, str]]:
    """Yields the part of `named_objects` that running code has: locals, threads, variables."""
    for thing, name, _ in _locals_of_threads(touched):
        yield thing, name
    yield from _threads_and_variables()


def _threads_and_variables() -> Iterator[tuple[object, str]]:
    yield from _threads()
    for variable, value in contextvars.copy_context().items():
        yield value, f"context variable {variable.name!r}"


def namespaces() -> Iterator[object]:
    """Yields modules and their dicts: no path leads through one, for it begins there."""
    yield sys.modules
    for module in list(sys.modules.values()):
        if _objects.is_a(module, types.ModuleType):
            yield module
            yield _MODULE_DICT.__get__(module)


def frame_locals(
    frame: types.FrameType, touched: list[types.FrameType]
) -> list[tuple[str, object]]:
    """Returns names and values of a frame's locals, and notes the frame. [Note: locals]"""
    table: Any = frame.f_locals
    if type(table) is dict:
        touched.append(frame)
        return list(table.items())
    is_view = type(table).__module__ == "builtins"  # from Python 3.13 on: keeps nothing
    return list(table.items()) if is_view else _objects.items(table)


@contextmanager
def frames_read() -> Iterator[list[types.FrameType]]:
    """Takes the frames whose locals a search reads, and leaves them as they were. [Note: locals]

    The frames of a search that an error ends are emptied, an interrupt's above all: with the error,
    which an interactive session keeps, every object of the process would be kept.
    """
    touched: list[types.FrameType] = []
    try:
        yield touched
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        _leave_frames(touched)


def _leave_frames(touched: list[types.FrameType]) -> None:
    """Takes out of frames what reading their locals put there. [Note: locals]"""
    is_traced = sys.gettrace() is not None or sys.getprofile() is not None
    while touched:
        frame = touched.pop()
        code = frame.f_code
        if is_traced or frame.f_trace is not None or not code.co_flags & inspect.CO_OPTIMIZED:
            continue
        table = frame.f_locals
        if type(table) is dict and sys.getrefcount(table) <= _HOLDERS_OF_A_SNAPSHOT:
            for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
                table.pop(name, None)


def frame_name(frame: types.FrameType) -> str:
    """Returns what a frame runs, as ``train()``."""
    code = frame.f_code
    if code.co_name == "<module>":
        return code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{code.co_qualname}()"


def _locals_of_threads(touched: list[types.FrameType]) -> Iterator[tuple[object, str, bool]]:
    """Yields each local with its name, and whether the function is one of torch's."""
    for prefix, frame in _running_frames():
        is_of_torch = str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"
        kind = "global" if frame.f_code.co_name == "<module>" else "local"
        name = frame_name(frame)
        for local, value in frame_locals(frame, touched):
            yield value, f"{prefix}{name} {kind} {local!r}", is_of_torch


def _running_frames() -> list[tuple[str, types.FrameType]]:
    """Returns the frames of all threads, the calling one's first, less this package's own.

    What begins the name of another thread's locals comes with each.
    """
    here = threading.get_ident()
    module_dicts = {id(_MODULE_DICT.__get__(m)) for m in list(sys.modules.values()) if _is_plain(m)}
    running = []
    tops = sys._current_frames()
    for ident in sorted(tops, key=lambda ident: ident != here):
        prefix = "" if ident == here else f"thread {_thread_name(ident)!r}: "
        frame: types.FrameType | None = tops[ident]
        while frame is not None:
            owner = frame.f_globals.get("__name__")
            is_own = type(owner) is str and owner.startswith(_OWN)
            is_module = frame.f_code.co_name == "<module>" and id(frame.f_globals) in module_dicts
            if not is_own and not is_module:
                running.append((prefix, frame))
            frame = frame.f_back
    tops.clear()  # which has this function's own frame, a cycle that would keep the search alive
    return running


def _is_plain(module: object) -> bool:
    return type(module) is types.ModuleType


def _thread_name(ident: int) -> str:
    thread = threading._active.get(ident)  # type: ignore[attr-defined]  # enumerate() takes a lock
    name = (_objects.attributes(thread) or {}).get("_name") if thread is not None else None
    return name if type(name) is str else str(ident)


def _threads() -> Iterator[tuple[object, str]]:
    for ident, thread in list(threading._active.items()):  # type: ignore[attr-defined]
        yield thread, f"thread {_thread_name(ident)!r}"


def named_by_modules() -> Iterator[tuple[object, str]]:
    """Yields the part of `named_objects` that modules have: their globals, the main one's first."""
    names = sorted((key for key in list(sys.modules) if type(key) is str), key=_is_not_main)
    for name in names:
        module = sys.modules.get(name)
        if _objects.is_a(module, types.ModuleType):
            for key, value in list((_MODULE_DICT.__get__(module) or {}).items()):
                yield value, f"{name}.{key}"
        else:
            yield module, f"sys.modules[{name!r}]"


def _is_not_main(name: str) -> bool:
    return name != "__main__"
