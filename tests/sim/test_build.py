"""The build: compiled once, kept, shared by processes, and one clear error where it cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from residency.sim import BuildError, _build
from residency.sim._build import load_extension

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
from residency.sim._build import load_extension
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


def _libraries(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.so"))


def test_what_was_compiled_is_reused_and_changed_sources_are_compiled_again(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _load(source) == 42
    (library,) = _libraries(cache)
    assert library.parent.name.startswith(f"{NAME}-")
    assert not (library.parent / "build").exists()
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


def test_a_killed_build_leaves_nothing_that_blocks_the_next(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(f"#!/bin/sh\necho > {started}\nexec sleep 600\n")
    compiler.chmod(0o755)
    with monkeypatch.context() as slow:
        slow.setenv("CXX", str(compiler))
        process = _start(source)
        started.read_text()  # returns once the compiler runs
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    (folder,) = cache.iterdir()
    assert (folder / "build").exists()
    assert _libraries(cache) == []
    assert _load(source) == 42
    assert not (folder / "build").exists()


def _error(source: Path) -> str:
    with pytest.raises(BuildError) as caught:
        _load(source)
    assert caught.value.__cause__ is None or isinstance(
        caught.value.__cause__, (OSError, RuntimeError)
    )
    return str(caught.value)


def test_a_missing_compiler_is_named_with_its_package(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.delenv("CXX", raising=False)
    message = _error(source)
    assert "g++ (apt-get install g++)" in message
    assert "ninja" not in message


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


def test_a_missing_ninja_is_named_with_its_package(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    monkeypatch.setattr(sys, "executable", str(compiler.parent / "python"))
    message = _error(source)
    assert "ninja (pip install 'residency[sim]')" in message
    assert "g++" not in message


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
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda *args, **options: str(tmp_path))
    find_spec = _build.importlib.util.find_spec
    monkeypatch.setattr(
        _build.importlib.util,
        "find_spec",
        lambda name: None if name == "setuptools" else find_spec(name),
    )
    message = _error(source)
    assert all(tool in message for tool in ("g++", "ninja", "setuptools", "Python.h"))
    assert message.count("Install what is named") == 1


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
