import importlib
import re
import sys
from importlib.metadata import version

import pytest

from residency import RefusedError
from residency.integrations._common._framework import (
    hook_in,
    load_framework,
    missing_in,
    named_with_version,
    names_of,
)


def test_the_first_module_that_is_installed_is_imported() -> None:
    assert load_framework("not_a_module_of_anyone", "json", extra="x").__name__ == "json"


def test_a_missing_framework_is_an_error_with_the_line_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"pip install 'residency\[lightning\]'"):
        load_framework("not_a_module_of_anyone.inner", extra="lightning")


def test_what_a_framework_itself_lacks_is_not_taken_for_the_framework(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed_framework.py").write_text("import not_a_module_of_anyone")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="'not_a_module_of_anyone'"):
        load_framework("half_installed_framework", extra="x")


def test_messages_name_the_version() -> None:
    assert named_with_version("pytest") == f"pytest {pytest.__version__}"
    assert "unknown version" in named_with_version("not-a-distribution-of-anyone")
    error = missing_in("pytest", "hook of a name", "install another")
    assert isinstance(error, RefusedError)
    assert pytest.__version__ in str(error)


def test_a_hook_that_a_version_lacks_is_named_with_the_version() -> None:
    remedy = "install another"
    assert hook_in(pytest, "fixture", distribution="pytest", remedy=remedy) is pytest.fixture
    with pytest.raises(RefusedError, match=rf"pytest {pytest.__version__} has no pytest\.gone, wh"):
        hook_in(pytest, "gone", distribution="pytest", remedy=remedy)


def test_an_import_that_a_version_lacks_is_named_with_the_version() -> None:
    with (
        pytest.raises(
            ImportError, match=rf"^pytest {pytest.__version__} lacks .*'gone' from 'pytest'"
        ) as info,
        names_of("pytest", remedy="install another"),
    ):
        from pytest import gone  # noqa: F401, PT013 - it is not there
    assert info.value.name == "pytest"
    with pytest.raises(ModuleNotFoundError), names_of("pytest", remedy="install another"):
        import not_a_module_of_anyone  # noqa: F401


def test_a_torch_without_what_dcp_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("residency.integrations.dcp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("torch.distributed.checkpoint.staging.AsyncStager")
    with pytest.raises(ImportError, match=rf"torch {re.escape(version('torch'))} lacks .*AsyncS"):
        importlib.import_module("residency.integrations.dcp")


def test_the_report_of_a_run_of_tests_says_the_versions(pytestconfig: pytest.Config) -> None:
    root = pytestconfig.rootpath
    shown = pytestconfig.hook.pytest_report_header(config=pytestconfig, start_path=root)
    assert f"frameworks: torch {version('torch')}" in str(shown)
