"""Denoisers of diffusers and an encoder with a decoder: the bits of a resident run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from frozen_lab import assert_alike, trained
from torch import Tensor

pytestmark = [pytest.mark.sim, pytest.mark.whole]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _partly_frozen(model: Any) -> Any:
    """Trains the biases of projections to values, as an adapter lies within each block."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".to_v." in name or name.endswith(("v.weight", "out.0.bias")))
    return model.train()


def _unet() -> Any:
    import diffusers

    return _partly_frozen(
        diffusers.UNet2DConditionModel(
            block_out_channels=(16, 32, 32),
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=8,
            norm_num_groups=8,
            sample_size=8,
        )
    )


def _flux() -> Any:
    import diffusers

    return _partly_frozen(
        diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=3,
            num_single_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        )
    )


def _t5() -> Any:
    import transformers

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3}
    config = transformers.T5Config(**sizes, num_heads=4, decoder_start_token_id=0)
    return _partly_frozen(transformers.T5ForConditionalGeneration(config))


def _denoise(model: Any, device: torch.device) -> Tensor:
    noise = torch.randn(2, 4, 8, 8).to(device)
    words = torch.randn(2, 5, 16).to(device)
    return model(noise, torch.tensor([3, 7]).to(device), words).sample


def _flow(model: Any, device: torch.device) -> Tensor:
    places = torch.zeros(16, 3).to(device), torch.zeros(5, 3).to(device)
    return model(
        hidden_states=torch.randn(2, 16, 4).to(device),
        encoder_hidden_states=torch.randn(2, 5, 32).to(device),
        pooled_projections=torch.randn(2, 32).to(device),
        timestep=torch.tensor([0.3, 0.7]).to(device),
        img_ids=places[0],
        txt_ids=places[1],
    ).sample


def _translate(model: Any, device: torch.device) -> Tensor:
    tokens = torch.randint(1, 64, (2, 9)).to(device)
    return model(input_ids=tokens, labels=tokens).logits


CASES = {"unet": (_unet, _denoise), "flux": (_flux, _flow), "t5": (_t5, _translate)}


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(("make", "forward"), CASES.values(), ids=CASES.keys())
def test_a_partly_frozen_model_is_trained_to_the_same_bits(
    device: torch.device,
    framework: Callable[..., Any],
    make: Callable[[], Any],
    forward: Callable[..., Tensor],
    is_checkpointed: bool,
) -> None:
    framework("transformers", "T5ForConditionalGeneration")
    framework("diffusers", "UNet2DConditionModel", "FluxTransformer2DModel")

    def step(model: Any, device: torch.device) -> list[Tensor]:
        if is_checkpointed and hasattr(model, "enable_gradient_checkpointing"):
            model.enable_gradient_checkpointing()
        elif is_checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        found = []
        for _ in range(3):
            loss = forward(model, device).float().square().mean()
            loss.backward()
            found += [
                loss.detach(),
                *(p.grad.clone() for p in trained(model) if p.grad is not None),
            ]
            model.zero_grad()
        return found

    assert_alike(make, step, device)
