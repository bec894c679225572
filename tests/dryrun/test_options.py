"""What ``residency dry-run`` refuses before it runs anything, and the page that it writes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.dryrun.facts import SEEN, facts

from residency._cli import main
from residency._dryrun import print_answer, write_page
from residency._dryrun._answer import Answer
from residency._dryrun._launch import _ProgressLine

MIB = 1 << 20
GIB = 1 << 30
KINDS = [
    "parameters",
    "gathered parameters",
    "gradients",
    "optimizer state",
    "activations",
    "other",
]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--capacity", "24GB"), "'24GiB'"),
        (("--capacity", "24g"), "'24GiB'"),
        (("--capacity", "24"), "'24GiB' or '24B'"),
        (("--device", "voodoo2"), "rtx4090"),
        (("--capacity", "1GiB", "--fit", "--largest", "batch"), "not allowed with"),
        (("--capacity", "1GiB", "--html", "{folder}"), "Is a directory"),
        (("--capacity", "1GiB", "--html", "{folder}/none/page.html"), "No such file"),
        (("--capacity", "1GiB", "--largest", "width"), "'batch', 'sequence'"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(tmp_path, capsys, options, said) -> None:
    ran = tmp_path / "ran"
    given = [each.replace("{folder}", str(tmp_path)) for each in options]
    try:
        status = main(["dry-run", *given, "--", "touch", str(ran)])
    except SystemExit as end:  # argparse's way
        status = int(end.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err
    assert not ran.exists()


def test_a_missing_command_is_refused_first(capsys) -> None:
    assert main(["dry-run", "--fit"]) == 2
    assert "-- python train.py" in capsys.readouterr().err


def test_a_page_that_was_there_stays_until_there_is_a_new_one(tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    page.write_text("before")
    assert main(["dry-run", "--capacity=1GiB", f"--html={page}", "--", "no-such-program"]) == 2
    assert page.read_text() == "before"


def answer(*, errors: list[dict[str, Any]]) -> Answer:
    at_peak = dict(zip(KINDS, (100 * MIB, 0, 0, 0, 300 * MIB, 0), strict=True))
    phase = {"name": "forward", "visits": 2, "at_peak": at_peak}
    phase |= {"peak_allocated": 400 * MIB, "peak_reserved": 500 * MIB}
    found = facts() | {"kinds": KINDS, "phases": [phase], "torch": "2.99", "steps": 2}
    found |= {"seconds": 3.0, "retries": 0}
    found |= {"host_peak": 0, "pinned_peak": 0, "files": 0, "saved": 0}
    found |= {"has_compiled": False, "has_no_optimizer": False, "is_real": False}
    found |= {"warnings": [], "guesses": [], "files_seen_by": "audit events"}
    found |= {
        "timeline": [[0, 100 * MIB, 0, 0, 0, 0, 0, 500 * MIB], [1, *at_peak.values(), 500 * MIB]]
    }
    found |= {"marks": [[1, "set up"], [2, "forward"]]}
    first = found | {"out_of_memory": errors, "since_error": errors and dict.fromkeys(SEEN, 0)}
    return Answer(found, first, 450 * MIB if errors else 1000 * MIB, 34 * MIB, "a <device>")


def test_the_page_has_the_verdict_the_command_versions_and_names(tmp_path: Path) -> None:
    error = {"phase": "forward", "step": 1, "line": "train.py:7", "operation": "aten::mm"}
    error |= {"asked": 200 * MIB, "free": 10 * MIB}
    for errors in ([], [error]):
        file = tmp_path / "page.html"
        write_page(answer(errors=errors), file, ["python", "train.py", "--name", "a <b> 'c'"])
        page = file.read_text()
        for text in (
            "torch 2.99",
            "400.00 MiB allocated in forward",
            "<i style='background:#2b7bba'></i>parameters",
            "activations",
            "set up",
            "audit events: changes that C++ or other programs made",
        ):
            assert text in page
        assert "gradients" not in page  # which nothing held: no column of zeros
        assert "a &lt;device&gt;" in page
        assert "a &lt;b&gt;" in page
        assert ("does not fit" in page) == bool(errors)
        assert ("out of memory in forward, step 1 at train.py:7 (aten::mm)" in page) == bool(errors)
        assert (
            "figures below are of a second run, on a device that holds everything" in page
        ) == bool(errors)
        assert "<script" not in page
        assert "http" not in page


def test_the_page_has_round_ticks_one_unit_a_table_and_the_context_below_the_card(
    tmp_path: Path,
) -> None:
    file = tmp_path / "page.html"
    write_page(answer(errors=[]), file, ["python", "train.py"])
    page = file.read_text()
    labels = re.findall(r"text-anchor='end'>([\d,]+) MiB</text>", page)
    assert labels == ["0", "200", "400", "600", "800", "1,000"]
    assert "the card: 1000.00 MiB" in page
    assert "the context: 34.00 MiB" in page
    table = page.partition("<table>")[2]
    assert "in MiB" in page.partition("<table>")[0]
    assert "iB" not in table
    assert "<td>400.00</td><td>500.00</td><td>466.00</td><td>100.00</td><td>300.00</td>" in table
    owners = set(re.findall(r"<polygon fill='(#\w+)'", page))
    assert len(owners) == 2
    assert not owners & set(re.findall(r"<rect [^>]*fill='([^']*)'", page))


def test_the_table_is_whole_where_the_output_is_no_terminal() -> None:
    given = answer(errors=[])
    sizes = (123 * GIB, 45 * GIB, 123 * GIB, 246 * GIB, 987 * GIB, 6 * GIB)
    phase = given.found["phases"][0]
    phase |= {"name": "update_actor/load_from_the_last_checkpoint/forward", "visits": 1024}
    phase |= {"at_peak": dict(zip(KINDS, sizes, strict=True))}
    phase |= {"peak_allocated": sum(sizes), "peak_reserved": sum(sizes)}
    output = io.StringIO()
    print_answer(given, Console(file=output, width=80))
    (row,) = [line for line in output.getvalue().splitlines() if phase["name"] in line]
    for size in (*sizes, sum(sizes)):
        assert f" {size >> 30:,}.00" in row, row


def test_a_terminal_has_what_a_reader_needs_and_the_page_has_what_it_rests_on(
    tmp_path: Path,
) -> None:
    given = replace(answer(errors=[]), rests_on="measurements of this card")
    output, file = io.StringIO(), tmp_path / "page.html"
    print_answer(given, Console(file=output, width=200))
    write_page(given, file, ["python", "train.py"])
    for text in ("measurements of this card", "a torch before 2.4", "audit events"):
        assert text not in output.getvalue()
        assert text in file.read_text()
    assert output.getvalue().splitlines()[-1].endswith("--html FILE")


def test_brackets_of_the_script_are_printed_as_they_are() -> None:
    error = {"phase": "forward", "step": 1, "line": "train.py:7", "operation": "x[/red]"}
    error |= {"asked": 200 * MIB, "free": 10 * MIB}
    given = answer(errors=[error])
    given.found["warnings"] = ["residency leaves [bold]x[/] as it is"]
    output = io.StringIO()
    print_answer(given, Console(file=output))
    assert "train.py:7 (x[/red])" in output.getvalue()
    assert "residency leaves [bold]x[/] as it is" in output.getvalue()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_line_of_a_run_names_what_is_tried_and_has_room(tmp_path: Path, monkeypatch) -> None:
    shown = []
    for columns in (200, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        terminal = Terminal()
        _ProgressLine(terminal, str(tmp_path), "gradient checkpointing").show()
        shown.append(terminal.getvalue().removeprefix("\r\x1b[K"))
    assert shown[0].endswith(" s: gradient checkpointing: starting")
    assert len(shown[1]) == 39


def test_each_key_of_the_answer_that_is_a_size_says_so() -> None:
    error = {"phase": "forward", "asked": 1, "free": 2}
    made = answer(errors=[error]).as_dict()
    assert made["schema"] == 2
    assert made["out_of_memory"] == [{"phase": "forward", "asked_bytes": 1, "free_bytes": 2}]
    (phase,) = made["phases"]
    assert phase["headroom_bytes"] == (450 - 34 - 500) * MIB
    assert phase["at_peak_bytes"]["activations"] == 300 * MIB
    documented = (Path(__file__).parents[2] / "docs/reference/dry-run.md").read_text()
    for key in (*made, *phase):
        assert f"`{key}`" in documented, key


def test_the_process_of_the_command_line_does_without_torch(tmp_path: Path) -> None:
    """Torch takes most of a short dry run's time, and each of several runs of ``--fit`` is one."""
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    code = (
        "import sys; from residency._cli import main\n"
        f"main(['dry-run', '--device', 'l4', '--', sys.executable, {str(script)!r}])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_interpreter_without_the_library_is_given_it_and_the_simulator(
    dry_run, tmp_path: Path
) -> None:
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env").glob("lib/*/site-packages")
    # Path files in the folders that stand here are not read: an editable install is not seen.
    folders = [folder for folder in sys.path if folder.endswith("-packages")]
    (packages / "torch.pth").write_text("\n".join(folders))
    script = "import torch\ntorch.ones(3, device='cuda')\n"
    outcome = dry_run(script, python=str(tmp_path / "env" / "bin" / "python"))
    assert outcome.has_run, outcome.errors
