"""PEFT on the device: an adapter that is trained, saved, loaded again, switched and merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.sim,
    # PEFT asks transformers 5.23 by a name that is given up in its version 6.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

AssertSame = Callable[[object, object], None]


@pytest.fixture(scope="module")
def peft(framework: Callable[..., Any]) -> Any:
    framework("transformers", "LlamaForCausalLM")
    return framework("peft")


def _base() -> Any:
    import transformers  # PEFT needs it

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )


def _adapted(peft: Any, place: object) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(_base(), config).to(place)


def _train(model: Any, text: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=True
    )
    losses = []
    for step in range(3):
        tokens = text[4 * step : 4 * step + 4].to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _logits(model: Any, text: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=text[:2].to(model.device)).logits.cpu()  # type: ignore[no-any-return]


def test_an_adapter_is_trained_saved_loaded_switched_and_merged(
    peft: Any, device: torch.device, text: torch.Tensor, tmp_path: Path, assert_same: AssertSame
) -> None:
    expected, found = _adapted(peft, "cpu"), _adapted(peft, device)
    assert _train(found, text) == _train(expected, text)
    assert_same(found, expected)
    found.save_pretrained(tmp_path)

    loaded = peft.PeftModel.from_pretrained(_base().to(device), tmp_path, torch_device="sim")
    assert {parameter.device for parameter in loaded.parameters()} == {device}
    trained = _logits(found, text)
    assert torch.equal(trained, _logits(expected, text))
    assert torch.equal(_logits(loaded, text), trained)

    loaded.load_adapter(tmp_path, "second", torch_device="sim")
    assert {parameter.device for parameter in loaded.parameters()} == {device}
    loaded.set_adapter("second")
    assert torch.equal(_logits(loaded, text), trained)
    with loaded.disable_adapter():
        assert torch.equal(_logits(loaded, text), _logits(_base(), text))
    loaded.delete_adapter("default")
    assert list(loaded.peft_config) == ["second"]

    assert_same(loaded.merge_and_unload(), expected.merge_and_unload())
