"""``residency report``: shows what a run recorded, or compares two runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from residency._errors import InvalidArgumentError


def add_parser(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Adds the verb to the command line, with the options that all verbs have in common."""
    parser = verbs.add_parser(
        "report",
        parents=[common],
        help="show the memory of a recorded run, or compare two",
        description=(
            "Prints the command of the run, its peak, how it ended, and its phases: how often, "
            "peak, how the memory is used, and its growth from visit to visit. With two records it "
            "prints a Markdown table of before and after, in which save is compared with "
            "train/save. Give run.jsonl for run.rank0.jsonl, run.rank1.jsonl, ..."
        ),
    )
    parser.add_argument("before", metavar="RUN", type=Path, help="the record, as in: run.jsonl")
    parser.add_argument(
        "after", metavar="AFTER", type=Path, nargs="?", help="compare with this record"
    )
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with a timeline; needs no network"
    )
    parser.add_argument(
        "--tensorboard", metavar="DIR", type=Path, help="write scalars for TensorBoard"
    )
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a trace for Perfetto or chrome://tracing"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows the record and returns the exit status."""
    from residency import _report

    exports = (arguments.html, arguments.tensorboard, arguments.trace)
    if arguments.after is not None and any(exports):
        raise InvalidArgumentError("two records make a table; give one record to an export.")
    runs = _report.read_runs(arguments.before)
    after = [] if arguments.after is None else _report.read_runs(arguments.after)
    for warning in (warning for run in [*runs, *after] for warning in run.warnings):
        print(f"residency: {warning}", file=sys.stderr)
    if after:
        print(_report.compare(runs, after))
        return 0
    if arguments.html:
        _report.write_page(runs, arguments.html)
    if arguments.tensorboard:
        _report.write_tensorboard(runs, arguments.tensorboard)
    if arguments.trace:
        _report.write_trace(runs, arguments.trace)
    _report.print_report(runs)
    return 0
