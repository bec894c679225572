"""`transformers` on the device: loading, generation, checkpointed activations and the Trainer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.sim, pytest.mark.whole]

AssertSame = Callable[[object, object], None]
Make = Callable[[], Any]


@pytest.fixture(scope="module")
def transformers(framework: Callable[..., Any]) -> Any:
    return framework("transformers", "AutoModelForCausalLM", "Qwen3ForCausalLM", "Trainer")


@pytest.fixture
def make_model(transformers: Any) -> Make:
    """Makes a tiny Qwen3 on the host, each time with the same weights."""
    config = transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,  # without groups the kernels are the CPU's
        head_dim=8,
        pad_token_id=0,
    )

    def make() -> Any:
        torch.manual_seed(0)
        return transformers.Qwen3ForCausalLM(config)

    return make


def test_a_model_loads_onto_the_device(
    transformers: Any,
    device: torch.device,
    make_model: Make,
    tmp_path: Path,
    assert_same: AssertSame,
) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    for place in ("sim", "sim:0", {"": "sim"}, device):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=place)
        assert {parameter.device for parameter in loaded.parameters()} == {device}
        assert_same(loaded, model)
    loaded.save_pretrained(tmp_path / "again")
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)


def test_the_tokens_that_are_generated_are_the_cpu_s(
    device: torch.device, make_model: Make, text: torch.Tensor
) -> None:
    outputs = []
    for place in ("cpu", device):
        prompt = text[:2].to(place)
        outputs.append(make_model().to(place).generate(prompt, max_new_tokens=8).cpu())
    assert outputs[0].shape == (2, 24)
    assert torch.equal(*outputs)


def test_the_tokens_that_are_drawn_follow_from_the_seed(
    device: torch.device, make_model: Make, text: torch.Tensor
) -> None:
    """As on CUDA, a device draws other numbers than the host."""
    model = make_model().to(device)
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn = model.generate(text[:2].to(device), max_new_tokens=8, do_sample=True, top_k=20)
        outputs.append(drawn.cpu())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def _gradients(model: Any, text: torch.Tensor) -> list[torch.Tensor]:
    tokens = text[:4].to(model.device)
    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("is_reentrant", [False, True], ids=["saved hooks", "reentrant"])
# The advice of a newer name, where the version under test has one.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_activations_computed_again_give_the_same_gradients(
    device: torch.device, make_model: Make, text: torch.Tensor, is_reentrant: bool
) -> None:
    expected = _gradients(make_model(), text)
    model = make_model().to(device)
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    if is_reentrant:
        model.enable_input_require_grads()
    found = _gradients(model, text)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---------------------------------------------------------------------------------------- Trainer


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.text[index], "labels": self.text[index]}


@pytest.fixture
def train(
    transformers: Any,
    device: torch.device,
    make_model: Make,
    text: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Any]]:
    from accelerate.state import AcceleratorState

    def run(*, on_host: bool = False, resume: str | None = None, **options: Any) -> Any:
        AcceleratorState._reset_state(True)
        if on_host:
            monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
        else:
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"),
            use_cpu=on_host,
            max_steps=4,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            optim="adamw_torch",
            optim_args="foreach=True" if on_host else None,  # the default on the device
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=not on_host,
            **options,
        )
        trainer = transformers.Trainer(make_model(), arguments, train_dataset=Lines(text))
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / "run" / resume))
        assert trainer.model.device.type == ("cpu" if on_host else "sim")
        return trainer

    yield run
    AcceleratorState._reset_state(True)


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_ends_at_the_cpu_s_bits(
    train: Callable[..., Any], assert_same: AssertSame
) -> None:
    expected, found = train(on_host=True), train()
    assert len(_losses(found)) == 4
    assert _losses(found) == _losses(expected)
    assert_same(found.model, expected.model)


@pytest.mark.parametrize("is_mixed", [False, True], ids=["fp32", "bf16"])
def test_the_trainer_resumes_to_the_bits_of_an_uninterrupted_run(
    train: Callable[..., Any], assert_same: AssertSame, is_mixed: bool
) -> None:
    whole = train(bf16=is_mixed)
    resumed = train(bf16=is_mixed, resume="checkpoint-2")
    assert _losses(resumed)[-2:] == _losses(whole)[-2:]
    assert_same(resumed.model, whole.model)
    moments = resumed.optimizer.state[resumed.model.lm_head.weight]["exp_avg"]
    assert moments.device.type == "sim"


def test_the_trainer_s_bf16_is_autocast_on_the_device(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not the CPU's bits: its autocast lists are others than CUDA's, which the device has.
    asked = []
    autocast = torch.autocast

    def spy(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return autocast(*args, **options)

    monkeypatch.setattr(torch, "autocast", spy)
    mixed, full = train(bf16=True), train()
    assert any("sim" in (*args, options.get("device_type")) for args, options in asked)
    assert _losses(mixed) != _losses(full)
    torch.testing.assert_close(_losses(mixed), _losses(full), rtol=0.02, atol=0)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_transformers_learns_of_bf16_whenever_it_is_imported(
    transformers: Any, is_first: bool
) -> None:
    imports = "import transformers.training_args, transformers.modeling_utils"
    enables = "from residency import sim; sim.enable('1GiB')"
    first, second = (imports, enables) if is_first else (enables, imports)
    script = f"""
import sys
{first}
assert {is_first} or "transformers" not in sys.modules
{second}
from transformers.utils import import_utils
import transformers.utils
import safetensors
for module in (import_utils, transformers.utils, transformers.training_args):
    assert module.is_torch_bf16_gpu_available(), module
assert transformers.modeling_utils.safe_open is safetensors.safe_open
assert not any(type(finder).__name__ == "_AfterImport" for finder in sys.meta_path)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
