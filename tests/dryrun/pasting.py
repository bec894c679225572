"""Adds the lines that ``--fit`` prints to a script, where a user would.

A script has a comment ``# + begins, begins`` where lines that begin so belong, and ``# - begins``
where they take the place of what stands there, up to a bare ``# -``. A line with a load takes the
place of each load.
"""

import re
from collections.abc import Sequence

_LOAD = re.compile(r"torch\.load\(.*?\)")
# A call, of which the script has other arguments.
_GIVEN = re.compile(r"(\w+)\(\.\.\., (.*)\)(?:  # .*)?")


def pasted(text: str, lines: Sequence[str]) -> str:
    """Returns a script with lines, of which each must have a place.

    In a call such as ``Trainer(..., callbacks=[...])`` the dots become ``**given``.
    """
    loads = [line for line in lines if _LOAD.fullmatch(line)]
    made, used, is_left_out = [], set(loads), False
    for row in text.splitlines():
        mark = re.fullmatch(r"( *)# ([+-]) ?(.*)", row)
        if mark is None:
            row = _LOAD.sub(loads[0], row) if loads else row
            made += [] if is_left_out else [row]
            continue
        indent, kind, begins = mark.groups()
        names = [name for name in begins.split(", ") if name]
        here = _block(lines, names)
        used.update(here)
        made += [indent + _filled(line) for line in here]
        is_left_out = kind == "-" and bool(here)
    missing = set(lines) - used
    assert not missing, f"lines without a place in the script: {missing}"
    return "\n".join(made) + "\n"


def _block(lines: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the lines that begin with one of some names, and what is indented below them."""
    found, is_in = [], False
    for line in lines:
        is_in = is_in if line.startswith(" ") else any(map(line.startswith, names))
        found += [line] * is_in
    return found


def _filled(line: str) -> str:
    call = _GIVEN.fullmatch(line)
    if call is None:
        return line
    name, given = call.groups()
    kind = "arguments" if name.endswith(("Arguments", "Config")) else "trainer"
    return f"{kind} = {name}(**{{**given_{kind}, **dict({given})}})"
