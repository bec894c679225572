"""Random calls of ``flex_attention``: as JSON, as tensors, and run with torch's memory figures."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

_WIDTHS = [16, 32, 64, 80, 128, 256]
_LENGTHS = [128, 200, 256, 384, 512, 1000, 1024]
_SHORT = [1, 1, 2, 5, 16, 32, 100]
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def draw(chance: random.Random) -> dict[str, Any]:
    """Draws one call."""
    is_short = chance.random() < 0.25
    length = chance.choice(_SHORT if is_short else _LENGTHS)
    keys = chance.choice([*_LENGTHS, 2048, 4096]) if is_short else length
    heads = chance.choice([1, 2, 4, 6, 8, 12])
    kept = chance.choice([each for each in range(1, heads + 1) if heads % each == 0])
    batch = chance.choice([1, 2, 3, 4])
    width = chance.choice(_WIDTHS)
    mask = chance.choice(["", "causal", "causal", "documents", "for each"])
    return {
        "dtype": chance.choice(["float16", "bfloat16", "bfloat16", "float32"]),
        "batch": batch,
        "kept_batch": 1 if mask == "for each" and chance.random() < 0.3 else batch,
        "heads": heads,
        "kept_heads": kept if chance.random() < 0.4 else heads,
        "length": length,
        "keys": keys,
        "width": width,
        "value_width": width if chance.random() < 0.85 else chance.choice(_WIDTHS),
        "layout": chance.choice(["by head", "by position"]),
        "learns": chance.choice(["qkv", "qkv", "qkv", "", "v"]),
        "score": chance.choice(["", "", "cap", "slopes", "bias", "relative"]),
        "bias_learns": chance.random() < 0.6,
        "bias_dtype": chance.choice(["", "float32"]),
        "mask": mask,
        "returns": chance.choice(["", "", "", "sums", "greatest", "both"]),
        "sums_learn": chance.random() < 0.5,
        "options": chance.choice([{}, {}, {"BACKEND": "TRITON"}]),
        "gradient": chance.choice(["as out", "as out", "one"]),
        "how": chance.choice([*["compiled"] * 5, "inside", "inside", "plain"]),
    }


def learns(case: dict[str, Any]) -> bool:
    """Tells whether a call has a backward pass."""
    is_bias = case["score"] in ("slopes", "bias", "relative") and case["bias_learns"]
    return bool(case["learns"]) or is_bias


def bias_shape(case: dict[str, Any]) -> tuple[int, ...] | None:
    """Returns the shape of what the function that changes scores has captured."""
    heads, length, keys = case["heads"], case["length"], case["keys"]
    shapes = {"slopes": (heads,), "bias": (heads, length, keys), "relative": (length + keys,)}
    return shapes.get(case["score"])


def bytes_of(which: str) -> int:
    """Returns what was asked of the allocator, without its rounding."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def _tensors(case: dict[str, Any]) -> list[torch.Tensor]:
    sizes = [
        (case["batch"], case["heads"], case["length"], case["width"]),
        (case["kept_batch"], case["kept_heads"], case["keys"], case["width"]),
        (case["kept_batch"], case["kept_heads"], case["keys"], case["value_width"]),
    ]
    order = (0, 1, 2, 3) if case["layout"] == "by head" else (0, 2, 1, 3)
    dtype = getattr(torch, case["dtype"])
    made = []
    for name, shape in zip("qkv", sizes, strict=True):
        tensor = torch.empty_permuted(shape, order, dtype=dtype, device="cuda")
        made.append(tensor.requires_grad_(name in case["learns"]))
    return made


def _bias(case: dict[str, Any]) -> torch.Tensor | None:
    shape = bias_shape(case)
    if shape is None:
        return None
    dtype = getattr(torch, case["bias_dtype"] or case["dtype"])
    return torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=case["bias_learns"])


def _score(case: dict[str, Any], bias: torch.Tensor | None) -> Any:
    keys = case["keys"]

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.tanh(score / 20) * 20

    if bias is None:
        return capped if case["score"] == "cap" else None
    captured = bias

    def sloped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + captured[h] * (k - q)

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + captured[h, q, k]

    def relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + captured[q - k + keys - 1]

    return {"slopes": sloped, "bias": biased, "relative": relative}[case["score"]]


def _mask(case: dict[str, Any]) -> Any:
    if not case["mask"]:
        return None
    documents = torch.zeros(case["keys"], dtype=torch.int32, device="cuda")
    ahead = case["keys"] - case["length"]

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q + ahead >= k

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q + ahead >= k) & (documents[q + ahead] == documents[k])

    each = (case["batch"], case["heads"]) if case["mask"] == "for each" else (None, None)
    seen = same if case["mask"] == "documents" else causal
    return flex.create_block_mask(seen, *each, case["length"], case["keys"], device="cuda")


def _call(case: dict[str, Any], score: Any, mask: Any) -> Call:
    options: dict[str, Any] = {"score_mod": score, "block_mask": mask}
    options["enable_gqa"] = case["heads"] != case["kept_heads"]
    options["kernel_options"] = case["options"] or None
    if case["returns"]:
        is_both = case["returns"] == "both"
        options["return_aux"] = flex.AuxRequest(
            lse=is_both or case["returns"] == "sums",
            max_scores=is_both or case["returns"] == "greatest",
        )
    if case["how"] == "compiled":
        fused = torch.compile(flex.flex_attention, dynamic=False)
        return lambda *inputs: fused(*inputs, **options)

    def attend(*inputs: torch.Tensor) -> Any:
        return flex.flex_attention(*inputs, **options)

    return torch.compile(attend, dynamic=False) if case["how"] == "inside" else attend


def run(case: dict[str, Any]) -> dict[str, int]:
    """Runs one call, and its backward pass, and returns its figures."""
    inputs, bias, mask = _tensors(case), _bias(case), _mask(case)
    attend = _call(case, _score(case, bias), mask)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = bytes_of("current")
    made = attend(*inputs)
    found = {"held": bytes_of("current") - before, "forward": bytes_of("peak") - before}
    wanted = [each for each in (*inputs, bias) if each is not None and each.requires_grad]
    if wanted:
        found |= _go_back(case, made, wanted)
    return found


def _go_back(case: dict[str, Any], made: Any, wanted: list[torch.Tensor]) -> dict[str, int]:
    out, others = made if case["returns"] else (made, None)
    gradient = torch.empty_like(out)
    if case["gradient"] == "one":
        gradient = torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)
    results, gradients = [out], [gradient]
    if others is not None and others.lse is not None and case["sums_learn"]:
        results.append(others.lse)
        gradients.append(torch.empty_like(others.lse))
    del out, others, made
    torch.cuda.reset_peak_memory_stats()
    before = bytes_of("current")
    # The results stay: as where a further operation has saved them.
    given = torch.autograd.grad(results, wanted, gradients, allow_unused=True)
    peak = bytes_of("peak") - before
    return {"backward": peak, "given": sum(each.nbytes for each in given if each is not None)}
