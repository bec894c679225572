"""Frameworks as their users call them on a GPU, in one process in which the simulator is CUDA.

Nothing in here but ``main`` knows of the simulator; tests/sim/test_cuda_face.py reads what became
of each case.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from worker_cases import Cases

case = Cases()


def text() -> torch.Tensor:
    """A source file of Python's own as ``int64`` ``[24, 16]``, a token per byte, on the host."""
    source = Path(argparse.__file__).read_bytes()
    return torch.frombuffer(bytearray(source[:384]), dtype=torch.uint8).long().view(24, 16)


def tiny_model() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            pad_token_id=0,
        )
    )


def assert_equal(found: Any, expected: Any) -> None:
    ours, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value.detach().cpu(), theirs[name].detach().cpu()), name


@case
def the_trainer_of_transformers_trains_in_bf16_and_resumes() -> None:
    import transformers

    class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": text()[index], "labels": text()[index]}

    def train(folder: str, resume: str | None = None) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            bf16=True,
            gradient_checkpointing=True,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=2,
            max_steps=4,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
        )
        assert arguments.device == torch.device("cuda", 0)
        trainer = transformers.Trainer(tiny_model(), arguments, train_dataset=Lines())
        trainer.train(resume_from_checkpoint=resume)
        assert next(trainer.model.parameters()).is_cuda
        return trainer.model

    with tempfile.TemporaryDirectory() as folder:
        whole = train(folder)
        resumed = train(folder, f"{folder}/checkpoint-2")
    assert_equal(resumed, whole)


@case
def accelerate_prepares_accumulates_clips_and_saves() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    assert accelerator.device.type == "cuda"
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(text()), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []

    def train() -> None:
        for (batch,) in loader:
            assert batch.is_cuda
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())

    train()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        train()
        first = losses[6:]
        accelerator.load_state(folder)
        train()
    assert losses[12:] == first
    assert first[-1] < losses[0]


@case
def accelerate_s_own_fp16_scales_the_steps_of_an_offloaded_optimizer() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    import residency

    def train(offload: str) -> Any:
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision="fp16")
        assert isinstance(accelerator.scaler, torch.amp.GradScaler)
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if offload == "before":
            residency.offload_optimizer(optimizer, bucket="16KiB")
        loader = DataLoader(TensorDataset(text()), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if offload == "after":
            residency.offload_optimizer(optimizer, bucket="16KiB")
        for step, (batch,) in enumerate(loader):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss * (float("inf") if step == 2 else 1.0))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert optimizer.step_was_skipped == (step == 2)
            optimizer.zero_grad()
        if offload:
            assert optimizer.optimizer.statistics().num_buckets > 1
        return accelerator.unwrap_model(model)

    plain = train("")
    for offload in ("before", "after"):
        assert_equal(train(offload), plain)


@case
def lightning_trains_on_the_gpu_in_every_precision_and_resumes() -> None:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            assert batch[0].is_cuda
            loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fit(precision: str, epochs: int, folder: str, resume: str | None = None) -> Any:
        torch.manual_seed(3)
        trainer = lightning.Trainer(
            accelerator="auto" if precision == "32" else "gpu",
            devices=1,
            precision=precision,
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        module = Module()
        loader = DataLoader(TensorDataset(text()[:8]), batch_size=4, pin_memory=True)
        trainer.fit(module, loader, ckpt_path=resume)
        trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
        return module

    for precision in ("32", "bf16-mixed", "16-mixed"):
        with tempfile.TemporaryDirectory() as folder:
            fit(precision, 1, folder)
            whole = fit(precision, 2, folder)
            resumed = fit(precision, 2, folder, f"{folder}/1.ckpt")
        assert_equal(resumed, whole)


@case
def peft_trains_saves_loads_and_merges_an_adapter() -> None:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(tiny_model(), config).to("cuda")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        tokens = text()[4 * step : 4 * step + 4].cuda(non_blocking=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    prompt = text()[:2].cuda()
    trained = model.eval()(input_ids=prompt).logits
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        base = tiny_model().to("cuda")
        loaded = peft.PeftModel.from_pretrained(base, folder, torch_device="cuda").eval()
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cuda"}
    assert torch.equal(loaded(input_ids=prompt).logits, trained)
    merged = loaded.merge_and_unload()(input_ids=prompt).logits
    assert torch.allclose(merged, trained, atol=1e-5)


def main(folder: Path) -> None:
    from residency import sim

    sim.enable("1GiB", check_races=True, device="cuda")
    warnings.simplefilter("ignore")  # the frameworks' advice to their users
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
