"""What the workers of test_transformers.py share: tiny models, arguments, and readings of both."""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from worker_cases import Cases, optional

import residency
from residency.integrations.transformers import ResidencyCallback, ResidencyTrainerMixin

peft = optional("peft")
case = Cases()  # of the files that transformers_worker.py imports
BUCKET = "16KiB"  # a few of them hold the states of a tiny model


class Mixed(ResidencyTrainerMixin, transformers.Trainer):
    """Is what a user writes."""


def set_up_process() -> None:
    """Sets one thread, cuBLAS's usual workspaces, and no advice or bars of the frameworks."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # capacities here have no room for larger ones
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the frameworks' advice to their users
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def text() -> Tensor:
    """A source file of Python's own as ``int64`` ``[24, 16]``, a token per byte, on the host."""
    source = Path(argparse.__file__).read_bytes()
    return torch.frombuffer(bytearray(source[:384]), dtype=torch.uint8).long().view(24, 16)


def inside(folder: str) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


class Lines(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": text()[index], "labels": text()[index]}


def tiny_model(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **{
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pad_token_id": 0,
            **settings,
        }
    )
    return transformers.Qwen3ForCausalLM(config)


def tokenizer(words: Iterable[str] = ()) -> Any:
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<unk>"]
    tokens = {word: index for index, word in enumerate([*special, *words])}
    made = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def adapted(model: Any = None, **settings: Any) -> Any:
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings})
    torch.manual_seed(1)
    return peft.get_peft_model(tiny_model() if model is None else model, config)


def arguments(folder: str | Path, **settings: Any) -> Any:
    return transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "save_steps": 2,
            "eval_steps": 2,
            "eval_strategy": "steps",
            "load_best_model_at_end": True,
            "learning_rate": 1e-2,
            "warmup_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            **settings,
        }
    )


def make(
    model: Any,
    folder: str | Path,
    *callbacks: Any,
    kind: Any = transformers.Trainer,
    **settings: Any,
) -> Any:
    options = (
        {"max_in_flight": settings.pop("max_in_flight")} if "max_in_flight" in settings else {}
    )
    return kind(
        model,
        arguments(folder, **settings),
        train_dataset=Lines(),
        eval_dataset=Lines(),
        callbacks=list(callbacks),
        **options,
    )


def trained(
    model: Any, folder: str | Path, *callbacks: Any, resume: str | None = None, **settings: Any
) -> Any:
    trainer = make(model, folder, *callbacks, **settings)
    trainer.train(resume_from_checkpoint=resume and str(Path(folder) / resume))
    return trainer


def ours(**settings: Any) -> ResidencyCallback:
    return ResidencyCallback(**{"bucket": BUCKET, **settings})


def weights(model: Any) -> dict[str, Tensor]:
    """Copies of all parameters and buffers on the host."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compares bits, where they are tensors."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Mapping):
            assert_same(found[name], value)
        elif isinstance(value, Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name].detach().cpu(), value.detach().cpu()), name
        else:
            assert found[name] == value, name


def adapter_of(model: Any, name: str = "default") -> dict[str, Tensor]:
    """What PEFT would write of an adapter now."""
    found = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return {key: value.detach().cpu().clone() for key, value in found.items()}


def files_of(folder: Path) -> dict[str, Path]:
    return {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}


def device_peak(call: Callable[[], object]) -> int:
    """Bytes by which a call's peak on the device exceeds what was allocated before."""
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    call()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


class Each(transformers.TrainerCallback):
    """Calls functions of a test at events that it names."""

    def __init__(self, **functions: Callable[..., object]) -> None:
        for name, function in functions.items():
            setattr(self, name, self._calling(function))

    @staticmethod
    def _calling(function: Callable[..., object]) -> Callable[..., None]:
        def called(args: Any, state: Any, control: Any, **others: Any) -> None:
            function(state)

        return called


@contextmanager
def watched(target: Any, name: str) -> Iterator[list[Any]]:
    """Notes the arguments of a function's calls, which are made."""
    calls: list[Any] = []
    function = getattr(target, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return function(*args, **kwargs)

    with mock.patch.object(target, name, noted):
        yield calls


def prepared(*, offload: bool) -> tuple[Any, ...]:
    """Returns an accelerator with a model, an optimizer and a schedule, as its user has them."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator, model = Accelerator(), tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    made = accelerator.prepare(model, optimizer, schedule)
    if offload:
        residency.offload_optimizer(made[1], bucket=BUCKET)
    return accelerator, *made


def accelerated(parts: tuple[Any, ...], batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Steps once a batch; returns the weights."""
    accelerator, model, optimizer, schedule = parts
    for batch in batches:
        tokens = batch.to(accelerator.device)
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights(accelerator.unwrap_model(model))
