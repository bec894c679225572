"""Attention on a device, call by call, with what torch says of its memory: for a dry run.

``python attention_program.py cases.json found.json``. Each case is a call of its own, or a model
whose calls are looked at as it makes them.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.torture.attention_cases import gradient_of, tensors_of
from tests.torture.attention_models import run_layer, run_model
from tests.torture.attention_oracle import CUDNN, EFFICIENT, FLASH, MATH


def bytes_of(which: str) -> int:
    """Returns what was asked of the allocator, without its rounding."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def run_call(case: dict[str, Any]) -> dict[str, Any]:
    """Runs one call, and its backward pass, and returns its figures."""
    call = tensors_of(case, "cuda")
    torch.use_deterministic_algorithms(call.deterministic)
    inputs = (call.query, call.key, call.value)
    options: dict[str, Any] = {
        "attn_mask": call.mask,
        "dropout_p": call.dropout,
        "is_causal": call.causal,
        "enable_gqa": call.gqa,
    }
    torch.cuda.reset_peak_memory_stats()
    before = bytes_of("current")
    with sdpa_kernel([SDPBackend(each) for each in call.kernels]):
        try:
            choice = torch._fused_sdp_choice(*inputs, **options)  # the one way to ask torch
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
        except RuntimeError as error:
            return {"error": str(error)}
    found = {"choice": choice, "held": bytes_of("current") - before}
    found["forward"] = bytes_of("peak") - before
    found["backward"] = 0
    every = [*inputs, call.mask]
    wanted = [each for each in every if each is not None and each.requires_grad]
    if wanted:
        gradient = gradient_of(case, out)
        torch.cuda.reset_peak_memory_stats()
        before = bytes_of("current")
        torch.autograd.grad(out, wanted, gradient)
        found["backward"] = bytes_of("peak") - before
    return found


def main(cases: Path, found: Path) -> None:
    """Runs all cases of one file and writes what each took to another."""
    gc.disable()
    gc.freeze()
    torch.autograd.set_multithreading_enabled(False)  # no other thread frees what is counted
    square = torch.ones(8, 8, device="cuda")
    square @ square  # the workspace of its handle is no matter of attention
    answers = []
    kinds = {"call": run_call, "layer": run_layer, "model": run_model}
    for case in json.loads(cases.read_text()):
        gc.collect()  # what the last case left in cycles would be freed in the midst of this one
        answers.append(kinds[case.get("kind", "call")](case))
    found.write_text(json.dumps(answers))


if __name__ == "__main__":
    assert {each.value for each in map(SDPBackend, (MATH, FLASH, EFFICIENT, CUDNN))} == {0, 1, 2, 3}
    main(Path(sys.argv[1]), Path(sys.argv[2]))
