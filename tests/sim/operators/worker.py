"""Runs items of torch's tables on the device, one for each line of its input.

    python worker.py real|dry

An item is ``[kind, name, dtype, variants, most samples]``. Before each variant there is a line that
names it, so that whoever reads knows what a process died of.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from modules_and_optimizers import run_module, run_optimizer
from running import (
    LAYOUTS,
    Bench,
    Call,
    NotApplicableError,
    forward_mode,
    in_place,
    into_out,
    judge,
    on_stream,
    plain,
    sample_on,
    twice_differentiated,
)
from torch_tables import Tables, operator_samples, tensors_in

from residency import sim

_WITHOUT_VALUES = (  # what they hold is undefined
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)
_WORST = ["skipped", "equal", "close", "error", "different"]


def _call(info: Any, variant: str, bench: Bench, index: int) -> tuple[Call, bool]:
    """Returns the call of a variant, and whether it is differentiated afterwards."""
    if variant in LAYOUTS:
        return plain(info.op), True
    if variant == "side_stream":
        return on_stream(info.op, bench.side), True
    if variant == "in_place" and info.inplace_variant is not None:
        return in_place(info.inplace_variant), False
    if variant == "out" and info.supports_out:
        return into_out(info.op, is_empty=bool(index % 2)), False
    if variant == "forward_mode" and info.supports_forward_ad:
        return forward_mode(info.op), False
    if variant == "double_backward" and info.supports_gradgrad:
        return twice_differentiated(info.op), True
    raise NotApplicableError


def _run_operator(
    info: Any, dtype: torch.dtype, variant: str, bench: Bench, most: int
) -> Iterator[tuple[str, str, Any]]:
    if info.name in _WITHOUT_VALUES:
        return
    _, needs_grad = _call(info, variant, bench, 0)
    is_differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    grad = needs_grad and is_differentiable and dtype.is_floating_point
    if dtype not in info.supported_dtypes("cpu") or (variant == "double_backward" and not grad):
        return
    layout = variant if variant in LAYOUTS else "contiguous"
    for index, sample in enumerate(operator_samples(info, dtype, grad=grad, most=most)):
        used = tensors_in((sample.input, sample.args, sample.kwargs))
        if layout == "channels_last" and not any(t.dim() in (4, 5) for t in used):
            continue
        call, _ = _call(info, variant, bench, index)
        yield judge(bench, call, lambda d, s=sample: sample_on(s, d, layout), grad=grad)


def _outcome(results: Iterator[tuple[str, str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"status": "skipped", "detail": "", "samples": []}
    try:
        for status, detail, outcome in results:
            if _WORST.index(status) > _WORST.index(answer["status"]):
                answer["status"], answer["detail"] = status, detail
            measured = outcome and {"peak_bytes": outcome.peak_bytes, "forms": outcome.forms()}
            answer["samples"].append([status, detail, measured])
    except NotApplicableError:
        pass
    return answer


def _answer(tables: Tables, bench: Bench, item: list[Any], say: Any) -> None:
    kind, name, dtype_name, variants, most = item
    info, dtype = tables.info(kind, name), getattr(torch, dtype_name)
    run = {"operator": _run_operator, "module": run_module, "optimizer": run_optimizer}[kind]
    answers = {}
    for variant in variants:
        say({"begins": variant})
        answers[variant] = _outcome(run(info, dtype, variant, bench, most))
        say({"variant": variant, **answers[variant]})
    say({"ends": True})


def main() -> None:
    # What a test of torch's prints goes elsewhere: the lines of answers have a stream of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    warnings.simplefilter("ignore")  # torch's own samples warn of what is deprecated
    torch.set_num_threads(1)
    is_dry = sys.argv[1] == "dry"
    try:
        tables = Tables()
    except ImportError as error:
        return say({"missing": str(error)})
    gc.collect()
    gc.freeze()  # a hundred thousand samples' makers, which every later collection would go through
    bench = Bench(torch.device(sim.enable("4GiB", schedule="late", dry=is_dry)), is_dry=is_dry)
    say({kind: tables.names(kind) for kind in ("operator", "module", "optimizer")})
    for line in sys.stdin:
        _answer(tables, bench, json.loads(line), say)
    return None


if __name__ == "__main__":
    main()
