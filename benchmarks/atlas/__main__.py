"""Makes the rows of the atlas, compares two runs, and lists how near each kind has to be.

``python -m benchmarks.atlas rows [PART ...] [--to FILE]`` makes rows on a card, in minutes, and as
a dry run under ``residency dry-run --device h100 --steps 0 --``. The parts are those of ``PARTS``;
``opinfo:3/10`` is a tenth of the operators.
``python -m benchmarks.atlas compare CARD DRY [--kind KIND]`` prints a table by kind, or the rows of
one kind that differ.
``python -m benchmarks.atlas hold DRY [DRY_OF_ANOTHER_TORCH]`` writes ``kinds.txt`` anew.
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

import torch

from benchmarks.atlas import attention, compare, convolutions, kinds, known, opinfo, shapes
from benchmarks.atlas.rows import DEVICE, Atlas
from benchmarks.device import find_device
from residency import sim

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
_EXIT_NOTHING = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the arguments say."""
    options = _options(arguments)
    if options.command == "compare":
        a, b = compare.load(options.a), compare.load(options.b)
        wanted = options.kind
        lines = compare.differences(a, b, wanted) if wanted else compare.table(a, b, options.all)
        print("\n".join(lines))
        return 0
    if options.command == "hold":
        return _hold(options.dry, options.other)
    if find_device("8GiB", schedule="eager").type != DEVICE:
        print("torch finds no CUDA: run it on a card, or as a dry run", file=sys.stderr)
        return _EXIT_NOTHING
    warnings.simplefilter("ignore")  # what samples warn of is no row
    if options.command == "refuse":
        convolutions.refuse(Atlas(sys.stdout), options.case, options.spaces)
        return 0
    with contextlib.ExitStack() as stack:
        path = options.to
        file = stack.enter_context(path.open("w", encoding="utf-8")) if path else sys.stdout
        print(json.dumps({"about": _about()}), file=file, flush=True)
        for name in options.parts or PARTS:
            part, _, fraction = name.partition(":")
            if fraction:
                opinfo.opinfo(Atlas(file), *map(int, fraction.split("/")))
            else:
                PARTS[part](Atlas(file))
    if path:
        print(f"{len(compare.load(path))} rows: {path}")
    return 0


def _hold(dry: Path, other: Path | None) -> int:
    """Writes the list of kinds anew; returns 1 if a kind lacks its reason."""
    rows = compare.load(other) if other else None
    version = compare.about(dry).get("torch", "")
    missing = kinds.update(compare.load(kinds.CARD), compare.load(dry), version, rows)
    print("\n".join(f"{kind}: write its reason into {kinds.LIST.name}" for kind in missing))
    return 1 if missing else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.atlas")
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="print the rows of parts, or of all")
    rows.add_argument("parts", nargs="*", type=_part, help=", ".join(PARTS))
    rows.add_argument("--to", type=Path, help="a file in place of the output")
    alone = commands.add_parser("refuse", help="print the row of one convolution, in this process")
    alone.add_argument("case", type=int)
    alone.add_argument("spaces", nargs="*", type=int, help="workspaces of two passes, in bytes")
    held = commands.add_parser("compare", help="print a table by kind")
    held.add_argument("a", type=Path)
    held.add_argument("b", type=Path)
    held.add_argument("--kind", help="print the rows of this kind that differ")
    held.add_argument("--all", action="store_true", help="kinds, too, of which no row differs")
    listed = commands.add_parser("hold", help="write the list of kinds anew")
    listed.add_argument("dry", type=Path, help="rows of a dry run with the card's torch")
    listed.add_argument("other", type=Path, nargs="?", help="rows with another torch")
    return parser.parse_args(arguments)


def _part(name: str) -> str:
    part, _, fraction = name.partition(":")
    if part not in PARTS or (fraction and part != "opinfo"):
        raise argparse.ArgumentTypeError(f"no part is named {name}; there are {', '.join(PARTS)}")
    return name


def _about() -> dict[str, str]:
    """Returns what the rows are made with."""
    return {
        "card": ("simulated " if sim.is_enabled() else "") + torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
