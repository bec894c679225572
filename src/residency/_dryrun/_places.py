"""Where a script is: the line of its own, and the operation of torch that it has called there."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (_OURS, sysconfig.get_path("stdlib"), os.path.dirname(sys.executable))
)
_GENERATOR = 0x20  # inspect.CO_GENERATOR, without a module that most processes here never need
_texts: set[str] = set()  # names of what the script has run that is no file
_LONGEST = 60  # letters of an operation that is a piece of the script


def place_of(trace: TracebackType | None) -> str:
    """Returns the innermost line of a traceback that is neither a library's nor ours."""
    place = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if is_script(name):
            place = line_of(name, trace.tb_lineno)
        trace = trace.tb_next
    return place


def place_of_now() -> tuple[str, str]:
    """Returns the script's line that runs now, and the operation that runs there.

    That is the function of a library, innermost, that the line has led to; the node of a backward
    pass, which runs in a thread of autograd's while the line waits in another; or the piece of the
    line itself that calls into C++.
    """
    import torch  # which the process of the command line does without

    # No public name says which node the thread is in.
    node = torch._C._current_autograd_node()
    operation = node.name() if node is not None else ""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    for first in (sys._getframe(1), main):  # of a pass that recomputes, the first one has the line
        frames = [frame for frame in outwards(first) if not is_ours(_file(frame))]
        inside = list(itertools.takewhile(lambda frame: not is_script(_file(frame)), frames))
        if len(inside) == len(frames):
            continue
        script = frames[len(inside)]
        if inside and (not operation or first is not main):
            operation = inside[0].f_code.co_qualname.split(".<locals>")[0]
        return line_of(_file(script), script.f_lineno), operation or _piece(script)
    return "", operation


def is_script(name: str) -> bool:
    """Returns whether a file is the script's own: no library's, and none of ours."""
    if name in _texts:
        return True
    if is_installed(name) or name.startswith("<"):
        return False
    return not name.startswith((*_LIBRARIES, *folders_of_simulator()))


def note_text(name: str) -> None:
    """Notes that what has this name in place of a file's is the script's own."""
    _texts.add(name)


def is_installed(name: str) -> bool:
    """Returns whether a file is one of a package that is installed."""
    return "site-packages" in name or "dist-packages" in name


def is_ours(name: str) -> bool:
    """Returns whether a file is one of ours."""
    return name.startswith((_OURS, *folders_of_simulator()))


def folders_of_simulator() -> tuple[str, ...]:
    """Returns the folder of the simulator's package; none before it is imported."""
    module = sys.modules.get("residency_sim")
    return () if module is None else (os.path.join(os.path.dirname(str(module.__file__)), ""),)


def is_generator(frame: FrameType) -> bool:
    """Returns whether a frame is a generator's."""
    return bool(frame.f_code.co_flags & _GENERATOR)


def is_for_script(frame: FrameType | None) -> bool:
    """Returns whether what a frame asks for goes to the script, by way of generators or not, and
    not to a loop of a library.
    """
    for each in outwards(frame):
        if not is_ours(_file(each)) and not is_generator(each):
            return is_script(_file(each))
    return False


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame, and those that wait for it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def line_of(name: str, line: int) -> str:
    """Returns how a line of a file is shown: of a package's file, from the package on."""
    if name in _texts:
        shown = name
    elif is_installed(name):
        shown = name.rpartition("-packages" + os.sep)[2]
    else:
        shown = os.path.relpath(name)
    return f"{shown}:{line}"


def _piece(frame: FrameType) -> str:
    """Returns what a line calls, as it is written there."""
    positions = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None or None in positions or positions[0] != positions[1]:
        return ""
    line, _, begin, end = positions
    text = linecache.getline(_file(frame), line or 0).encode()[begin:end].decode()
    return text.partition("(")[0].strip()[:_LONGEST]
