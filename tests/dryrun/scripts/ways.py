"""Runs the programs of a folder in dry mode on CUDA's face, and says which way each has gone.

Prints a JSON object on its last line: for each program its error, its `rounds` and what is said of
its branches.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from residency import sim

sim.enable("8GiB", device="cuda", dry=True, schedule="eager")

from residency._dryrun._blame import Blame  # noqa: E402 - after the device is there
from residency._dryrun._ways import Ways  # noqa: E402

found = {}
for file in sorted(Path(sys.argv[1]).glob("*.py")):
    blame, ways = Blame(), Ways()
    blame.start()
    ways.start()
    names = {"__name__": "__main__"}
    error = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(file.read_text(), str(file), "exec"), names)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    said = [each["line"].rpartition(":")[2] for each in ways.branches(blame.places())]
    found[file.stem] = {
        "error": error,
        "rounds": names.get("rounds"),
        "lines": sorted(map(int, said)),
        "guesses": [each["what"] for each in blame.guesses()],
    }
print(json.dumps(found))
