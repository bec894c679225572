"""Telling of imports: after the module has run, once, and without a trace in the module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from residency._memory._imports import ImportWatch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("watched_module", None)


def test_a_module_is_told_of_once_it_has_been_imported(folder: Path) -> None:
    (folder / "watched_module.py").write_text("value = 1\n")
    told: list[int] = []
    watch = ImportWatch({"watched_module": lambda module: told.append(module.value)})
    watch.start()
    try:
        assert told == []
        module = importlib.import_module("watched_module")
        assert told == [1]
        importlib.reload(module)
        assert told == [1]
    finally:
        watch.stop()
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert module.__loader__ is module.__spec__.loader
    assert watch not in sys.meta_path


def test_a_module_that_is_there_already_is_told_of_at_once() -> None:
    told: list[ModuleType] = []
    watch = ImportWatch({"json": told.append})
    watch.start()
    watch.stop()
    assert [module.__name__ for module in told] == ["json"]


@pytest.mark.parametrize("end", ["value = 1", "raise ValueError('broken')"])
def test_a_module_that_is_being_executed_is_told_of_when_that_is_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    told: list[object] = []
    watches = [ImportWatch({"watched_module": lambda m: told.append(m.value)}) for _ in range(2)]

    def start() -> None:
        for watch in watches:
            watch.start()
        assert told == []

    monkeypatch.setattr(sys, "start_of_test", start, raising=False)
    (folder / "watched_module.py").write_text(f"import sys\nsys.start_of_test()\n{end}\n")
    try:
        if "raise" in end:
            with pytest.raises(ValueError, match="broken"):
                importlib.import_module("watched_module")
            assert told == []
        else:
            module = importlib.import_module("watched_module")
            assert told == [1, 1]
            assert type(module.__spec__).__name__ == "ModuleSpec"
    finally:
        for watch in watches:
            watch.stop()


def test_an_error_in_the_module_is_the_importers_and_one_in_the_call_is_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(module: ModuleType) -> None:
        raise RuntimeError("cannot be patched")

    file = folder / "watched_module.py"
    file.write_text("raise ValueError('broken')\n")
    watch = ImportWatch({"watched_module": fail})
    watch.start()
    try:
        with pytest.raises(ValueError, match="broken"):
            importlib.import_module("watched_module")
        file.write_text("value = 'whole, and longer than before'\n")
        importlib.invalidate_caches()
        assert importlib.import_module("watched_module").value.startswith("whole")
    finally:
        watch.stop()
    assert "residency leaves watched_module as it is" in caplog.text


def test_a_module_that_is_nowhere_is_not_found(folder: Path) -> None:
    watch = ImportWatch({"watched_module": print})
    watch.start()
    try:
        with pytest.raises(ModuleNotFoundError, match="watched_module"):
            importlib.import_module("watched_module")
    finally:
        watch.stop()
