"""What a note advises is done, in failures that are planted, and the run then comes to its end.

Where a note says that nothing it knows would have been enough, none of the case's switches is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import limits
import pytest

PROGRAM = Path(__file__).with_name("advice_program.py")
# What stands in a remedy's line, and the switch of a case that does it.
DOES = {
    r"let go of the graph": "detach",
    r"keep it on the host, with \.detach": "host",
    r'offload_optimizer\(optimizer, bucket="(\w+)", slots=3\)': "offload",
    r'offload it with bucket="(\w+)", slots=3 and resident="0B"': "smaller",
    r"gradient_as_bucket_view=True": "view",
    r"expandable_segments:True": "segments",
    r"second model": "one model",
    r"copy\.deepcopy makes": "park",
    r"a clone for a save": "snapshot",
    r"zero_grad": "zero_grad",
    r"reclaim\(errors=True\)": "reclaim",
    r"str\(\) of it": "text",
    r"gc\.collect": "collect",
    r"a smaller batch": "batch",
}
FITS = ("this would have made room:", "this makes room for that")
MAY = "changes that may make room"
NOTHING = ("none of these would have been enough alone:", "nothing that is known here")
# What is advised first, or what may be done; "" where no switch of the case lets it end.
ADVISED = {
    "a_running_loss": "detach",
    "a_list_of_losses": "detach",
    "a_retained_graph": "detach",
    "a_hidden_state": "detach",
    "a_hook_that_keeps": "host",
    "a_metric": "host",
    "a_cache_by_name": "host",
    "lengths_that_vary": "host",
    "two_lists": "host",
    "outputs_of_an_evaluation": "host",
    "the_first_step": "offload",
    "a_request_beside_a_state": "offload",
    "an_offload_with_a_large_bucket": "smaller",
    "an_offload_that_keeps_much": "smaller",
    "gradients_beside_buckets": "view",
    "free_bytes_in_pieces": "segments",
    "a_base_model_again": "one model",
    "an_average_on_the_device": "one model",
    "a_copy_in_its_midst": "park",
    "a_clone_for_a_save": "snapshot",
    "gradients_in_an_evaluation": "zero_grad",
    "cycles": "collect",
    "an_error_of_an_earlier_cell": "reclaim",
    "an_error_that_is_kept": "text",
    "a_batch_that_is_too_large": "batch",
    "a_model_that_is_too_large": "",
    "one_request_that_is_too_large": "",
}
FIRST = ("a_running_loss", "the_first_step")


def run(*runs: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *runs],
        capture_output=True,
        text=True,
        check=False,
        timeout=limits.WORKER_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def advice_in(note: str) -> tuple[str, list[str]]:
    """Returns how sure a note is, and the switches for what it advises, in its order."""
    lines = note.splitlines()
    heads = (*FITS, MAY, *NOTHING)
    at = next(index for index, line in enumerate(lines) if line.startswith(heads))
    found = []
    for line in lines[at + 1 :]:
        for pattern, switch in DOES.items():
            match = re.search(pattern, line)
            if match:
                found.append(f"{switch} {match[1]}" if match.groups() else switch)
                break
    return lines[at], found


def judge(name: str) -> None:
    (failed,) = run(f"{name}:")
    assert not failed["is_done"], "the planted failure did not come"
    heading, advised = advice_in(failed["note"])
    expected = ADVISED[name]
    if heading.startswith(NOTHING):
        assert not expected, failed["note"]
        others = [switch for switch in DOES.values() if switch != "offload"]
        assert not any(each["is_done"] for each in run(*(f"{name}:{mode}" for mode in others)))
        return
    tried = advised[:1] if heading.startswith(FITS) else advised
    assert any(switch.startswith(expected) for switch in tried), failed["note"]
    results = run(*(f"{name}:{switch}" for switch in tried))
    assert any(each["is_done"] for each in results), (tried, results[0]["note"])
    if heading.startswith(FITS):
        assert results[0]["is_done"], (tried, results[0]["note"])


@pytest.mark.parametrize("name", FIRST)
def test_a_remedy_that_is_advised_lets_the_run_end(name: str) -> None:
    judge(name)


@pytest.mark.whole
@pytest.mark.parametrize("name", sorted(set(ADVISED) - set(FIRST)))
def test_each_planted_failure_ends_once_its_advice_is_taken(name: str) -> None:
    judge(name)
