"""Holds dry runs of a public script against the peaks that its authors printed on their GPUs.

``python -m benchmarks.published /path/to/litgpt`` takes a clone of Lightning-AI/litgpt with its
history, and reads the commits of the published runs from it. Their scripts run as they are, but for
the constants that their authors changed from row to row: the micro batch and the number of devices.
They need ``pip install "jsonargparse[signatures]"`` beside the tests' environment, and an hour;
words behind the folder, as ``a10g lora``, choose among them. A clone of rasbt/LLMs-from-scratch
does, too (`others`), with a report of its own.

A script prints ``torch.cuda.max_memory_allocated()`` as its training ends, which is the published
figure. The report is ``reports/YYYY-MM-DD_simulated_published.md``, written anew after each run.
"""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.__main__ import report_heading, report_path
from benchmarks.published.others import Other, others_in
from benchmarks.published.runs import CONFIGS, LONGEST, OF_CONFIGS, OF_TABLES, Run

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1800  # seconds for one run, on a machine that has other work
_SAID = re.compile(r"^Memory used: (\S+) GB$", re.MULTILINE)
_FITS, _DOES_NOT = "fits:", "does not fit:"
TABLE = (
    "| run | GPU | published, GB | predicted, GB | error |",
    "|---|---|---:|---:|---:|",
)
MADE_UP = """
The scripts are those of the commit; what they download is made up (benchmarks/published/others.py
says how), and torch is the one above. A figure has the unit that its row names.
""".strip()
NOTES = """
The scripts are those of the commits that the figures were published with; torch, Lightning and the
kernels are the ones of today, where the authors had torch 2.1.0 (A100) and 2.2 or 2.3 (A10G).
Nothing was changed in residency for these peaks. Published figures have two digits behind the
point, and so have the predicted ones: the script prints them itself.
A100: its page names commit 8641822, with which 20.60 GB are predicted in place of Llama 2's 21.30.
Its RMSNorm kept half as much as that of 6178c7c, of eight days later, after which the page was
merged. What adapters need was published with 0f021f3.
The longest sample of the A100's runs, which comes first, is of the published length. A sharded run
keeps whole gradients between micro batches, so that later samples count, too: its two figures are
those of shorter ones and of all as long.
A10G: the lengths of the samples are not published. Here each fills the 512 tokens that the
configuration cuts it at.
A run of benchmarks/published/runs.py that has no row here was not made for this report.
""".strip()


def main(arguments: Sequence[str]) -> int:
    """Prints a row of the report for each run; returns 0 when all ran.

    Args:
        arguments: The clone's folder, and words: only runs that have all of them are made.
    """
    if not arguments or not (Path(arguments[0]) / "").is_dir():
        print("give the folder of a clone: git clone https://github.com/Lightning-AI/litgpt")
        return 2
    clone = Path(arguments[0])
    known = list(others_in(functools.partial(_file_of, clone))) or [*OF_TABLES, *OF_CONFIGS]
    chosen = [
        run for run in known if all(word in f"{run.title} {run.device}" for word in arguments[1:])
    ]
    return _compare(clone, chosen, known)


def _compare(clone: Path, runs: Sequence[Run | Other], known: Sequence[Run | Other]) -> int:
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="residency-published-") as given:
        for run in runs:
            folder = _sources(clone, Path(given), run.commit)
            if isinstance(run, Other):
                predicted = [_predicted_of_other(run, folder)]
            else:
                predicted = [_predicted(run, folder, texts) for texts in run.texts]
            print(row(run, predicted), flush=True)
            if None in predicted:
                has_failed = True
            else:
                _report(row(run, predicted), known)
    return 1 if has_failed else 0


def _file_of(clone: Path, commit: str, file: str) -> str:
    """Returns a file, or a folder's names, of a commit; nothing where there is none."""
    command = ["git", "-C", str(clone), "show", f"{commit}:{file}"]
    return subprocess.run(command, capture_output=True, check=False, text=True).stdout


def _predicted_of_other(run: Other, folder: Path) -> float | None:
    """Returns what a run of another project is predicted; infinite where it does not fit."""
    run.prepare(folder / run.folder)
    command = [sys.executable, "-m", "residency", "dry-run", "--device", run.device]
    done = subprocess.run(
        [*command, "--", sys.executable, *run.words],
        cwd=folder / run.folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    said = done.stdout + done.stderr
    if re.search(f"^{_DOES_NOT}", said, re.MULTILINE):
        return math.inf
    figure = run.figure_in(said) if done.returncode == 0 else None
    if figure is None:
        print(said[-4000:], file=sys.stderr)
    return figure


def _report(new: str, known: Sequence[Run | Other]) -> None:
    """Writes today's report anew, with a row more or in the place of an older one."""
    is_other = isinstance(known[0], Other)
    name = known[0].title.partition(",")[0].lower() if is_other else "published"
    path = report_path(name, ".md", "simulated")
    rows = {}
    for line in [*(path.read_text().splitlines() if path.exists() else ()), new]:
        if line.startswith("| ") and line not in TABLE:
            rows[_title(line)] = line
    order = [_title(row(run, [0.0])) for run in known]
    lines = [*TABLE, *(rows[title] for title in order if title in rows)]
    command = f"python -m benchmarks.published {name if is_other else 'litgpt'}"
    heading = report_heading(name, "simulated", command)
    notes = MADE_UP if is_other else NOTES
    path.write_text(f"{heading}\n" + "\n".join(lines) + f"\n\n{notes}\n", encoding="utf-8")


def _title(line: str) -> str:
    return line.split(" | ")[0]


def row(run: Run | Other, predicted: Sequence[float | None]) -> str:
    """Returns the row of a run: what was published, and what dry runs say, or a failed one.

    Args:
        run: The run.
        predicted: GB of each dry run; infinite where it does not fit, None where it failed.
    """
    published = math.inf if run.published is None else run.published
    said = " to ".join(_shown(each) for each in dict.fromkeys(predicted))
    error = ""
    if len(predicted) == 1 and predicted[0] is not None and math.isfinite(published):
        error = f"{100 * (predicted[0] / published - 1):+.2f} %"
    return f"| {run.title} | {run.device} | {_shown(published)} | {said} | {error} |"


def _shown(gigabytes: float | None) -> str:
    if gigabytes is None:
        return "the script failed"
    return f"{gigabytes:.2f}" if math.isfinite(gigabytes) else "out of memory"


def _sources(clone: Path, given: Path, commit: str) -> Path:
    """Returns a folder with a commit's files, in which its runs are made."""
    folder = given / commit
    if not folder.exists():
        folder.mkdir()
        archive = subprocess.run(
            ["git", "-C", str(clone), "archive", commit], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def _predicted(run: Run, folder: Path, texts: str) -> float | None:
    """Returns what the script prints in a dry run; infinite where it does not fit."""
    checkpoint, words = _command(run, folder, texts)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if not (folder / checkpoint).exists():
        made = [sys.executable, "-m", "benchmarks.published.prepare", checkpoint.name]
        made += [str(checkpoint), str(LONGEST.get(run.model, 0))]
        paths.insert(1, str(ROOT))
        with_ours = variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(made, cwd=folder, env=with_ours, check=True)
    command = [sys.executable, "-m", "residency", "dry-run", "--device", run.device]
    command += ["--steps", "1"] if run.commit != CONFIGS else []  # of 128 samples each
    command += ["--ranks", str(run.ranks)] if run.ranks > 1 else []
    done = subprocess.run(
        [*command, "--", sys.executable, *words],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if re.search(f"^{_DOES_NOT}", done.stdout, re.MULTILINE):
        return math.inf
    said = _SAID.search(done.stdout)
    if not re.search(f"^{_FITS}", done.stdout, re.MULTILINE) or said is None:
        print(done.stdout[-4000:], file=sys.stderr)
        return None
    return float(said[1])


def _command(run: Run, folder: Path, texts: str) -> tuple[Path, list[str]]:
    """Returns the checkpoint's folder, and what starts the script."""
    if run.commit == CONFIGS:
        config = folder / "config_hub" / "finetune" / run.model / f"{run.kind}.yaml"
        checkpoint = Path(yaml.safe_load(config.read_text())["checkpoint_dir"])
        return checkpoint, ["-m", "litgpt", "finetune", run.kind, "--config", str(config)]
    text = (folder / "finetune" / f"{run.kind}.py").read_text()
    for name, number in (("micro_batch_size", run.micro_batch), ("devices", run.ranks)):
        text, count = re.subn(rf"^{name} = \d+\b", f"{name} = {number}", text, flags=re.MULTILINE)
        assert count == 1, f"{name} is no constant of {run.kind}.py"
    script = folder / "finetune" / f"{run.kind}_as_published.py"
    script.write_text(text)
    checkpoint = Path("checkpoints/models") / run.model
    options = [f"--checkpoint_dir={checkpoint}", f"--precision={run.precision}"]
    return checkpoint, [str(script), f"--data_dir=data/{texts}", *options]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
