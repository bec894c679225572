"""Torch's transformer layers in inference, which torch computes by one call of the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from allocator import take_defaults
from requested import requested
from torch import nn

from residency import sim

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("quick_collections")]

BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 2, 48, 64, 4, 96
ONE = BATCH * LENGTH * WIDTH * 4  # of one float32 for each position and width


@pytest.fixture(autouse=True)
def device_of_its_own() -> Iterator[None]:
    gc.collect()
    sim.enable("1GiB")
    yield
    take_defaults()


def _layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(1)
    return nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True).eval()


def _padding() -> torch.Tensor:
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, LENGTH // 2 :] = True
    return padding


def _peak_of(module: nn.Module, x: torch.Tensor, **options: object) -> int:
    module(x, **options)  # a matrix product has its workspace from the first one on
    torch.accelerator.reset_peak_memory_stats()
    before = requested("current")
    module(x, **options)
    return requested("peak") - before


@pytest.mark.parametrize("dry", [False, True])
@torch.no_grad()
def test_a_layer_takes_what_its_projections_and_its_scores_take(dry: bool) -> None:
    sim.enable("1GiB", dry=dry)
    layer, x = _layer().to("sim"), torch.ones(BATCH, LENGTH, WIDTH, device="sim")
    assert _peak_of(layer, x) == 3 * ONE + 2 * ONE  # three projections, what they attend, the last
    scores = BATCH * HEADS * LENGTH * LENGTH * 4
    mask = BATCH * LENGTH * (4 + 1)  # as a fraction, and as truth values again
    padded = _peak_of(layer, x, src_key_padding_mask=_padding().to("sim"))
    assert padded == 3 * ONE + 2 * scores + mask


@pytest.mark.parametrize("is_padded", [False, True])
@torch.no_grad()
def test_a_layer_and_its_attention_compute_what_the_cpu_does(is_padded: bool) -> None:
    layer, padding = _layer(), _padding() if is_padded else None
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    on_host = layer(x, src_key_padding_mask=padding)
    output, weights = layer.self_attn(x, x, x, key_padding_mask=padding)
    layer = layer.to("sim")
    there = None if padding is None else padding.to("sim")
    found = layer(x.to("sim"), src_key_padding_mask=there)
    torch.testing.assert_close(found.cpu(), on_host, rtol=1e-4, atol=1e-5)
    attended = layer.self_attn(*[x.to("sim")] * 3, key_padding_mask=there)
    torch.testing.assert_close(attended[0].cpu(), output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attended[1].cpu(), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dry", [False, True])
@torch.no_grad()
def test_a_padded_batch_goes_through_an_encoder_in_inference(dry: bool) -> None:
    """By padded tensors, also where torch would take ragged ones on CUDA."""
    padding = _padding()
    encoder = nn.TransformerEncoder(_layer(), 2, enable_nested_tensor=False).eval()
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    expected = encoder(x, src_key_padding_mask=padding)
    encoder.use_nested_tensor = encoder.enable_nested_tensor = True
    sim.enable("1GiB", dry=dry)
    found = encoder.to("sim")(x.to("sim"), src_key_padding_mask=padding.to("sim"))
    assert found.shape == x.shape
    if not dry:
        kept = ~padding
        torch.testing.assert_close(found.cpu()[kept], expected[kept], rtol=1e-4, atol=1e-5)
