"""The first tier leaves out tests that were measured to take long, and keeps one of each file."""

from pathlib import Path

import costs


def test_the_costly_tests_of_a_file_are_listed_but_for_its_cheapest() -> None:
    seconds = {"a.py::x": 3.0, "a.py::y": 2.0, "a.py::z": 4.0, "b.py::x": 0.1, "b.py::y": 9.0}
    assert costs.costly(seconds) == [(3.0, "a.py::x"), (4.0, "a.py::z"), (9.0, "b.py::y")]


def test_what_holds_the_sources_to_rules_is_never_listed() -> None:
    assert costs.costly({"tests/test_words.py::x": 3.0, "tests/test_words.py::y": 9.0}) == []


def test_a_file_of_which_each_test_takes_very_long_keeps_none() -> None:
    found = costs.costly({"a.py::x": 30.0, "a.py::y": 20.0})
    assert found == [(30.0, "a.py::x"), (20.0, "a.py::y")]


def test_a_measured_test_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('["a.py::x[1 2]", 1.5]\n["a.py::y", 0.01]\n')
    assert costs.measured(tmp_path) == {"a.py::x[1 2]": 1.5, "a.py::y": 0.01}


def test_each_file_of_the_list_is_there() -> None:
    files = {name.partition("::")[0] for name in costs.listed()}
    assert files  # some take long
    assert [file for file in files if not (costs.LIST.parents[2] / file).is_file()] == []
