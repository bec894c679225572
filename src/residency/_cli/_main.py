"""The parser and the one place where an error becomes a message and an exit status."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

import residency
from residency import _memory
from residency._cli import (
    _checkpoint_verb,
    _demo_verb,
    _doctor_verb,
    _dry_run_verb,
    _record_verb,
    _report_verb,
)
from residency._errors import ResidencyError

_VERBS = (
    _dry_run_verb,
    _demo_verb,
    _checkpoint_verb,
    _record_verb,
    _report_verb,
    _doctor_verb,
)
_BEGINNING = """\
residency keeps a PyTorch training run inside its memory at every transition.

  residency dry-run --device rtx4090 -- python train.py   # will it fit? without a GPU
  residency record -- python train.py                     # where does its memory go?
  residency demo                                          # six failures, fixed

In a script: residency.offload_optimizer(optimizer), residency.Checkpointer(folder).
All verbs: residency --help. This machine, for a report of a bug: residency doctor."""
# What the extra `demo` brings, and `rich`, which an incomplete installation may lack.
_OPTIONAL_PACKAGES = frozenset({"rich", "transformers"})
_EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        argv: The arguments after the program's name; by default those of the process.
    """
    arguments = _make_parser().parse_args(argv)
    if arguments.run is None:
        print(_BEGINNING)
        return 0
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return _fail(arguments, "interrupted", _EXIT_INTERRUPTED)
    except ResidencyError as error:
        return _fail(arguments, str(error), _EXIT_ERROR)
    except Exception as error:
        message = _missing_package(error)
        if message is None:
            message = f"{type(error).__name__}: {error} (--debug shows the traceback)"
            message = "\n".join([message, *_explanation(error)])
        return _fail(arguments, message, _EXIT_ERROR)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="residency",
        description="Keeps a PyTorch training run inside its memory at every transition.",
    )
    parser.add_argument("--version", action="version", version=f"residency {residency.__version__}")
    parser.set_defaults(run=None)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for verb in _VERBS:
        verb.add_parser(verbs, common)
    return parser


def _fail(arguments: argparse.Namespace, message: str, status: int) -> int:
    if arguments.debug:
        traceback.print_exc()
    print(f"residency: {message}", file=sys.stderr)
    return status


def _explanation(error: Exception) -> list[str]:
    """Returns what is known of an error beside its message: why the device's memory ran out."""
    if type(error).__name__ == "OutOfMemoryError":
        _memory.explain(error)
    return list(getattr(error, "__notes__", ()))


def _missing_package(error: Exception) -> str | None:
    """Returns what to install, or None when the error is anything but a package of ours."""
    # An import that fails inside an installed package has another cause, which it says itself.
    if not isinstance(error, ModuleNotFoundError) or error.name not in _OPTIONAL_PACKAGES:
        return None
    return (
        f"this verb needs the package {error.name}, which is not installed. "
        "Install the command line's packages with: pip install 'residency[demo]'"
    )
