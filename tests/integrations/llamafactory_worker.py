"""The optimizer plugin for LLaMA-Factory's v1 in one process in which the simulator is CUDA: with
its own ``BaseTrainer`` where it is installed, else with `llamafactory_published.py`.

test_llamafactory.py reads what became of each case. ``make test-frameworks`` installs it,
and those of its packages that these cases need.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers_lab import (
    BUCKET,
    assert_same,
    case,
    set_up_process,
    text,
    tiny_model,
    tokenizer,
    weights as weights_of,
)
from worker_cases import allocated_peak, take_device

import residency
from residency.integrations.llamafactory import _MODULES, register_optimizer

if importlib.util.find_spec("llamafactory") is None:
    import llamafactory_published

    llamafactory_published.install()
    WHO = "llamafactory (of unknown version)"
else:
    WHO = f"llamafactory {importlib.metadata.version('llamafactory')}"


def registry() -> Any:
    for name in _MODULES:
        try:
            return importlib.import_module(name).OptimizerPlugin._registry
        except ModuleNotFoundError:
            continue
    raise AssertionError("no registry")


class Batches:
    """One micro-batch a step, from where it was."""

    num_micro_batch = 1

    def __init__(self) -> None:
        self.step = 0

    def __len__(self) -> int:
        return 6

    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Iterator[list[Any]]:
        while self.step < len(self):
            rows = text()[4 * self.step :][:4]
            self.step += 1
            yield [{"input_ids": rows, "labels": rows, "loss_weights": torch.ones(rows.shape)}]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def trainer_of(folder: str, optim_config: Any = None, resume: str | None = None) -> Any:
    base = importlib.import_module("llamafactory.v1.core.base_trainer").BaseTrainer

    class Trainer(base):  # type: ignore[misc]  # known when it runs
        def _create_batch_generator(self) -> None:
            self.train_batch_generator = Batches()

        def compute_loss(self, batch: Any) -> Any:
            given = {name: batch[name].cuda() for name in ("input_ids", "labels")}
            return self.model(**given).loss

    arguments = importlib.import_module("llamafactory.v1.config.training_args").TrainingArguments
    given: dict[str, Any] = {"output_dir": folder, "learning_rate": 1e-2, "max_steps": 6}
    given |= {"save_steps": 3, "resume_from_checkpoint": resume}
    renderer = SimpleNamespace(processor=tokenizer())
    args = arguments(optim_config=optim_config, **given)
    return Trainer(args, tiny_model().cuda(), renderer, None)


def configured(**options: Any) -> dict[str, Any]:
    """0.9.5 does not hand ``learning_rate`` on; later ones do, and say so."""
    return {"name": "residency", "bucket": BUCKET, "lr": 1e-2, **options}


def register() -> None:
    registry().pop("residency", None)
    register_optimizer()


@case
def a_run_ends_at_the_bits_of_v1s_own_adamw_whole_and_resumed() -> None:
    register()
    with tempfile.TemporaryDirectory() as folder:
        stock = trainer_of(f"{folder}/stock")
        assert type(stock.optimizer) is torch.optim.AdamW
        stock.fit()
        expected = weights_of(stock.model)
        ours = trainer_of(f"{folder}/ours", configured())
        assert isinstance(ours.optimizer, residency.OffloadedOptimizer)
        assert isinstance(ours.optimizer, torch.optim.AdamW)
        assert repr(ours.optimizer.param_groups) == repr(
            trainer_of(f"{folder}/other").optimizer.param_groups
        )
        ours.fit()
        assert_same(weights_of(ours.model), expected)
        resumed = trainer_of(f"{folder}/ours", configured(), f"{folder}/ours/checkpoint-3")
        resumed.global_step = 3
        states = [v for s in resumed.optimizer.state.values() for v in s.values()]
        assert states
        assert all(value.is_cpu for value in states)
        with tempfile.TemporaryDirectory() as other:
            resumed.args.output_dir = other
            resumed.fit()
        assert_same(weights_of(resumed.model), expected)


@case
def the_state_takes_no_device_memory_between_steps() -> None:
    register()
    with tempfile.TemporaryDirectory() as folder:
        stock = trainer_of(f"{folder}/stock")
        ours = trainer_of(f"{folder}/ours", configured())
        parameter_bytes = sum(p.nbytes for p in ours.model.parameters())

        def held_after(trainer: Any) -> int:
            before = torch.accelerator.memory_allocated()
            allocated_peak(trainer.fit)
            return torch.accelerator.memory_allocated() - before

        assert held_after(stock) - held_after(ours) >= 2 * parameter_bytes


@case
def options_are_those_of_the_class_and_of_offload_optimizer() -> None:
    register()
    with tempfile.TemporaryDirectory() as folder:
        options = {"optimizer": "SGD", "momentum": 0.9, "slots": 2, "resident": "1MiB"}
        optimizer = trainer_of(folder, configured(**options)).optimizer
        assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer.param_groups[0]["momentum"] == 0.9
        assert optimizer.statistics().num_slots == 2
        optimizer = trainer_of(folder, configured(betas=[0.8, 0.9])).optimizer
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        for wrong, says in (
            ({"bukcet": "1MiB"}, r"'bukcet'; expected optimizer, bucket"),
            ({"optimizer": "AdamX"}, r"optim_config.optimizer is 'AdamX'"),
            ({"optimizer": "Optimizer"}, r"optim_config.optimizer is 'Optimizer'"),
            ({"bucket": "12 GB"}, r"optim_config.bucket is '12 GB'"),
        ):
            with pytest.raises(residency.InvalidArgumentError, match=says) as caught:
                trainer_of(folder, configured(**wrong))
        model, plugin = tiny_model().cuda(), registry()["residency"]
        build = plugin["__call__"] if isinstance(plugin, dict) else plugin
        with pytest.raises(residency.InvalidArgumentError, match="has no lr") as caught:
            build(model, {"name": "residency"})
        assert WHO in str(caught.value)
        with pytest.raises(residency.RefusedError):
            build(model, {"name": "residency", "optimizer": "LBFGS", "lr": 1e-2})


@case
def a_name_that_is_taken_is_refused_and_a_version_without_the_registry_is_named() -> None:
    register()
    with pytest.raises(residency.RefusedError, match="call register_optimizer once") as caught:
        register_optimizer()
    assert WHO in str(caught.value)
    registry().pop("other", None)
    register_optimizer("other")
    with pytest.raises(residency.InvalidArgumentError, match="name is ''"):
        register_optimizer("")
    module = next(sys.modules[name] for name in _MODULES if name in sys.modules)
    with mock.patch.dict(vars(module)):
        del vars(module)["OptimizerPlugin"]
        with pytest.raises(residency.RefusedError, match="OptimizerPlugin") as caught:
            register_optimizer("third")
    assert WHO in str(caught.value)


@case
def without_llamafactory_the_error_gives_the_line_that_installs_it() -> None:
    with (
        mock.patch.dict(sys.modules, dict.fromkeys(["llamafactory", *_MODULES])),
        pytest.raises(ImportError, match=r"run: pip install 'llamafactory>=0.9.5'"),
    ):
        register_optimizer("fourth")


def main(folder: Path) -> None:
    set_up_process()
    take_device("1GiB", face="cuda", check_races=True)
    print("with", WHO)
    case.run(folder / "case0.json")


if __name__ == "__main__":
    main(Path(sys.argv[4]))
