"""What a release and the workflows name is there: targets of make, files, versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import residency

yaml = pytest.importorskip("yaml")  # comes with the frameworks

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


def commands_of(workflow: Path) -> list[str]:
    """Returns the commands of a workflow, with the values of its matrix in their places."""
    commands = []
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        rows = matrix.get("include") or [{"job": each} for each in matrix.get("job", [""])]
        for row in rows:
            for step in job["steps"]:
                command = step.get("run", "")
                for key, value in row.items():
                    command = command.replace(f"${{{{ matrix.{key} }}}}", value)
                commands.append(command)
    return commands


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_and_tests_that_there_are(workflow: Path) -> None:
    commands = "\n".join(commands_of(workflow))
    called = re.findall(r"\bmake ([a-z-]+)", commands)
    assert called
    assert set(called) <= TARGETS
    assert "${{ matrix." not in commands
    for file in re.findall(r"tests/\S+\.py", commands):
        assert (ROOT / file).is_file(), file


def test_the_hooks_before_a_commit_have_the_versions_of_the_checks() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    versions = {repo["repo"].rpartition("/")[2]: repo["rev"].removeprefix("v") for repo in hooks}
    assert versions == {
        "ruff-pre-commit": PINS["ruff"],
        "mirrors-clang-format": PINS["clang-format"],
    }


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == residency.__version__


def test_both_distributions_have_one_version_and_ask_for_just_that() -> None:
    library, simulator = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for folder in (".", "sim")
    )
    assert library["project"]["optional-dependencies"]["sim"] == [
        f"residency-sim=={residency.__version__}"
    ]
    assert f"residency=={residency.__version__}" in simulator["project"]["dependencies"]
    of_library = ROOT / library["tool"]["hatch"]["version"]["path"]
    of_simulator = ROOT / "sim" / simulator["tool"]["hatch"]["version"]["path"]
    assert of_library.samefile(of_simulator)
    assert library["project"]["requires-python"] == simulator["project"]["requires-python"]
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "sim" / "LICENSE").read_bytes()


def test_every_issue_template_asks_for_something() -> None:
    for template in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        content = yaml.safe_load(template.read_text())
        if template.stem != "config":
            assert content["name"], template
            assert content["description"], template
            assert [part for part in content["body"] if part["type"] == "textarea"], template
