"""The model that the cases train, a Qwen3 architecture on single bytes, and what they do with it.

Frameworks are imported when they are needed, and a missing one is refused with what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from residency._demo._frame import CaseRun
from residency._demo._settings import ModelShape
from residency._errors import RefusedError


def imported(name: str) -> Any:
    """Imports a package of the extra ``demo``.

    Raises:
        RefusedError: It cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RefusedError(
            f"The case runs {name}, which cannot be imported ({error}). Install it with: "
            "pip install 'residency[demo]'"
        ) from error


def make_model(shape: ModelShape, *, seed: int) -> torch.nn.Module:
    """Returns a causal language model on the host, its weights drawn from the seed.

    Raises:
        RefusedError: ``transformers`` is not installed.
    """
    transformers = imported("transformers")
    config = transformers.Qwen3Config(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        use_cache=False,
        # The fused attention kernels have backward passes that are not deterministic.
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    model: torch.nn.Module = transformers.Qwen3ForCausalLM(config)
    return model


def count_parameters(shape: ModelShape) -> int:
    """Returns how many parameters a model has, without one."""
    with torch.device("meta"):
        model = make_model(shape, seed=0)
    return sum(parameter.numel() for parameter in model.parameters())


def train_on(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    losses: list[float],
) -> None:
    """Trains one step, and appends its loss."""
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def on_host(tree: object) -> Any:
    """Returns a tree with copies on the host in the place of its tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: on_host(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(on_host(value) for value in tree)
    return tree


def make_trainer(
    run: CaseRun, model: torch.nn.Module, *, settings: dict[str, Any], **parts: Any
) -> Any:
    """Returns a quiet Trainer of Transformers.

    Args:
        run: In whose folder it writes.
        model: Its model.
        settings: Fields of its ``TrainingArguments``.
        parts: What else it is made of.
    """
    transformers = imported("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    arguments = transformers.TrainingArguments(
        output_dir=run.folder,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    trainer = transformers.Trainer(model=model, args=arguments, **parts)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def as_samples(texts: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Returns rows of text as a Trainer's data set."""
    return [{"input_ids": row, "labels": row} for row in texts]
