import pytest

from residency import RefusedError
from residency.integrations._common._framework import load_framework, missing_in, named_with_version


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
