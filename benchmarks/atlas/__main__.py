"""Makes the rows of the atlas, and compares those of two runs.

``python -m benchmarks.atlas rows [PART ...] [--to FILE]`` makes rows on a card, two minutes for
all, and as a dry run under ``residency dry-run --device h100 --steps 0 --``. The parts are those of
``PARTS``, ``opinfo:3/10`` a tenth of the operators. ``--no-order`` lists no large requests.
``python -m benchmarks.atlas compare CARD DRY [--kind KIND]`` prints a table by kind, or the rows of
one kind that differ.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.atlas import attention, compare, convolutions, known, opinfo, shapes
from benchmarks.atlas.rows import Atlas

PARTS: MappingProxyType[str, Callable[[Atlas], None]] = MappingProxyType(
    {
        "attention": attention.attention,
        "shapes": shapes.shapes,
        "known": known.known,
        "convolutions": convolutions.convolutions,
        "refused": convolutions.refused,
        "opinfo": opinfo.opinfo,
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the arguments say."""
    options = _options(arguments)
    if options.command == "compare":
        a, b = compare.load(options.a), compare.load(options.b)
        wanted = options.kind
        lines = compare.differences(a, b, wanted) if wanted else compare.table(a, b, options.all)
        print("\n".join(lines))
        return 0
    warnings.simplefilter("ignore")  # what samples warn of is no row
    with contextlib.ExitStack() as stack:
        is_alone = options.command == "refuse"
        path = None if is_alone else options.to
        file = stack.enter_context(path.open("w", encoding="utf-8")) if path else sys.stdout
        atlas = Atlas(file, are_large_listed=not options.no_order)
        if is_alone:
            convolutions.refuse(atlas, options.case, options.spaces)
            return 0
        print(json.dumps({"about": _about()}), file=file, flush=True)
        for name in options.parts or PARTS:
            part, _, fraction = name.partition(":")
            if fraction:
                number, num_parts = map(int, fraction.split("/"))
                opinfo.opinfo(atlas, number, num_parts)
            else:
                PARTS[part](atlas)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.atlas")
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="print the rows of parts, or of all")
    rows.add_argument("parts", nargs="*", type=_part, help=", ".join(PARTS))
    rows.add_argument("--to", type=Path, help="a file in place of the output")
    alone = commands.add_parser("refuse", help="print the row of one convolution, in this process")
    alone.add_argument("case", type=int)
    alone.add_argument("spaces", nargs="*", type=int, help="workspaces of two passes, in bytes")
    for made in (rows, alone):
        made.add_argument("--no-order", action="store_true", help="do not list large requests")
    held = commands.add_parser("compare", help="print a table by kind")
    held.add_argument("a", type=Path)
    held.add_argument("b", type=Path)
    held.add_argument("--kind", help="print the rows of this kind that differ")
    held.add_argument("--all", action="store_true", help="kinds, too, of which no row differs")
    return parser.parse_args(arguments)


def _part(name: str) -> str:
    part, _, fraction = name.partition(":")
    if part not in PARTS or (fraction and part != "opinfo"):
        raise argparse.ArgumentTypeError(f"no part is named {name}; there are {', '.join(PARTS)}")
    return name


def _about() -> dict[str, str]:
    """Returns what the rows were made with."""
    import torch

    from residency import sim

    return {
        "card": ("simulated " if sim.is_enabled() else "") + torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
