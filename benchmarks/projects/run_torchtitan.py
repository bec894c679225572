"""Torchtitan's own ``Trainer`` with its Llama 3 debug model, as its overrides configure it.

``KIND`` is plain, or which of our overrides are named: ours (the optimizers), saves, or both. Real
are its train loop, overrides, ``OptimizersContainer``, ``LRSchedulersContainer`` and
``CheckpointManager``; the data are random words, as its own file of them is large. The process
trains six steps and saves after three; with a third argument, ``resume``, it takes away the last
save and goes on from the one before; with ``experts``, or ``experts-resume``, the model is the
DeepSeek V3 debug model. A number as the last argument makes it that rank of two.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.projects.lab import (
    NUM_STEPS,
    Peaks,
    Picture,
    differing,
    enable,
    local_copy,
    write,
)
from benchmarks.projects.rows import (
    AGAINST_PLAIN,
    BEFORE,
    HELD,
    LOAD,
    LOADED,
    LOSSES,
    LOSSES_AFTER,
    RESUMED,
    SAVE,
    STEPS,
    STEPS_AFTER,
)
from benchmarks.projects.stand_ins import StandIns

STAND_INS = StandIns("wandb")
NUM_TOKENS = 256
# What `--override.imports` names, by the kind of run.
DOOR = "residency.integrations.torchtitan"
OVERRIDES = {
    "plain": [],
    "ours": [f"{DOOR}.offload_optimizers"],
    "saves": [f"{DOOR}.save_with_residency"],
    "both": [f"{DOOR}.offload_optimizers", f"{DOOR}.save_with_residency"],
}


def configured(
    kind: str, source: Path, folder: Path, dump: Path, *, has_experts: bool = False
) -> Any:
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    words = folder / "words.json"
    if not words.exists():
        words.write_text("".join(json.dumps({"text": text}) + "\n" for text in _texts()))
    DATASETS["c4_test"].source.load_dataset_kwargs = {"data_files": str(words)}
    config = deepseek_v3_debugmodel() if has_experts else llama3_debugmodel()
    config.hf_assets_path = str(source / "tests" / "assets" / "tokenizer")
    config.dump_folder = str(dump)
    config.training.steps = 2 * NUM_STEPS
    config.training.num_tokens_per_microbatch_per_dp_rank = NUM_TOKENS
    config.training.max_context_length = NUM_TOKENS
    config.training.disable_cuda_graphs = True  # else forward and backward are captured
    config.lr_scheduler.total_steps = 2 * NUM_STEPS + 2
    config.debug.seed = 0  # of several ranks the first else draws one
    config.checkpoint.enable = True
    config.checkpoint.interval = NUM_STEPS
    config.checkpoint.keep_latest_k = 0
    saves_ours = f"{DOOR}.save_with_residency" in OVERRIDES[kind]
    config.checkpoint.async_mode = "async_with_pinned_mem" if saves_ours else "disabled"
    config.validator.enable = False
    config.override.imports = list(OVERRIDES[kind])
    if os.environ["WORLD_SIZE"] != "1":  # the default asks a later torch than 2.13 for its meshes
        config.parallelism.spmd_backend = "partial_dtensor"
    return config


def _texts() -> list[str]:
    draw = random.Random(0)
    known = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 8))) for _ in range(500)]
    return [" ".join(draw.choices(known, k=200)) for _ in range(200)]


class Watched:
    """Torchtitan's trainer, with the peaks of its steps, its saves and its load."""

    def __init__(self, config: Any) -> None:
        self.trainer: Any = config.build()
        for module in [each for part in self.trainer.model_parts for each in part.modules()]:
            if isinstance(module, FSDPModule):
                # Else gradients are summed by an operation that gloo, under the simulated NCCL,
                # does not have.
                module.set_force_sum_reduction_for_comms(True)
        self.peaks = Peaks()
        self.losses: list[float] = []
        self._steps = STEPS
        checkpointer = self.trainer.checkpointer
        self._save, self._load = checkpointer.save, checkpointer.load
        checkpointer.save, checkpointer.load = self.save, self.load
        metrics = self.trainer.metrics_processor
        self._log = metrics.log
        metrics.log = self.log

    def log(self, step: int, loss: float, *args: Any, **kwargs: Any) -> Any:
        self.losses.append(float(loss))
        return self._log(step, loss, *args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        torch.accelerator.synchronize()
        steps = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        saved = self._save(*args, **kwargs)
        if saved and self._steps not in self.peaks.figures:  # the first of two saves
            self.peaks.figures[self._steps] = steps
            if self._steps == STEPS:
                self.peaks.note(SAVE)
                self.peaks.note_held(HELD)
        return saved

    def load(self, *args: Any, **kwargs: Any) -> Any:
        self.peaks.reset()
        held = torch.accelerator.memory_allocated()
        loaded = self._load(*args, **kwargs)
        if loaded:  # else there was nothing to load
            self.peaks.figures[BEFORE] = held
            self.peaks.note(LOAD)
            self.peaks.note_held(LOADED)
            self._steps = STEPS_AFTER
        return loaded

    def picture(self) -> Picture:
        found = {}
        for part in self.trainer.model_parts:
            named = [*part.named_parameters(), *part.named_buffers()]
            found |= {name: local_copy(value) for name, value in named}
        for place, optimizer in enumerate(self.trainer.optimizers):
            for group in optimizer.param_groups:
                found[f"{place}.lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
            for index, state in optimizer.state_dict()["state"].items():
                found |= {f"{place}.{index}.{key}": local_copy(v) for key, v in state.items()}
        return found


def main() -> None:
    kind, given, *more = sys.argv[1:]
    folder, source = Path(given), Path(os.environ["PROJECT"])
    rank = int(more.pop()) if more and more[-1].isdigit() else None
    words = "-".join(more).split("-")
    has_experts, is_resumed = "experts" in words, "resume" in words
    enable("6GiB")
    STAND_INS.install()
    os.environ.update(RANK=str(rank or 0), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["WORLD_SIZE"] = "1" if rank is None else "2"
    changed = []
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        changed.append("torch.distributed.set_timeout, of a torch after this one")
    row, variant = "", ""
    if has_experts:
        row, variant = "with experts: ", "-experts"
    elif rank is not None:
        row, variant = f"rank {rank} of two: ", f"-rank{rank}"
    dump = folder / (kind + ("-ranks" if rank is not None else variant))
    if is_resumed and not rank:
        for save in (dump / "checkpoint").glob(f"step-*{2 * NUM_STEPS}"):
            shutil.rmtree(save)
    run = Watched(configured(kind, source, folder, dump, has_experts=has_experts))
    run.trainer.train()
    found = run.picture()
    name = f"{kind}{variant}{'-resume' if is_resumed else ''}"
    torch.save(found, folder / f"{name}.pt")
    differ = {}
    if is_resumed:
        differ[row + RESUMED] = differing(found, torch.load(folder / f"{kind}{variant}.pt"))
    elif kind != "plain":
        differ[row + AGAINST_PLAIN] = differing(found, torch.load(folder / f"plain{variant}.pt"))
    result: dict[str, Any] = {"differ": differ, "changed": changed}
    if not variant:  # the table has the figures of one model, on one rank
        result["figures"] = run.peaks.figures
        result[LOSSES_AFTER if is_resumed else LOSSES] = run.losses
    write(folder, name, result, STAND_INS.used)
    run.trainer.close()


if __name__ == "__main__":
    main()
