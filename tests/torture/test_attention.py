"""Random attention on simulated cards, judged by an oracle that was read in torch's CUDA sources.

Calls of ``scaled_dot_product_attention`` in every layout and type, torch's layers in inference, and
calls that models of Transformers make, all in dry runs: which kernel torch takes, what it keeps,
and what it takes at its peaks, to the byte.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torture.attention_cases import draw, gradient_of, tensors_of
from tests.torture.attention_models import draw_layer, draw_model, read
from tests.torture.attention_oracle import (
    CARDS,
    FLASH,
    MATH,
    Attention,
    Call,
    Card,
    Figures,
    Layer,
    bytes_of,
    is_aligned,
)
from tests.torture.card_programs import found_on

Torture = Callable[[Callable[[random.Random], None]], None]

PROGRAM = Path(__file__).parent / "attention_program.py"
# Deterministic matrix products want it; its size is the default one's.
WORKSPACE = ":4096:8"


def check_call(case: dict[str, Any], found: dict[str, Any], card: Card) -> None:
    """Holds one call against the oracle."""
    call = tensors_of(case, "meta")
    expected = Attention(call, card).figures()
    if expected is None:
        assert "viable" in found["error"] or "available" in found["error"], found
        return
    assert "error" not in found, (expected, found)
    check_forward(expected, found)
    is_padded = expected.choice == FLASH and case["width"] % 8  # autograd cuts what was padded
    if expected.choice == MATH or is_padded:
        return
    least = expected_backward(case, card)
    if case["mask_learns"]:  # after the kernel autograd sums over what the mask was repeated for
        assert found["backward"] >= least, (expected, found)
    else:
        assert found["backward"] == least, (expected, found)


def expected_backward(case: dict[str, Any], card: Card) -> int:
    """Returns the peak of a backward pass."""
    call = tensors_of(case, "meta")
    shape = (*call.query.shape[:3], call.value.shape[-1])
    out = torch.empty(shape, dtype=call.query.dtype, device="meta")
    figures = Attention(replace(call, gradient=gradient_of(case, out)), card).figures()
    assert figures is not None
    return figures.backward


def check_forward(expected: Figures, found: dict[str, Any]) -> None:
    """Holds a forward pass against figures; the plain formula takes at least its scores."""
    assert found["choice"] == expected.choice, (expected, found)
    if expected.choice == MATH:
        assert found["held"] >= expected.held, (expected, found)
        assert found["forward"] >= expected.forward, (expected, found)
    else:
        assert found["held"] == expected.held, (expected, found)
        assert found["forward"] == expected.forward, (expected, found)


def check_layer(case: dict[str, Any], found: dict[str, Any], card: Card) -> None:
    """Holds a layer of torch's against what its operations take."""
    names = ("batch", "length", "heads", "width", "hidden", "norm_first", "is_padded")
    is_attention = case["module"] == "attention"
    layer = Layer(
        card,
        getattr(torch, case["dtype"]),
        *(case[each] for each in names),
        weights=is_attention and case["weights"],
    )
    one = layer.rows * case["width"]
    if is_attention:
        expected = layer.attention()
        held = one + (layer.rows * case["length"] if case["weights"] else 0)
    else:
        # Of an encoder's second layer, the input is the first one's output.
        expected = layer.layer() + (one if case["module"] == "encoder" else 0)
        held = one
    assert (found["peak"], found["held"]) == (expected + layer.mask(), held)


def check_model(case: dict[str, Any], found: dict[str, Any], card: Card) -> None:
    """Holds each call of attention that a model made against the oracle."""
    assert bool(found["calls"]) == (case["attention"] == "sdpa")
    for found_call in found["calls"]:
        call, copies = read(found_call)
        expected = Attention(call, card).figures()
        assert expected is not None
        expected = with_copies(expected, call, copies)
        if copies:
            found_call["choice"] = expected.choice  # torch was asked about what was not cast yet
        if case["checkpoint"] and found_call["held"] == found_call["output"]:
            found_call["held"] = expected.held  # what is saved for gradients is made again
        try:
            check_forward(expected, found_call)
        except AssertionError as error:
            error.add_note(json.dumps(found_call))
            raise


def with_copies(figures: Figures, call: Call, copies: list[torch.Tensor]) -> Figures:
    """Adds the copies of autocast: until the call ends, or until gradients have read them."""
    taken = sum(bytes_of(each) for each in copies)
    kept = taken if call.learns else 0
    is_masked = any(each is call.mask for each in copies)
    if kept and is_masked and call.mask is not None and not is_aligned(call.mask, 8):
        kept -= bytes_of(call.mask)  # the kernel keeps what is padded
    return replace(figures, held=figures.held + kept, forward=figures.forward + taken)


CHECKS = {"call": check_call, "layer": check_layer, "model": check_model}


def judged(torture: Torture, folder: Path, draw_some: Callable[..., list[dict[str, Any]]]) -> None:
    """Judges random cases on a random card, in one dry run each time."""

    def judge(chance: random.Random) -> None:
        card = chance.choice(list(CARDS))
        cases = draw_some(chance)
        answers = found_on(card, PROGRAM, cases, folder, CUBLAS_WORKSPACE_CONFIG=WORKSPACE)
        for case, found in zip(cases, answers, strict=True):
            try:
                CHECKS[case.get("kind", "call")](case, found, CARDS[card])
            except AssertionError as error:
                error.add_note(f"{card}: {json.dumps(case)}")
                raise

    torture(judge)


def test_calls_and_layers_take_the_kernels_and_the_bytes_of_torchs_sources(
    torture: Torture, tmp_path: Path
) -> None:
    def draw_some(chance: random.Random) -> list[dict[str, Any]]:
        calls = [draw(chance) for _ in range(24)]
        return calls + [draw_layer(chance) for _ in range(8)]

    judged(torture, tmp_path, draw_some)


@pytest.mark.whole  # models take seconds to make
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_models_of_transformers_take_the_kernels_and_the_bytes_of_torchs_sources(
    torture: Torture, tmp_path: Path
) -> None:
    judged(torture, tmp_path, lambda chance: [draw_model(chance) for _ in range(4)])
