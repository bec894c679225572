"""``make test-projects``: what it recognises, what its table says, and what the docs have of it.

The runs themselves need other projects' sources, and an environment of their own.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "other-projects.md"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def part(name: str) -> Any:
    return importlib.import_module(f"benchmarks.projects.{name}")


def source_of(name: str, folder: Path) -> Path:
    file = folder / part("sources").PROJECTS[name].package
    file.parent.mkdir(parents=True)
    file.touch()
    return folder


def test_a_folder_is_recognised_by_what_is_in_it(tmp_path: Path) -> None:
    sources = part("sources")
    for name in sources.PROJECTS:
        assert sources.recognise(source_of(name, tmp_path / name)) == name
    assert sources.recognise(tmp_path) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "give one folder for each project"),
        (["nothing"], "nothing: no source of a project that is known"),
        (["torchtitan", "again"], "give one folder for each project"),
    ],
)
def test_folders_that_are_no_sources_are_named_and_nothing_runs(
    given: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nothing").mkdir()
    for folder in ("torchtitan", "again"):
        source_of("torchtitan", tmp_path / folder)
    assert part("__main__").main(given) == 2
    assert said in capsys.readouterr().out


def test_a_run_that_fails_is_told_with_its_last_lines_and_no_report_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = part("__main__")
    written: list[object] = []
    monkeypatch.setattr(main, "report_path", lambda *_: written.append(_))
    project = dataclasses.replace(main.PROJECTS["prime-rl"], driver="run_nothing")
    monkeypatch.setitem(main.PROJECTS, "prime-rl", project)
    assert main.main([str(source_of("prime-rl", tmp_path / "prime-rl"))]) == 1
    shown = capsys.readouterr()
    assert "run_nothing plain: status 1" in shown.err
    assert "No module named benchmarks.projects.run_nothing" in shown.err
    assert "| failed |" in shown.out
    assert written == []


def test_the_commit_is_told_where_git_knows_it(tmp_path: Path) -> None:
    sources = part("sources")
    assert "of unknown commit" in sources.said_of("torchtitan", tmp_path)
    for arguments in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    commit = sources.commit_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert sources.said_of("torchtitan", tmp_path).startswith(f"pytorch/torchtitan {commit[:12]} (")


def test_a_package_that_is_not_installed_is_stood_in_for_and_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_ins = part("stand_ins").StandIns("not_a_package_of_anyone json")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, stand_ins])
    absent: Any = importlib.import_module("not_a_package_of_anyone.inner")

    class Below(absent.Something):
        def __init__(self, number: int) -> None:
            self.number = number

    def function() -> int:
        return 3

    assert Below(3).number == 3
    assert absent.remote(function) is function
    assert absent.remote(num_cpus=1)(function) is function
    assert absent.jit | None
    with pytest.raises(AttributeError):
        absent.__file_that_is_not_there__  # noqa: B018
    importlib.import_module("json")
    assert stand_ins.used == {"not_a_package_of_anyone"}
    for name in [n for n in sys.modules if n.startswith("not_a_package_of_anyone")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_tensor_that_one_picture_lacks_differs() -> None:
    lab = part("lab")
    one = {"a": torch.ones(2), "b": torch.ones(2)}
    assert lab.differing(one, one) == [0, 2]
    assert lab.differing(one, {"a": torch.zeros(2)}) == [2, 2]
    assert lab.differing({}, one) == [2, 2]


def test_the_table_shows_what_differs_and_what_failed() -> None:
    rows = part("rows")
    plain = {
        "figures": {rows.STEPS: 3 * 2**20},
        "losses": [3.0, 2.0, 1.0],
        "losses after the resume": [2.0, 1.0],
        "rates": [[0.01], [0.01]],
        "stand-ins": ["ray"],
    }
    parts = [{"differ": {"x": [0, 4]}}, {"differ": {"y": [2, 4]}, "stand-ins": ["fla"]}]
    ours = rows.merged([{**plain, "losses after the resume": [2.5, 1.0]}, *parts])
    assert ours["stand-ins"] == ["fla", "ray"]
    ours["rates"] = [[0.01, 3.0], [1e-10, 3.0]]
    titles = {"plain": "`A`", "stock": "`B`", "ours": "`C`"}
    lines = rows.table(titles, {"plain": plain, "stock": None, "ours": ours})
    assert lines[0] == "| allocated on the device, MiB | `A` | `B` | `C` |"
    for expected in (
        f"| {rows.STEPS} | 3.0 | failed | 3.0 |",
        f"| {rows.SAVE} | - | failed | - |",
        "| x | - | - | 0 of 4 |",
        "| y | - | - | **2 of 4** |",
        "| losses after the resume | as uninterrupted | - | **others** |",
        "| rates and counters after the load | as saved | - | **1e-10 for 0.01** |",
    ):
        assert expected in lines, expected


def newest_sections() -> dict[str, str]:
    """Returns each project's section of the newest report that has one."""
    found = {}
    for report in sorted((ROOT / "benchmarks" / "reports").glob("*_simulated_projects*.md")):
        for section in re.split("^## ", report.read_text(), flags=re.MULTILINE)[1:]:
            found[section.partition("\n")[0]] = section
    return found


def test_the_docs_have_the_tables_of_the_newest_reports_and_the_commits_that_were_read() -> None:
    page, projects = PAGE.read_text(), part("sources").PROJECTS
    sections = newest_sections()
    assert set(sections) == set(projects)
    for name, project in projects.items():
        (table,) = re.findall(r"(?:^\|.*\n)+", sections[name], re.MULTILINE)
        assert table in page
        assert project.commit in page
        assert f"{project.repository} {project.commit[:12]}\n" in sections[name]


def test_the_readme_has_rows_of_the_newest_report_of_all() -> None:
    rows = part("rows")
    report = max((ROOT / "benchmarks" / "reports").glob("*_simulated_projects.md")).read_text()
    readme = (ROOT / "README.md").read_text()
    for table in re.findall(r"(?:^\|.*\n)+", report, re.MULTILINE):
        cells = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
        found = {first: others for first, *others in cells}
        for column, title in enumerate(cells[0][1:]):
            figures = [found[row][column] for row in (rows.STEPS, rows.LOAD, rows.RESUMED)]
            assert f"| {title} | {' | '.join(figures)} |" in readme


def test_the_overrides_that_the_run_of_torchtitan_names_stand_in_the_how_to() -> None:
    page = (ROOT / "docs" / "how-to" / "use-with-torchtitan.md").read_text()
    overrides = part("run_torchtitan").OVERRIDES
    assert set(overrides) == set(part("sources").PROJECTS["torchtitan"].titles)
    for name in {each for named in overrides.values() for each in named}:
        assert name in page


def test_ranks_of_one_run_get_their_number_and_one_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = part("__main__")
    started: list[tuple[list[str], int]] = []

    def start(project: object, source: object, arguments: list[str], log: Path, port: int) -> None:
        started.append((arguments, port))
        log.with_suffix(".json").write_text("{}")

    monkeypatch.setattr(main, "_start", start)
    monkeypatch.setattr(main, "_end_of", lambda *_: 0)
    project = part("sources").PROJECTS["torchtitan"]
    given = str(tmp_path)
    assert main._run(project, tmp_path, "both", tmp_path, ("ranks-resume",)) == [{}, {}]
    arguments, ports = zip(*started, strict=True)
    assert arguments == (["both", given, "resume", "0"], ["both", given, "resume", "1"])
    assert len(set(ports)) == 1
    assert main._run(project, tmp_path, "both", tmp_path, ("ranks",)) == [{}, {}]
    assert started[-1][0] == ["both", given, "1"]
