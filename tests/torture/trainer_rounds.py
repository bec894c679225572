"""Random runs of the real Trainer of Transformers, with and without PEFT, and of accelerate."""

from __future__ import annotations

import os
import random
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy
import peft
import torch
import transformers
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from framework_lab import (
    StopError,
    assert_same,
    listing,
    offload_settings,
    optimizer_picture,
    random_states,
)
from random_states import digest
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from warm_process import Log

import residency
from residency import sim
from residency.integrations.transformers import ResidencyCallback, ResidencyTrainerMixin

WORDS = 64
TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"}
TIMES |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
ADAPTERS: list[dict[str, Any]] = [
    {},
    {"use_dora": True},
    {"use_rslora": True},
    {"modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"trainable_token_indices": [1, 2]},
    {"lora_dropout": 0.3},
    {"bias": "all"},
]


class Mixed(ResidencyTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """Is what a user writes."""


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, seed: int, count: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, WORDS, (count, 6), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops a run in its midst, and notes the generators at its end."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.generators: dict[str, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.generators = random_states()
        if state.global_step == self.stop:
            raise StopError


def draw(chance: random.Random) -> dict[str, Any]:
    """Draws what both sides have in common."""
    every = chance.choice([1, 2, 3])
    best = chance.random() < 0.3
    steps = chance.randint(2, 7)
    precision = chance.choice(["fp32", "fp32", "bf16", "fp16"])
    arguments = {
        "seed": chance.randrange(1 << 30),
        "per_device_train_batch_size": chance.choice([2, 3]),
        "gradient_accumulation_steps": chance.choice([1, 1, 2, 3]),
        "max_grad_norm": chance.choice([0.0, 1.0, 0.01]),
        "learning_rate": 1e-2,
        "weight_decay": chance.choice([0.0, 0.1]),
        "lr_scheduler_type": chance.choice(
            ["linear", "cosine", "constant", "cosine_with_restarts", "polynomial"]
        ),
        "warmup_steps": chance.choice([0, 1, 2]),
        "optim": chance.choice(
            ["adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad", "adafactor"]
        ),
        "max_steps": steps,
        "logging_steps": chance.choice([1, 2]),
        "logging_first_step": chance.random() < 0.5,
        "logging_nan_inf_filter": chance.random() < 0.5,
        "save_strategy": "steps" if best else chance.choice(["steps", "steps", "epoch"]),
        "save_steps": every,
        "save_total_limit": chance.choice([None, None, 1, 2]),
        "save_only_model": chance.random() < 0.1,
        "eval_strategy": "steps" if best else chance.choice(["no", "steps", "epoch"]),
        "eval_steps": every,
        "load_best_model_at_end": best,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "gradient_checkpointing": chance.random() < 0.2,
        "ignore_data_skip": chance.random() < 0.2,
        "report_to": [],
        "disable_tqdm": True,
    }
    return {
        "arguments": arguments,
        "rows": chance.choice([9, 14]),
        "adapter": chance.choice([None, *ADAPTERS]) if chance.random() < 0.7 else None,
        "dropout": chance.choice([0.0, 0.3]),
        "tied": chance.random() < 0.5,
        "dtype": chance.choice(["float32", "float32", "bfloat16"])
        if precision != "fp16"
        else "float32",
    }


def draw_ours(chance: random.Random) -> dict[str, Any]:
    """Draws how this library is put in."""
    return {
        "mixin": chance.random() < 0.6,
        "callback": chance.random() < 0.8,
        "offload": chance.random() < 0.8,
        "park": chance.random() < 0.5,
        "settings": offload_settings(chance),
        "in flight": chance.choice([0, 1, 1, 2, 3]),
    }


def model_of(plan: dict[str, Any]) -> Any:
    torch.manual_seed(plan["arguments"]["seed"])
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=plan["dropout"],
        tie_word_embeddings=plan["tied"],
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, plan["dtype"]))
    if plan["adapter"] is None:
        return model
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], **plan["adapter"]}
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


def trainer_of(plan: dict[str, Any], ours: dict[str, Any] | None, watch: Watch) -> Any:
    settings = plan["arguments"] | {"output_dir": "saves"}
    rows = Lines(1, plan["rows"])
    callbacks: list[Any] = [watch]
    more: dict[str, Any] = {}
    kind: Any = transformers.Trainer
    if ours is not None:
        if ours["callback"] or not ours["mixin"]:
            how = {"offload": ours["offload"], "park_in_evaluation": ours["park"]}
            callbacks.append(ResidencyCallback(**how, **ours["settings"]))
        if ours["mixin"]:
            kind, more = Mixed, {"max_in_flight": ours["in flight"]}
    random.seed(settings["seed"])
    numpy.random.seed(settings["seed"] % (1 << 31))
    return kind(
        model_of(plan),
        transformers.TrainingArguments(**settings),
        train_dataset=rows,
        eval_dataset=Lines(2, 4),
        callbacks=callbacks,
        **more,
    )


def picture(trainer: Any, watch: Watch) -> dict[str, Any]:
    optimizer = trainer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    history = [
        {key: value for key, value in entry.items() if key not in TIMES}
        for entry in trainer.state.log_history
    ]
    state = trainer.state
    found = digest(
        {
            "model": trainer.model,
            "scheduler": trainer.lr_scheduler,
            "history": history,
            "step": state.global_step,
            "epoch": state.epoch,
            "best": (state.best_metric, state.best_model_checkpoint, state.best_global_step),
            "then": watch.generators,
            "now": random_states(),
        }
    )
    return found | {f"optimizer {key}": value for key, value in optimizer_picture(inner).items()}


def train(
    plan: dict[str, Any],
    ours: dict[str, Any] | None,
    root: Path,
    name: str,
    *,
    stop: int | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Trains in a folder that is renamed at the end; returns all that a run leaves in memory."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    work = root / "work"
    work.mkdir()
    os.chdir(work)
    watch = Watch(stop)
    trainer = trainer_of(plan, ours, watch)
    result: Any = None
    error = None
    try:
        result = trainer.train(resume_from_checkpoint=resume and str(resume))
    except StopError:
        result = "stopped"
    except Exception as raised:  # both sides raise the same, or one of them is wrong
        if isinstance(raised, (residency.ResidencyError, sim.RaceError)):
            raise
        traceback.print_exc()
        error = repr(raised)
    torch.cuda.synchronize()
    found = picture(trainer, watch) if error is None else {}
    if isinstance(result, tuple):
        metrics = {key: value for key, value in result.metrics.items() if key not in TIMES}
        result = (result.global_step, result.training_loss, metrics)
    found |= digest({"result": result, "error": error})
    os.chdir(root)
    work.rename(root / name)
    return found


def file_picture(path: Path) -> dict[str, Any]:
    """Returns what stock tools read of a file."""
    if path.suffix == ".safetensors":
        return digest(load_file(path))
    if path.name == "training_args.bin":
        found = torch.load(path, weights_only=False).to_dict()
        return digest({key: value for key, value in found.items() if key != "logging_dir"})
    if path.suffix in (".pt", ".pth", ".bin"):
        return digest(torch.load(path, map_location="cpu", weights_only=False))
    if path.name == "trainer_state.json":
        lines = path.read_text().splitlines()
        kept = [line for line in lines if not any(f'"{name}"' in line for name in TIMES)]
        return {"lines": kept}
    return {"bytes": path.read_bytes()}


def assert_same_files(mine: Path, theirs: Path) -> list[str]:
    """Compares what stock tools list and read; returns the names of the checkpoints."""
    names = listing(mine)
    assert names == listing(theirs), sorted(names.items() ^ listing(theirs).items())
    for name in names:
        assert_same(file_picture(mine / name), file_picture(theirs / name), name)
    return sorted({name.rpartition("/")[0] for name in names if "/checkpoint-" in f"/{name}"})


def trainer_round(chance: random.Random, root: Path, log: Log) -> None:
    warnings.simplefilter("ignore")  # the framework's advice to its users
    transformers.utils.logging.set_verbosity_error()
    plan, ours = draw(chance), draw_ours(chance)
    stop = chance.choice([None, None, chance.randint(1, plan["arguments"]["max_steps"])])
    log("plan", plan=repr(plan), ours=repr(ours), stop=stop)
    theirs = train(plan, None, root, "stock", stop=stop)
    mine = train(plan, ours, root, "ours", stop=stop)
    assert_same(mine, theirs, "the run")
    names = assert_same_files(root / "ours", root / "stock")
    names = [name for name in names if name.count("/") == 1]
    if not names or plan["arguments"]["save_only_model"]:
        return
    if plan["arguments"]["optim"] == "adafactor" and plan["dtype"] == "bfloat16":
        return  # torch rounds its float32 factors as it loads; an offloaded one keeps them
    name = chance.choice(names)
    log("resume", name=name)
    resumed = train(plan, None, root, "stock again", resume=root / "stock" / name)
    whose = chance.choice(["ours", "stock"])
    other = draw_ours(chance)
    side = chance.choice([ours, other, None if whose == "ours" else other])
    log("resume by", whose=whose, side=repr(side))
    again = train(plan, side, root, "ours again", resume=root / whose / name)
    assert_same(again, resumed, "the resumed run")
    assert_same_files(root / "ours again", root / "stock again")


# ----------------------------------------------------------------------------------- accelerate


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
}


def prepared(plan: dict[str, Any], ours: dict[str, Any] | None) -> tuple[Any, ...]:
    """Returns an accelerator with what it prepared, as its user has them."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(
        mixed_precision=plan["precision"], gradient_accumulation_steps=plan["accumulate"]
    )
    set_seed(plan["seed"])
    model = model_of(plan["model"])
    optimizer = OPTIMIZERS[plan["optimizer"]]([p for p in model.parameters() if p.requires_grad])
    if ours is not None and ours["when"] == "before":
        residency.offload_optimizer(optimizer, **ours["settings"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(Lines(1, plan["rows"]), batch_size=2, shuffle=plan["shuffle"])
    made = accelerator.prepare(model, optimizer, loader, schedule)
    if ours is not None and ours["when"] == "after":
        residency.offload_optimizer(made[1], **ours["settings"])
    return accelerator, *made


def accelerated(
    plan: dict[str, Any],
    ours: dict[str, Any] | None,
    root: Path,
    name: str,
    *,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Trains two epochs, saves at the batches that are named, and returns all that is left."""
    os.chdir(root)
    accelerator, model, optimizer, loader, schedule = prepared(plan, ours)
    first = 0
    if resume is not None:
        where = {"map_location": "cpu"} if ours is not None and ours["to host"] else {}
        accelerator.load_state(str(resume), **where)
        first = int(resume.name)
    losses: list[torch.Tensor] = []
    skipped: list[bool] = []
    count = first
    for epoch in range(first // len(loader), 2):
        begin = first % len(loader) if epoch == first // len(loader) else 0
        for batch in skip_first_batches(loader, begin) if begin else loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(loss.detach().clone())
                accelerator.backward(loss * (float("inf") if count in plan["infinite"] else 1.0))
                if accelerator.sync_gradients and plan["clip"]:
                    accelerator.clip_grad_norm_(model.parameters(), plan["clip"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
            count += 1
            if count in plan["saves"]:
                accelerator.save_state(str(root / name / str(count)))
    torch.cuda.synchronize()
    found = digest(
        {
            "model": accelerator.unwrap_model(model),
            "scheduler": schedule,
            "losses": losses,
            "skipped": skipped,
            "scale": accelerator.scaler and accelerator.scaler.state_dict(),
            "now": random_states(),
        }
    )
    inner = optimizer.optimizer
    return found | {f"optimizer {key}": value for key, value in optimizer_picture(inner).items()}


def accelerate_round(chance: random.Random, root: Path, log: Log) -> None:
    warnings.simplefilter("ignore")
    seed = chance.randrange(1 << 30)
    rows = chance.choice([8, 10, 13])
    batches = 2 * -(-rows // 2)
    precision = chance.choice(["no", "no", "bf16", "fp16"])
    saves = sorted(chance.sample(range(1, batches + 1), 2))
    plan = {
        "seed": seed,
        "precision": precision,
        "accumulate": chance.choice([1, 1, 2, 3]),
        "optimizer": chance.choice(list(OPTIMIZERS)),
        "rows": rows,
        "shuffle": chance.random() < 0.5,
        "clip": chance.choice([None, 1.0, 0.01]),
        "infinite": chance.sample(range(batches), 2) if precision == "fp16" else [],
        "saves": saves,
        "model": {
            "arguments": {"seed": seed},
            "adapter": chance.choice([None, None, *ADAPTERS]),
            "dropout": chance.choice([0.0, 0.3]),
            "tied": chance.random() < 0.5,
            "dtype": "float32",
        },
    }

    def sides() -> dict[str, Any]:
        return {
            "when": chance.choice(["before", "after"]),
            "settings": offload_settings(chance),
            "to host": chance.random() < 0.5,
        }

    ours = sides()
    log("plan", plan=repr(plan), ours=repr(ours))
    theirs = accelerated(plan, None, root, "stock")
    mine = accelerated(plan, ours, root, "ours")
    assert_same(mine, theirs, "the run")
    assert_same_files(root / "ours", root / "stock")
    at = str(chance.choice(saves))
    whose = chance.choice(["ours", "stock"])
    side = chance.choice([ours, sides(), None if whose == "ours" else sides()])
    log("resume", at=at, whose=whose, side=repr(side))
    resumed = accelerated(plan, None, root, "stock again", resume=root / "stock" / at)
    again = accelerated(plan, side, root, "ours again", resume=root / whose / at)
    assert_same(again, resumed, "the resumed run")
