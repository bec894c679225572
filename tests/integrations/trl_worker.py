"""TRL's trainers with the integration, on models and tokenizers made here, in one process in which
the simulator is CUDA; and a process that dies while it saves.

test_transformers.py reads what became of each case.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from safetensors.torch import load_file
from transformers_lab import (
    adapter_of,
    assert_same,
    device_peak,
    ours,
    set_up_process,
    tiny_model,
    tokenizer,
    watched,
)
from worker_cases import Cases, take_device

import residency
from residency.integrations.transformers import ResidencyTrainerMixin

case = Cases()
WORDS = [
    "a",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "then",
    "some",
    "more",
]


class MixedSFT(ResidencyTrainerMixin, trl.SFTTrainer):
    """Is what a user writes."""


class MixedGRPO(ResidencyTrainerMixin, trl.GRPOTrainer):
    """Is what a user writes."""


def lora() -> Any:
    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )


COMMON = {
    "max_steps": 4,
    "save_steps": 2,
    "learning_rate": 1e-2,
    "report_to": [],
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_total_limit": 2,
}


def run_of(kind: Any, settings: Any, callbacks: Any, resume: str | None, **others: Any) -> Any:
    torch.manual_seed(1)
    trainer = kind(
        tiny_model(vocab_size=32),
        args=settings,
        processing_class=tokenizer(WORDS),
        peft_config=lora(),
        callbacks=list(callbacks),
        **others,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def sft(kind: Any, folder: str, *callbacks: Any, resume: str | None = None) -> Any:
    rows = datasets.Dataset.from_dict({"text": [" ".join(WORDS[i:] + WORDS[:i]) for i in range(8)]})
    settings = trl.SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_length=16,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        **COMMON,
    )
    return run_of(kind, settings, callbacks, resume, train_dataset=rows, eval_dataset=rows)


def variety(completions: list[str], **others: Any) -> list[float]:
    return [float(len(set(each))) for each in completions]


def grpo(kind: Any, folder: str, *callbacks: Any, resume: str | None = None) -> Any:
    rows = datasets.Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 3]) for i in range(8)]})
    settings = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        beta=0.01,
        **COMMON,
    )
    return run_of(kind, settings, callbacks, resume, train_dataset=rows, reward_funcs=variety)


def check(run: Any, stock: Any, mixed: Any) -> None:
    """A run and a resumption with each of ours end at the adapter of stock code's."""
    with tempfile.TemporaryDirectory() as folder:
        expected = adapter_of(run(stock, f"{folder}/stock").model)
        assert any(value.any() for name, value in expected.items() if "lora_B" in name)
        names = {p.name for p in Path(f"{folder}/stock/checkpoint-4").iterdir()}
        for kind in (stock, mixed):
            where = f"{folder}/{kind.__name__}"
            for resume in (None, f"{where}/checkpoint-2"):
                with watched(peft.peft_model, "load_peft_weights") as calls:
                    trainer = run(kind, where, ours(), resume=resume)
                assert {kwargs["device"] for _, kwargs in calls} <= {"cpu"}
                assert_same(adapter_of(trainer.model), expected)
                assert isinstance(trainer.optimizer.optimizer, residency.OffloadedOptimizer)
            assert {p.name for p in Path(f"{where}/checkpoint-4").iterdir()} == names
            saved = load_file(f"{where}/checkpoint-4/adapter_model.safetensors")
            trainer.model.load_adapter(f"{where}/checkpoint-4", "default")
            assert_same(adapter_of(trainer.model), saved)


@case
def supervised_fine_tuning_ends_at_stock_s_adapter_with_the_callback_and_with_the_mixin() -> None:
    check(sft, trl.SFTTrainer, MixedSFT)


@case
def group_relative_policy_optimization_does_too() -> None:
    check(grpo, trl.GRPOTrainer, MixedGRPO)


@case
def a_model_in_four_bits_trains_on_the_host_and_its_adapter_comes_back() -> None:
    """As far as bitsandbytes goes without CUDA: its kernels for the host."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(vocab_size=32).save_pretrained(folder)
        model = transformers.Qwen3ForCausalLM.from_pretrained(
            folder,
            device_map={"": "cpu"},
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
            ),
        )
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapted = peft.get_peft_model(model, lora())
    assert type(adapted.base_model.model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    settings = transformers.TrainingArguments(
        **{**COMMON, "use_cpu": True, "max_steps": 2, "save_steps": 1}, output_dir="unused"
    )
    assert settings.device.type == "cpu"
    rows = [{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)}] * 8
    with tempfile.TemporaryDirectory() as folder:
        settings.output_dir = folder

        class Mixed(ResidencyTrainerMixin, transformers.Trainer):
            pass

        trainer = Mixed(adapted, settings, train_dataset=rows, callbacks=[ours()])
        trainer.train()
        last = adapter_of(adapted)
        assert_same(load_file(f"{folder}/checkpoint-2/adapter_model.safetensors"), last)
        first = load_file(f"{folder}/checkpoint-1/adapter_model.safetensors")
        assert any(not torch.equal(first[name], last[name]) for name in first)
        assert device_peak(lambda: adapted.load_adapter(f"{folder}/checkpoint-1", "default")) == 0
        assert_same(adapter_of(adapted), first)


def main(folder: Path) -> None:
    set_up_process()
    take_device("1GiB", face="cuda", check_races=True)
    datasets.disable_progress_bars()
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
