"""Compiles the simulated accelerator once and keeps it.

The extension goes into a folder of the per-user cache named after all that could change it: the
versions of torch and Python, and a hash of the sources. One process builds, the others wait for its
file lock; a build that was killed leaves no library behind, so the next one starts over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from residency._errors import BuildError

_NAME = "residency_sim_core"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ["-O2", "-g0", "-std=c++20", "-fvisibility=hidden", "-fno-semantic-interposition"]
_INSTALL_PYTHON_PARTS = "pip install 'residency[sim]'"


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
) -> Path:
    """Builds the extension if the cache does not have it, and returns where it is.

    Args:
        sources: C++ files and the headers beside them; those of the simulated accelerator by
            default.
        name: The module's name in the sources.

    Raises:
        BuildError: A compiler, ninja, setuptools or Python's headers are missing, the sources
            cannot be read, the cache cannot be written, or the compiler failed.
    """
    try:
        files = sorted(_SOURCES.iterdir()) if sources is None else sorted(sources)
        fingerprint = _fingerprint(files)
    except OSError as error:
        raise BuildError(
            f"The sources of the simulated accelerator cannot be read: {error}. Install the "
            "package again, as a user who may read it."
        ) from error
    folder = cache_directory() / f"{name}-{fingerprint}"
    library = folder / f"{name}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not library.exists():
                units = [file for file in files if file.suffix == ".cpp"]
                _build(name, units, folder, library)
    except OSError as error:
        raise BuildError(
            f"The folder for built extensions, {folder}, cannot be used: {error}. "
            "Set RESIDENCY_CACHE to a folder that can be written."
        ) from error
    return library


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.python_version(), platform.machine(), *_FLAGS):
        digest.update(part.encode() + b"\0")
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel drops the lock when its holder dies, so that a killed build blocks nobody.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _import_library(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(name: str, sources: Sequence[Path], folder: Path, library: Path) -> None:
    _check_tools()
    work = folder / "build"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    with _progress("building the simulated accelerator (once for this torch)"):
        built = _compile(name, sources, work)
    built.replace(library)  # whole or not there
    shutil.rmtree(work, ignore_errors=True)


def _check_tools() -> None:
    missing = []
    for program in _programs(_compiler()):
        if shutil.which(program) is None:
            missing.append(f"the C++ compiler {program} (apt-get install g++)")
    if _ninja_folder() is None:
        missing.append(f"ninja ({_INSTALL_PYTHON_PARTS})")
    if importlib.util.find_spec("setuptools") is None:
        missing.append(f"setuptools ({_INSTALL_PYTHON_PARTS})")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("Python.h (apt-get install python3-dev)")
    if missing:
        raise BuildError(
            "The simulated accelerator is compiled at its first use, and this machine lacks "
            f"{'; '.join(missing)}. Install what is named and run this again."
        )


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _programs(compiler: Sequence[str]) -> list[str]:
    """Returns the programs of a command such as ``ccache g++ -m64``: the first words."""
    return [*compiler[:1], *(word for word in compiler[1:2] if not word.startswith("-"))]


def _as_one_program(compiler: Sequence[str], work: Path) -> str:
    """Returns a program that runs ``compiler``: torch quotes ``CXX`` as if it were one word."""
    if len(compiler) == 1:
        return compiler[0]
    folder = work / "bin"
    folder.mkdir()
    # Torch warns about a compiler whose name it does not know.
    script = folder / Path(_programs(compiler)[-1]).name
    script.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
    script.chmod(0o755)
    return str(script)


def _ninja_folder() -> str | None:
    # pip puts ninja beside the interpreter, which need not be on PATH.
    found = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    return str(Path(found).parent) if found else None


def _compile(name: str, sources: Sequence[Path], work: Path) -> Path:
    from torch.utils import cpp_extension  # imports setuptools, which only a build needs

    # torch counts the builds of a name in a process: it would skip one that is tried again after it
    # failed, and give one whose sources changed another name.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
    before = {name: os.environ.get(name) for name in ("PATH", "CXX")}
    os.environ["PATH"] = os.pathsep.join(filter(None, [_ninja_folder(), before["PATH"]]))
    try:
        os.environ["CXX"] = _as_one_program(_compiler(), work)
        cpp_extension.load(
            name,
            [str(source) for source in sources],
            extra_cflags=_FLAGS,
            build_directory=str(work),
            is_python_module=False,
            with_cuda=False,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"The simulated accelerator did not compile against torch {torch.__version__}. "
            "Install a torch that CONTRIBUTING.md lists, or what the compiler misses. It said:\n"
            f"{error}"
        ) from error
    finally:
        for variable, value in before.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
    return work / f"{name}.so"


@contextlib.contextmanager
def _progress(message: str) -> Iterator[None]:
    """Shows on stderr that a long build is alive: a clock on a terminal, two lines elsewhere."""
    stream = sys.stderr
    started = time.monotonic()
    stop = threading.Event()
    back, end = ("\r", "") if stream.isatty() else ("", "\n")

    def show(state: str, end: str) -> None:
        seconds = time.monotonic() - started
        stream.write(f"{back}residency: {message} ... {state} {seconds:.0f} s{end}")
        stream.flush()

    def tick() -> None:
        while not stop.wait(1.0):
            show("working,", end)

    show("started,", end)
    clock = threading.Thread(target=tick, daemon=True)
    if stream.isatty():
        clock.start()
    outcome = "failed after"
    try:
        yield
        outcome = "done in"
    finally:
        stop.set()
        if clock.is_alive():
            clock.join()
        show(outcome, "\n")
