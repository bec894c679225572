"""Runs the Python blocks of pages of the docs as a reader pastes them: with nothing given.

A block that begins with ``# needs ... above made`` goes on from the one before it; every other one
starts in an empty namespace. One whose first line is a file's name is a file.

As a program it gives each page a process of its own, in which nobody has set up an accelerator;
what they all import is imported once. Files that say ``run it beside`` run at the same time. With
``--ranks`` it runs one file in several processes, as torchrun does.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Block:
    """A block: its source, the name of the file that it is, and what its first line says."""

    source: str
    file: str | None
    says: str


def blocks_of(page: Path) -> list[Block]:
    """Returns the Python blocks of a page, in order."""
    found = []
    for source in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        first, _, _ = source.partition("\n")
        named = re.fullmatch(r"# (\w+\.py)(:.*)?", first)
        found.append(Block(source, named and named[1], first))
    return found


def paste(page: Path) -> None:
    """Runs the blocks of a page that are no files, in this process."""
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        if block.file:
            continue
        if not re.match("# needs .*above made", block.says):
            names = {"__name__": "__main__"}
        exec(compile(block.source, str(page), "exec"), names)


def _in_a_process(what: Callable[[], object], folder: str) -> int:
    """Begins something in a process of its own, and returns its number."""
    child = os.fork()
    if child:
        return child
    try:
        os.chdir(folder)
        what()
        sys.stdout.flush()
        os._exit(0)
    except BaseException:  # whatever it was, the process ends here
        traceback.print_exc()
        os._exit(1)


def _run_alone(page: Path) -> bool:
    """Says whether a page's blocks run, and the files that are to run beside one another."""
    with tempfile.TemporaryDirectory() as folder:
        begun = [_in_a_process(partial(paste, page), folder)]
        for block in blocks_of(page):
            if block.file and "run it beside" in block.says:
                path = Path(folder, block.file)
                path.write_text(block.source)
                run = partial(runpy.run_path, str(path), run_name="__main__")
                begun.append(_in_a_process(run, folder))
        ended = [os.waitpid(child, 0)[1] for child in begun]
    return not any(ended)


def run_ranks(script: Path, num_ranks: int, **given: str) -> list[int]:
    """Runs a file as torchrun does: in so many processes, of which none outlives one that fails.

    Returns:
        The wait status of each, in the order in which they ended.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port, **given}

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        ranks = {"RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in {**world, **ranks}.items()})
        runpy.run_path(str(script), run_name="__main__")

    import torch

    left = {_in_a_process(partial(run, rank), str(script.parent)) for rank in range(num_ranks)}
    ended = []
    while left:
        child, status = os.wait()
        left.remove(child)
        ended.append(status)
        if status:
            for other in left:
                os.kill(other, signal.SIGTERM)
    return ended


def main() -> int:
    """Runs the pages that the arguments name, and names those that failed."""
    import torch
    import torch.distributed.checkpoint

    import residency  # noqa: F401 - for all pages at once

    if sys.argv[1] == "--ranks":  # a file that loses rank 1 of two ranks, and goes on with one
        import torch.distributed.fsdp  # noqa: F401

        script = Path(sys.argv[2]).resolve()
        killed = run_ranks(script, 2, KILL_AT="4")
        return not (signal.SIGKILL in killed and run_ranks(script, 1) == [0])
    failed = [argument for argument in sys.argv[1:] if not _run_alone(Path(argument).resolve())]
    for name in failed:
        print(f"{name}: its blocks do not run", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
