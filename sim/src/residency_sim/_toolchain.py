"""Runs the C++ compiler: which one it is, what it is given, and how many of them at once.

Knows nothing of the cache; `_build` decides when something is compiled, and where to. Whatever ends
a compile early ends the compilers that it started.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from residency._errors import BuildError

Advance = Callable[[int, int], None]
"""Is called with the number of steps that are done, and of all."""
_Count = Callable[[int], None]

# With -O2 a compile takes a quarter more, and a training step as long.
_FLAGS = ["-O1", "-g0", "-std=c++20", "-fvisibility=hidden", "-fno-semantic-interposition"]
_LIBRARIES = ["c10", "torch_cpu", "torch", "torch_python"]
_LINK = "link"
_OLDEST_TORCH = (2, 11)
# A Ctrl-C that comes just before Python begins a wait does not end the wait (seen once in 18 starts
# on a busy machine); between two of them it is raised.
_SECONDS_BETWEEN_LOOKS = 0.5


def recipe() -> list[str]:
    """Returns what a library depends on beside its sources and torch, as words."""
    abi = str(sysconfig.get_config_var("SOABI"))  # of Python, the same in all its patch releases
    return [abi, platform.machine(), *_FLAGS]


def check_tools() -> None:
    """Checks that this machine can compile.

    Raises:
        BuildError: torch is too old, or a compiler or Python's headers are missing; the message
            says what to install.
    """
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _OLDEST_TORCH:
        raise BuildError(
            f"torch is {torch.__version__}, and the simulated accelerator is compiled against 2.11 "
            "or newer, whose rules it has; what an older torch takes is not simulated. Install one "
            "in an environment of its own."
        )
    missing = [
        f"the C++ compiler {program} (apt-get install g++)"
        for program in _programs(_compiler())
        if shutil.which(program) is None
    ]
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("Python.h (apt-get install python3-dev)")
    if missing:
        raise BuildError(
            "The simulated accelerator is compiled at its first use, and this machine lacks "
            f"{'; '.join(missing)}. Install the named tools and run this again."
        )


def compile_library(
    name: str, parts: Mapping[str, Sequence[Path]], work: Path, advance: Advance
) -> Path:
    """Compiles a library in a folder of its own and returns where it is.

    Args:
        name: The module's name in the sources.
        parts: Files that are compiled as one, by the part's name.
        work: An empty folder.
        advance: Is called before the first step and after each.

    Raises:
        BuildError: The compiler failed; the message has its words.
    """
    commands = {}
    for part, files in parts.items():
        text = "".join(f'#include "{file.name}"\n' for file in files)
        (work / _unit(part, "cpp")).write_text(text, encoding="utf-8")
        folders = dict.fromkeys(file.parent for file in files)
        commands[part] = _compile_command(name, part, list(folders))
    library = work / f"{name}.so"
    num_steps = len(commands) + 1
    advance(0, num_steps)
    try:
        _run_all(commands, work, lambda num_done: advance(num_done, num_steps))
        _run_all({_LINK: _link_command(commands, library)}, work, lambda _: None)
    except (RuntimeError, OSError) as error:
        raise BuildError(
            f"The simulated accelerator did not compile against torch {torch.__version__}. "
            "Install a torch that CONTRIBUTING.md lists, or the tools that are missing. It said:\n"
            f"{error}"
        ) from error
    advance(num_steps, num_steps)
    return library


def _unit(part: str, suffix: str) -> str:
    return f"part_{part}.{suffix}"  # which no source is called, or it would include itself


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _programs(compiler: Sequence[str]) -> list[str]:
    """Returns the programs of a command such as ``ccache g++ -m64``: the first words."""
    return [*compiler[:1], *(word for word in compiler[1:2] if not word.startswith("-"))]


def _compile_command(name: str, part: str, folders: Sequence[Path]) -> list[str]:
    root = Path(torch.__file__).parent / "include"
    system = [root, root / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    # Relative names: what a launcher such as ccache keeps is found again from another folder.
    return [
        *_compiler(),
        f"-DTORCH_EXTENSION_NAME={name}",
        *(f"-iquote{folder.absolute()}" for folder in folders),
        *(word for folder in system for word in ("-isystem", str(folder))),
        *("-fPIC", *_FLAGS, "-c", _unit(part, "cpp"), "-o", _unit(part, "o")),
    ]


def _link_command(parts: Mapping[str, object], library: Path) -> list[str]:
    objects = [_unit(part, "o") for part in parts]
    torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{n}" for n in _LIBRARIES)]
    return [*_compiler(), *objects, "-shared", *torch_libraries, "-o", library.name]


def _num_jobs() -> int:
    """Returns how many compilers run at once: ``MAX_JOBS``, as torch has it, or one a processor."""
    given = os.environ.get("MAX_JOBS", "")
    return max(1, int(given)) if given.isdigit() else len(os.sched_getaffinity(0))


def _run_all(commands: Mapping[str, Sequence[str]], work: Path, advance: _Count) -> None:
    """Runs commands, several at once and in their order.

    Raises:
        RuntimeError: One failed; it has the words of the first. None is left running.
        OSError: One could not be started.
    """
    runs = _Runs(work)
    with ThreadPoolExecutor(_num_jobs(), "residency-compile") as pool:
        try:  # of the starts too: a compiler runs before the last one has returned
            pending = {pool.submit(runs.run, command) for command in commands.values()}
            num_done = 0
            while pending:
                done, pending = wait(pending, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                for future in done:
                    future.result()
                    num_done += 1
                    advance(num_done)
        except BaseException:
            runs.stop()
            raise


class _Runs:
    """The compilers that run at one time."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False

    def run(self, command: Sequence[str]) -> None:
        """Runs one, unless all were stopped."""
        with self._lock:  # a stop sees each process that was started, and none starts after it
            if self._is_stopped:
                return
            process = subprocess.Popen(
                command,
                cwd=self._work,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,  # a compiler is several processes, which end together
            )
            self._running.add(process)
        output, _ = process.communicate()  # waits for the compiler's end: it has no other product
        with self._lock:
            self._running.discard(process)
        if process.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}\nstatus {process.returncode}\n{output}")

    def stop(self) -> None:
        """Ends those that run, and lets none begin."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):  # it has ended just now
                    os.killpg(process.pid, signal.SIGKILL)
