"""A comment stands at every wait, with whose bytes are read or written next, and at every use of
torch's private names, with the reason or what was read.
"""

from __future__ import annotations

import re

from source_rules import sources

_WAIT = re.compile(r"(?<!def )\b(wait_event|wait_stream|synchronize|record_stream|wait_for)\(")
_PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*"
    r"|\._(?:sharded_param_data|backward_hooks|post_accumulate_grad_hooks|device_types)\b"
    r"|\._(?:version|cdata|spec|local_tensor|is_view|use_count|optimizer_step_pre_hooks)\b"
    r"|(?<!self)\._base\b"
    r"|from torch(?:\.\w+)*\._\w+(?:\.\w+)* import|from torch[\w.]* import .*\b_[a-z]\w+"
)
_NEAR = 3  # lines


def _without_a_comment(pattern: re.Pattern[str], apart: tuple[str, ...]) -> list[str]:
    """Returns the lines with the pattern, outside of strings, that have no comment near."""
    found = []
    for name, path in sources(".py"):
        lines = path.read_text().splitlines()
        for at, line in enumerate(_without_docstrings(lines)):
            code = re.sub(r'"[^"]*"', "", line.partition("#")[0])
            near = lines[max(0, at - _NEAR) : at + 2]
            is_said = any("#" in each for each in near)
            if pattern.search(code) and not is_said and not name.startswith(apart):
                found.append(f"{name}:{at + 1}: {line.strip()}")
    return found


def _without_docstrings(lines: list[str]) -> list[str]:
    """Returns the lines with those of docstrings empty."""
    text = "\n".join(lines)
    return re.sub(r'""".*?"""', lambda m: "\n" * m[0].count("\n"), text, flags=re.S).split("\n")


def test_every_wait_has_a_reason() -> None:
    # What shows the library waits as its callers would.
    assert not _without_a_comment(_WAIT, ("_demo/",))


def test_every_use_of_a_private_name_of_torchs_has_a_reason() -> None:
    assert not _without_a_comment(_PRIVATE, ())
