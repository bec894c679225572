"""``residency demo``: runs the cases on this machine and prints what each run did, as a table or as
JSON.
"""

from __future__ import annotations

import argparse
from typing import Any

_EXIT_BROKEN = 1


def add_parser(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Adds the verb to the command line, with the options that all verbs have in common."""
    parser = verbs.add_parser(
        "demo",
        parents=[common],
        help="run six out-of-memory failures: stock code, and the same runs with residency",
        description=(
            "Trains a small model on the accelerator of this machine, or on the simulated one: "
            "stock, stock under a capacity that it exceeds, and kept inside that capacity. "
            "Exit status 0 when every promise held, 1 when one was broken, 2 on an error."
        ),
    )
    parser.add_argument(
        "--case",
        metavar="NAME",
        action="append",
        help="run this case only; repeatable. Cases: resume, async-save, optimizer-step, "
        "best-adapter, evaluation, hand-off",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="training steps of each run (20)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of weights and batches (0)")
    parser.add_argument("--json", action="store_true", help="print the data as JSON on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the cases and returns the exit status."""
    from residency import _demo

    settings = _demo.Settings(**_given(arguments))
    names = arguments.case or list(_demo.CASES)
    reports = []
    with _demo.Apart(settings) as apart:
        for name, then in zip(names, [*names[1:], None], strict=True):
            with _demo.show_progress() as show:
                reports.append(apart.run(name, show, then=then))
            if not arguments.json:
                _demo.print_report(reports[-1], _demo.CASES[name].summary)
    if arguments.json:
        print(_demo.reports_to_json(reports))
    else:
        _demo.print_summary(reports)
    return 0 if all(report.is_held() for report in reports) else _EXIT_BROKEN


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {"num_steps": arguments.steps, "seed": arguments.seed}
    return {name: value for name, value in options.items() if value is not None}
