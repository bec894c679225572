"""Which project a folder has the source of, at which commit, and what runs of it there are."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Project:
    """A project whose source can be run.

    Attributes:
        package: A file by which its source is recognised.
        roots: Folders that go onto the path of modules.
        commit: The one that was read, and that the docs have the table of.
        repository: Where it is.
        driver: The module that runs it.
        titles: The kinds of runs, and what each is called in the table.
        more: Further arguments of a driver, each for the kinds that are named.
    """

    package: str
    roots: tuple[str, ...]
    commit: str
    repository: str
    driver: str
    titles: Mapping[str, str]
    more: tuple[tuple[str, tuple[str, ...]], ...] = ()


PROJECTS = {
    "XTuner": Project(
        "xtuner/v1/engine/train_engine.py",
        (".",),
        "b934f462095c1e750229de35367c50ae36caa786",
        "InternLM/xtuner",
        "run_xtuner",
        {
            "plain": "`AdamWConfig`",
            "stock": "`swap_optimizer=True`",
            "ours": "`OffloadedAdamWConfig`",
        },
        (("twice", ("stock", "ours")), ("ranks", ("stock", "ours"))),
    ),
    "prime-rl": Project(
        "src/prime_rl/trainer/ckpt.py",
        ("src", "packages/prime-rl-configs/src"),
        "559b44772e471d1538537b8805cc77f3824a5e64",
        "PrimeIntellect-ai/prime-rl",
        "run_prime_rl",
        {
            "plain": "`optim_cpu_offload = false`",
            "stock": "`optim_cpu_offload = true`",
            "ours": "`offload_built_by`",
        },
    ),
    "torchtitan": Project(
        "torchtitan/trainer.py",
        (".",),
        "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a",
        "pytorch/torchtitan",
        "run_torchtitan",
        {
            "plain": "`OptimizersContainer`",
            "ours": "`OffloadedOptimizers`",
            "saves": "`ResidencyCheckpointManager`",
            "both": "both",
        },
        (
            ("resume", ("plain", "ours", "saves", "both")),
            ("experts", ("plain", "both")),
            ("experts-resume", ("plain", "both")),
            ("ranks", ("plain", "both")),
            ("ranks-resume", ("plain", "both")),
        ),
    ),
}


def recognise(folder: Path) -> str | None:
    """Returns the name of the project whose source a folder has."""
    return next((n for n, p in PROJECTS.items() if (folder / p.package).is_file()), None)


def commit_of(folder: Path) -> str | None:
    """Returns the commit that is checked out in a folder, if git knows."""
    if not (folder / ".git").exists():
        return None  # of a folder above it git would speak, too
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def said_of(name: str, folder: Path) -> str:
    """Returns a line about a source: its commit, and whether it is the one that was read."""
    project, commit = PROJECTS[name], commit_of(folder)
    if commit is None:
        return f"{project.repository}, of unknown commit (the folder is no checkout of git)"
    read = "" if commit == project.commit else f" ({project.commit[:12]} was read)"
    return f"{project.repository} {commit[:12]}{read}"
