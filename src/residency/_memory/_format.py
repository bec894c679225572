"""What a recording's writer and its readers agree on. No torch here: a report starts without it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from residency._units import MIB

FORMAT = "residency-ledger"
VERSION = 1
PEAKS = ("bounds", "exact")  # the first is the default
# By which `residency record` tells the processes of its command what to do.
PATH_VARIABLE = "RESIDENCY_RECORD"
PEAKS_VARIABLE = "RESIDENCY_RECORD_PEAKS"
LONGEST_LINE = MIB  # what is longer is no line of a recording


def is_record(file: Path) -> bool:
    """Returns whether a file begins with a recording's own first line: its mark, whatever its name.

    Raises:
        OSError: It cannot be read.
    """
    if not file.is_file():
        return False
    with file.open("rb") as content:
        first = content.readline(LONGEST_LINE)
    try:
        line = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and (line.get("kind"), line.get("format")) == ("header", FORMAT)


def may_be_replaced(file: Path) -> bool:
    """Returns whether writing a record there loses nothing but an older record.

    Raises:
        OSError: It cannot be read.
    """
    return not file.is_file() or not file.stat().st_size or is_record(file)


def records_of(path: Path) -> list[Path]:
    """Returns the records of all processes of a run: of each rank, and of helpers by their ids.

    Raises:
        OSError: The folder, or one of them, cannot be read.
    """
    name = re.compile(rf"{re.escape(path.stem)}(\.rank\d+)?(\.pid\d+)?{re.escape(path.suffix)}")
    files = path.parent.iterdir() if path.parent.is_dir() else iter(())
    return sorted(file for file in files if name.fullmatch(file.name) and is_record(file))
