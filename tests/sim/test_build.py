"""The build: compiled once, kept, shared by processes, and one clear error where it cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from residency_sim import BuildError, _build, _toolchain
from residency_sim._build import build_extension, load_extension

pytestmark = pytest.mark.sim

NAME = "residency_tiny"
SOURCE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {
    {"answer", answer, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "residency_tiny", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_residency_tiny(void) { return PyModule_Create(&definition); }
"""
LOAD = """
import sys
from pathlib import Path
from residency_sim._build import build_extension, load_extension
module = load_extension(sources=[Path(sys.argv[1])], name="residency_tiny")
print("answer", module.answer())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESIDENCY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.cpp"
    _write(path, 42)
    return path


def _write(path: Path, answer: int) -> None:
    path.write_text(f"#define ANSWER {answer}\n{SOURCE}", encoding="utf-8")


def _load(source: Path) -> int:
    return int(load_extension(sources=[source], name=NAME).answer())


def _start(source: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its compiler can be killed with it
    )


def _left(folder: Path) -> list[str]:
    """Returns what a build has left in its folder beside the library and the lock."""
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".so" and p.name != "lock")


def _libraries(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.so"))


def test_what_was_compiled_is_reused_and_changed_sources_are_compiled_again(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _load(source) == 42
    (library,) = _libraries(cache)
    assert library.parent.name.startswith(f"{NAME}-")
    assert _left(library.parent) == []
    with monkeypatch.context() as without:
        without.setenv("CXX", "false")
        assert _load(source) == 42
        _write(source, 43)
        with pytest.raises(BuildError):  # which shows that a compiler was asked
            _load(source)
    assert _load(source) == 43
    assert len(_libraries(cache)) == 2


def test_two_processes_at_once_compile_once(cache: Path, source: Path) -> None:
    processes = [_start(source) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all("answer 42" in output for output in outputs)
    assert sum("building the simulated accelerator" in output for output in outputs) == 1
    assert len(_libraries(cache)) == 1


class SlowCompiler:
    """A compiler that says that it runs and then waits until it is ended."""

    def __init__(self, folder: Path) -> None:
        self._started = folder / "started"
        os.mkfifo(self._started)
        self.path = folder / "slow-compiler"
        self.path.write_text(f"#!/bin/sh\necho $$ > {self._started}\nexec sleep 600\n")
        self.path.chmod(0o755)

    def wait_until_it_runs(self) -> int:
        """Returns its process."""
        return int(self._started.read_text())


@pytest.fixture
def slow_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowCompiler:
    compiler = SlowCompiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


def test_a_killed_build_leaves_nothing_that_blocks_the_next(
    cache: Path, source: Path, slow_compiler: SlowCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _start(source)
    orphan = slow_compiler.wait_until_it_runs()
    process.kill()
    process.wait()
    (folder,) = cache.iterdir()
    (work,) = _left(folder)
    assert _libraries(cache) == []
    monkeypatch.delenv("CXX")
    assert _load(source) == 42  # beside the compiler that is left
    assert _left(folder) == []
    assert not (folder / work).exists()
    os.killpg(orphan, signal.SIGKILL)
    process.communicate()


def test_an_interrupted_build_ends_its_compilers_and_leaves_nothing(
    cache: Path, source: Path, slow_compiler: SlowCompiler
) -> None:
    process = _start(source)
    compiler = slow_compiler.wait_until_it_runs()
    process.send_signal(signal.SIGINT)  # to Python alone: a notebook's kernel gets it so
    output = process.communicate()[0]
    assert "KeyboardInterrupt" in output
    with pytest.raises(ProcessLookupError):
        os.kill(compiler, 0)
    (folder,) = cache.iterdir()
    assert _left(folder) == []
    assert _libraries(cache) == []


def test_an_interrupt_while_compilers_are_started_ends_them(
    cache: Path, source: Path, slow_compiler: SlowCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers = []

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            super().submit(*arguments, **options)
            compilers.append(slow_compiler.wait_until_it_runs())
            raise KeyboardInterrupt

    monkeypatch.setattr(_toolchain, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_extension(sources=[source], name=NAME)
    with pytest.raises(ProcessLookupError):
        os.kill(compilers[0], 0)
    assert _libraries(cache) == []


def test_a_process_that_waits_for_another_ones_build_says_so(
    cache: Path, source: Path, slow_compiler: SlowCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = _start(source)
    slow_compiler.wait_until_it_runs()
    monkeypatch.delenv("CXX")
    waiter = _start(source)
    assert waiter.stdout is not None
    assert "waiting for another process" in waiter.stdout.readline()
    builder.send_signal(signal.SIGINT)
    output = waiter.communicate()[0]
    assert "answer 42" in output, output  # the other one failed, so this one compiled
    builder.communicate()


def test_what_is_built_is_found_in_a_cache_that_cannot_be_written(
    cache: Path, source: Path
) -> None:
    _load(source)
    (library,) = _libraries(cache)
    (library.parent / "lock").unlink()
    (library.parent / "lock").mkdir()  # also root cannot open it
    assert build_extension(sources=[source], name=NAME) == library


def test_a_library_that_the_wheel_brings_is_taken_and_nothing_is_compiled(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build_extension(sources=[source], name=NAME)
    cache.rename(tmp_path / "shipped")
    monkeypatch.setattr(_build, "_SHIPPED", tmp_path / "shipped")
    found = build_extension(sources=[source], name=NAME)
    assert found == tmp_path / "shipped" / library.relative_to(cache)
    assert not cache.exists()


def test_progress_goes_to_the_caller_where_it_asks(
    cache: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[str, int, int]] = []

    def show(what: str, num_done: int, num_steps: int) -> None:
        shown.append((what, num_done, num_steps))

    for _ in range(2):  # of which the second finds it built
        build_extension(sources=[source], name=NAME, show=show)
    steps = [step for _, *step in shown]
    assert steps == [[0, 1], [0, 2], [1, 2], [2, 2], [1, 1]]
    assert capsys.readouterr().err == ""


def test_every_source_is_compiled_once_and_by_one_name() -> None:
    sources = sorted(_build._SOURCES.iterdir())
    compiled = [file for part in _build._parts(sources).values() for file in part]
    assert sorted(compiled) == [file for file in sources if file.suffix == ".cpp"]


def _error(source: Path) -> str:
    with pytest.raises(BuildError) as caught:
        _load(source)
    assert caught.value.__cause__ is None or isinstance(
        caught.value.__cause__, (OSError, RuntimeError)
    )
    return str(caught.value)


def test_a_torch_that_is_too_old_is_named(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_toolchain.torch, "__version__", "2.10.1+cu128")
    with pytest.raises(BuildError, match=r"torch is 2\.10\.1\+cu128, and .* 2\.11 or newer"):
        build_extension(sources=[source], name=NAME)


def test_a_missing_compiler_is_named_with_its_package(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.delenv("CXX", raising=False)
    message = _error(source)
    assert "g++ (apt-get install g++)" in message
    assert "Python.h" not in message


def test_a_launcher_before_the_compiler_is_no_part_of_its_name(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "launch it"
    launcher.write_text(f'#!/bin/sh\necho launched >> {tmp_path}/log\nexec "$@"\n')
    launcher.chmod(0o755)
    shorter = tmp_path / "launch"
    shorter.symlink_to(launcher)
    monkeypatch.setenv("CXX", f"{shorter} g++")
    assert _load(source) == 42
    assert "launched" in (tmp_path / "log").read_text()
    _write(source, 43)
    monkeypatch.setenv("CXX", f"'{launcher}' no-such-compiler -O1")
    assert "the C++ compiler no-such-compiler (" in _error(source)


def test_sources_that_cannot_be_read_are_named(cache: Path, tmp_path: Path) -> None:
    message = _error(tmp_path / "gone.cpp")
    assert "gone.cpp" in message
    assert "Install the package again" in message


def test_missing_headers_of_python_are_named_with_their_package(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda *args, **options: str(tmp_path))
    assert "Python.h (apt-get install python3-dev)" in _error(source)


def test_all_that_is_missing_is_named_in_one_error(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda *args, **options: str(tmp_path))
    message = _error(source)
    assert all(tool in message for tool in ("g++", "Python.h"))
    assert message.count("Install the named tools") == 1


def test_an_error_of_the_compiler_is_shown_in_its_words(cache: Path, source: Path) -> None:
    source.write_text("this is no C++;\n", encoding="utf-8")
    message = _error(source)
    assert "did not compile against torch" in message
    assert "tiny.cpp:1:1: error:" in message
    assert _libraries(cache) == []


def test_a_cache_that_cannot_be_written_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "a-file"
    occupied.touch()  # also root cannot make a folder below a file
    monkeypatch.setenv("RESIDENCY_CACHE", str(occupied))
    message = _error(source)
    assert str(occupied) in message
    assert "RESIDENCY_CACHE" in message


def test_the_cache_is_the_users_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESIDENCY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _build.cache_directory() == tmp_path / "residency"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _build.cache_directory() == tmp_path / ".cache" / "residency"
    monkeypatch.setenv("RESIDENCY_CACHE", str(tmp_path / "mine"))
    assert _build.cache_directory() == tmp_path / "mine"
