"""Compiles the simulated accelerator once and keeps it.

The extension goes into a folder of the per-user cache named after all that could change it: the
versions of torch and Python, and a hash of the sources. A wheel may bring such folders. One process
builds, the others wait for its file lock; a build that was killed leaves no library behind, so the
next one starts over.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from residency._errors import BuildError
from residency_sim import _toolchain

_NAME = "residency_sim_core"
_SOURCES = Path(__file__).parent / "csrc"
_SHIPPED = Path(__file__).parent / "prebuilt"  # of a wheel that brings some (hatch_build.py)
_WORK = "build-"  # what folders of a build in work begin with
# [Note: parts] Torch's headers take most of the time of a compile, and each file reads them anew.
# So files that include much the same are compiled as one, in a third of the processor time. Names
# in their anonymous namespaces must differ; the compiler says where they do not. There are four
# parts, as many machines have more than two processors; the longest stand first, so that two
# processors end at about one time.
_PARTS = {
    "python": ["python"],
    "torch_distributed": ["python"],
    "torch_": ["torch_1", "torch_2"],
    "": ["core"],
}
_BUILDING = "building the simulated accelerator (only once)"
_WAITING = "waiting for another process that compiles it"

Show = Callable[[str, int, int], None]
"""Is called with what is done, and the number of its steps that are done and of all."""


def cache_directory() -> Path:
    """Returns the folder for built extensions: ``$RESIDENCY_CACHE``, or the user's cache folder."""
    override = os.environ.get("RESIDENCY_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "residency"


def load_extension(
    *,
    sources: Sequence[Path] | None = None,
    name: str = _NAME,
) -> ModuleType:
    """Builds the extension if the cache does not have it, and imports it; see `build_extension`."""
    return _import_library(name, build_extension(sources=sources, name=name))


def build_extension(
    *,
    sources: Sequence[Path] | None = None,
    name: str = _NAME,
    show: Show | None = None,
) -> Path:
    """Builds the extension if the cache does not have it, and returns where it is.

    Args:
        sources: C++ files and the headers beside them; those of the simulated accelerator by
            default.
        name: The module's name in the sources.
        show: Is called as it gets on, if there is anything to do; by default lines on stderr say
            so.

    Raises:
        BuildError: A compiler or Python's headers are missing, the sources cannot be read, the
            cache cannot be written, or the compiler failed.
    """
    files, built = _files_and_place(sources, name)
    if (_SHIPPED / built).exists():
        return _SHIPPED / built
    library = cache_directory() / built
    folder = library.parent
    try:
        if library.exists():  # whole: no need to wait for the lock, or to write into the cache
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock", show):
            if not library.exists():
                _build(name, files, library, show)
    except OSError as error:
        raise BuildError(
            f"The folder for built extensions, {folder}, cannot be used: {error}. "
            "Set RESIDENCY_CACHE to a folder that can be written."
        ) from error
    return library


def is_built() -> bool:
    """Returns whether the extension is there; see `residency_sim.is_built`."""
    _, built = _files_and_place(None, _NAME)
    if any((folder / built).exists() for folder in (_SHIPPED, cache_directory())):
        return True
    _toolchain.check_tools()
    return False


def _files_and_place(sources: Sequence[Path] | None, name: str) -> tuple[list[Path], Path]:
    try:
        files = sorted(_SOURCES.iterdir()) if sources is None else sorted(sources)
        return files, Path(f"{name}-{_fingerprint(files)}", f"{name}.so")
    except OSError as error:
        raise BuildError(
            f"The sources of the simulated accelerator cannot be read: {error}. Install the "
            "package again, as a user who may read it."
        ) from error


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for word in (torch.__version__, *_toolchain.recipe()):
        digest.update(word.encode() + b"\0")
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path, show: Show | None) -> Iterator[None]:
    # The kernel drops the lock when its holder dies, so that a killed build blocks no other.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _progress(_WAITING, show):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _import_library(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _parts(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Returns the files that are compiled as one, by the part's name. [Note: parts]"""
    parts: dict[str, list[Path]] = {}
    for file in sorted(files, key=lambda file: (-file.stat().st_size, file.name)):
        if file.suffix == ".cpp":
            names = next(names for start, names in _PARTS.items() if file.name.startswith(start))
            smallest = min(names, key=lambda name: sum(_sizes(parts.get(name, ()))))
            parts.setdefault(smallest, []).append(file)
    order = dict.fromkeys(name for names in _PARTS.values() for name in names)
    return {name: sorted(parts[name]) for name in order if name in parts}


def _sizes(files: Iterable[Path]) -> list[int]:
    return [file.stat().st_size for file in files]


def _build(name: str, files: Sequence[Path], library: Path, show: Show | None) -> None:
    _toolchain.check_tools()
    for left in library.parent.glob(f"{_WORK}*"):  # by a build that was killed
        shutil.rmtree(left, ignore_errors=True)
    # A folder of its own: a compiler that outlives a killed build writes where no process looks.
    work = Path(tempfile.mkdtemp(prefix=_WORK, dir=library.parent))
    try:
        with _progress(_BUILDING, show) as advance:
            built = _toolchain.compile_library(name, _parts(files), work, advance)
        built.replace(library)  # whole or not there
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _progress(what: str, show: Show | None) -> Iterator[_toolchain.Advance]:
    """Shows that something long is alive, while the block runs; yields what is called as it gets
    on.
    """
    if show is not None:
        show(what, 0, 1)
        yield functools.partial(show, what)
        show(what, 1, 1)
        return
    lines = _Lines(what)
    lines.begin()
    outcome = "failed after"
    try:
        yield lines.advance
        outcome = "done in"
    finally:
        lines.end(outcome)


class _Lines:
    """The progress on stderr: a clock on a terminal, a line after each step elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stream = sys.stderr
        self._is_terminal = self._stream.isatty()
        self._started = time.monotonic()
        self._state = "started,"
        self._num_letters = 0  # of the last line
        self._stop = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)

    def begin(self) -> None:
        self._show()
        if self._is_terminal:
            self._clock.start()

    def advance(self, num_done: int, num_steps: int) -> None:
        self._state = f"{num_done} of {num_steps},"
        if not self._is_terminal and 0 < num_done < num_steps:
            self._show()

    def end(self, outcome: str) -> None:
        self._stop.set()
        if self._is_terminal:
            self._clock.join()
        self._state = outcome
        self._show(end="\n")

    def _tick(self) -> None:
        while not self._stop.wait(1.0):
            self._show()

    def _show(self, end: str = "") -> None:
        seconds = time.monotonic() - self._started
        line = f"residency: {self._what} ... {self._state} {seconds:.0f} s"
        padded = line.ljust(self._num_letters)  # over the line before, which may be longer
        self._num_letters = len(line)
        self._stream.write(f"\r{padded}{end}" if self._is_terminal else f"{line}\n")
        self._stream.flush()
