"""Judges the errors of planted cases, and of the programs in a folder, in dry mode on CUDA's face.

Prints a JSON object on its last line: for each case the error, and what is said of it.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from residency import sim

sim.enable("8GiB", device="cuda", dry=True, schedule="eager")

import blame_cases  # noqa: E402 - after the device is there

from residency._dryrun._blame import Blame  # noqa: E402
from residency._dryrun._refusals import advice  # noqa: E402

blame = Blame()
blame.start()


def judged(case):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            case()
    except Exception as error:
        said = advice(error, error.__traceback__) or blame.of(error)
        return f"{type(error).__name__}: {error}", said
    return "", "it raised nothing"


found = {case.__name__: judged(lambda case=case: case(blame)) for case in blame_cases.CASES}
for file in sorted(Path(sys.argv[1]).glob("*.py")):
    code = compile(file.read_text(), str(file), "exec")
    found[file.name] = judged(lambda code=code: exec(code, {"__name__": "__main__"}))
print(json.dumps({"cases": found, "guesses": blame.guesses()}))
