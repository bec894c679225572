"""The plugin for Axolotl in one process in which the simulator is CUDA: with Axolotl's own
configuration, builder and trainer where it is installed, else with `axolotl_published.py`.

test_axolotl.py reads what became of each case. Axolotl asks for sixty packages; ``make
test-frameworks`` installs those that these cases need.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from transformers_lab import (
    BUCKET,
    assert_same,
    case,
    files_of,
    set_up_process,
    text,
    tiny_model,
    tokenizer,
    weights as weights_of,
)
from worker_cases import take_device

import residency

if importlib.util.find_spec("axolotl") is None:
    import axolotl_published

    axolotl_published.install()
    WHO = "axolotl (of unknown version)"
else:
    WHO = f"axolotl {importlib.metadata.version('axolotl')}"

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
base = importlib.import_module("axolotl.integrations.base")
config = importlib.import_module("axolotl.utils.config")
DictDefault = importlib.import_module("axolotl.utils.dict").DictDefault
trainers = importlib.import_module("axolotl.core.trainers")
builders = importlib.import_module("axolotl.core.builders")
ours = importlib.import_module("residency.integrations.axolotl")
mixin = importlib.import_module("residency.integrations.transformers").ResidencyTrainerMixin

OURS = "residency.integrations.axolotl.ResidencyPlugin"


class Bringer(base.BasePlugin):  # type: ignore[misc]  # known when it runs
    """Another plugin, which brings a trainer, and an optimizer that nobody asks for."""

    def get_trainer_cls(self, cfg: Any) -> type:
        return Brought

    def create_optimizer(self, cfg: Any, trainer: Any) -> Any:
        raise AssertionError("Axolotl's hook has a caller now")


class Brought(trainers.AxolotlTrainer):  # type: ignore[misc, name-defined]  # known when it runs
    pass


class Subclass(ours.ResidencyPlugin):  # type: ignore[misc, name-defined]  # known when it runs
    pass


BRINGER, SUBCLASS = "axolotl_worker.Bringer", "axolotl_worker.Subclass"


@contextmanager
def plugged() -> Iterator[Path]:
    """A folder for a run, and no plugins of another one."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model().save_pretrained(f"{folder}/base")
        base.PluginManager.get_instance().plugins.clear()
        yield Path(folder)
        base.PluginManager.get_instance().plugins.clear()


def configured(folder: Path, *plugins: str, **keys: Any) -> Any:
    """Does with a YAML's keys what Axolotl's command line does."""
    cfg = DictDefault(
        {
            "base_model": f"{folder}/base",
            "datasets": [{"path": f"{folder}/rows.jsonl", "type": "completion"}],
            "output_dir": f"{folder}/stock" if not plugins else f"{folder}/ours",
            "max_steps": 4,
            "save_steps": 2,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "num_epochs": 1,
            "val_set_size": 0,
            "sequence_len": 16,
            "learning_rate": 1e-2,
            "lr_scheduler": "linear",
            "optimizer": "adamw_torch_fused",
            "bf16": False,
            "tf32": False,
            "eval_table_size": 0,
            "plugins": list(plugins) or None,
            **keys,
        }
    )
    config.prepare_plugins(cfg)
    return config.validate_config(cfg)


def built(folder: Path, *plugins: str, **keys: Any) -> Any:
    """Has Axolotl build its trainer."""
    cfg = configured(folder, *plugins, **keys)
    torch.manual_seed(0)
    builder = builders.HFCausalTrainerBuilder(cfg, tiny_model().cuda(), tokenizer())
    builder.train_dataset = datasets.Dataset.from_dict(
        {"input_ids": text().tolist(), "labels": text().tolist()}
        | {"attention_mask": torch.ones_like(text()).tolist()}
    )
    trainer = builder.build(4)
    base.PluginManager.get_instance().post_trainer_create(cfg, trainer)
    return trainer


@case
def a_run_with_the_plugin_ends_at_axolotls_weights_whole_and_resumed() -> None:
    with plugged() as folder:
        stock = built(folder)
        assert type(stock) is trainers.AxolotlTrainer
        stock.train()
        expected, names = weights_of(stock.model), files_of(folder / "stock").keys()
        assert "checkpoint-2/optimizer.pt" in names
        for resume in (None, str(folder / "ours" / "checkpoint-2")):
            trainer = built(folder, OURS, residency_bucket=BUCKET)
            assert isinstance(trainer, trainers.AxolotlTrainer)
            assert isinstance(trainer, mixin)
            trainer.train(resume_from_checkpoint=resume)
            assert_same(weights_of(trainer.model), expected)
            assert isinstance(trainer.optimizer.optimizer, residency.OffloadedOptimizer)
            assert trainer.optimizer.optimizer.statistics().slot_bytes <= 16 << 10
            assert files_of(folder / "ours").keys() == names


@case
def each_key_reaches_what_it_sets() -> None:
    with plugged() as folder:
        trainer = built(
            folder,
            OURS,
            residency_resident="1MiB",
            residency_bucket=BUCKET,
            residency_slots=2,
            residency_pin=False,
            residency_outputs_on_host=False,
            residency_max_in_flight=0,
        )
        trainer.train()
        figures = trainer.optimizer.optimizer.statistics()
        assert figures.resident_bytes > 0
        assert figures.num_slots == 2
        assert figures.pinned_bytes == 0
        assert trainer._residency_saves.max_in_flight == 0
        assert not trainer._residency_callback._are_outputs_on_host
        trainer = built(folder, OURS, residency_offload=False)
        trainer.train()
        assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
        trainer = built(folder, OURS, residency_master_weights=True)
        assert trainer._residency_callback._settings["master_weights"]
        assert trainer._residency_saves.max_in_flight == 1


@case
def a_key_that_does_not_exist_is_an_error_with_those_that_do() -> None:
    with plugged() as folder:
        with pytest.raises(ValueError, match=r"'residency_bukcet'.*expected one of ") as caught:
            configured(folder, OURS, residency_bukcet="1MiB")
        assert WHO in str(caught.value)
        assert "residency_bucket" in str(caught.value)
        for key, value in {
            "residency_bucket": "12 GB",
            "residency_slots": 0,
            "residency_offload": "perhaps",
            "residency_max_in_flight": -1,
        }.items():
            with pytest.raises(ValueError, match=key):
                configured(folder, OURS, **{key: value})


@case
def a_plugin_that_is_named_twice_is_an_error() -> None:
    with plugged() as folder:
        with pytest.raises(ValueError, match=rf"{OURS} twice: name it once") as caught:
            configured(folder, OURS, OURS)
        assert WHO in str(caught.value)
    with plugged() as folder, pytest.raises(ValueError, match="which are one plugin: name it once"):
        configured(folder, SUBCLASS, OURS)


@case
def a_version_without_a_hook_is_named_where_axolotl_loads_the_plugin() -> None:
    """Axolotl prints an ``ImportError`` and goes on without the plugin; this is none."""
    whole = {hook: lambda self, *given: None for hook in ours._HOOKS}
    for hook in whole:
        without = {name: method for name, method in whole.items() if name != hook}
        with plugged() as folder, mock.patch.dict(sys.modules):
            del sys.modules[ours.__name__]
            with (
                mock.patch.object(base, "BasePlugin", type("BasePlugin", (), without)),
                pytest.raises(residency.RefusedError, match=f"has no BasePlugin.{hook}") as caught,
            ):
                configured(folder, OURS)
        assert WHO in str(caught.value)
        assert "pip install 'axolotl>=0.19'" in str(caught.value)


@case
def a_trainer_of_another_plugin_gets_the_mixin_where_ours_comes_first() -> None:
    with plugged() as folder, logged() as lines:
        trainer = built(folder, OURS, BRINGER, residency_bucket=BUCKET)
        assert isinstance(trainer, Brought)
        assert isinstance(trainer, mixin)
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, residency.OffloadedOptimizer)
        assert not lines
    with plugged() as folder, logged() as lines:
        trainer = built(folder, BRINGER, OURS, residency_bucket=BUCKET)
        assert type(trainer) is Brought
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, residency.OffloadedOptimizer)
        assert any("Brought, which has the callback alone" in line for line in lines)


@case
def trainers_that_axolotl_chooses_otherwise_have_the_callback_alone() -> None:
    with plugged() as folder:
        cfg = configured(folder, OURS)
        plugin = base.PluginManager.get_instance().plugins[OURS]
        assert issubclass(plugin.get_trainer_cls(cfg), trainers.AxolotlTrainer)
        for keys in (
            {"rl": "dpo"},
            {"reward_model": True},
            {"process_reward_model": True},
            {"trainer_cls": "mine.Trainer"},
            {"model_config_type": "mamba"},
        ):
            assert plugin.get_trainer_cls(DictDefault({**cfg, **keys})) is None
        assert plugin.add_callbacks_pre_trainer(DictDefault({**cfg, "rl": "dpo"}), None)


@case
def an_optimizer_that_is_refused_is_refused_with_the_key_that_leaves_it() -> None:
    with plugged() as folder:
        cfg = configured(folder, OURS)
        plugin = base.PluginManager.get_instance().plugins[OURS]
        (callback,) = plugin.add_callbacks_pre_trainer(cfg, None)
        parameters = [torch.nn.Parameter(torch.zeros(3, device="cuda"))]
        with pytest.raises(residency.RefusedError) as caught:
            callback.offload(torch.optim.LBFGS(parameters))
        assert f"In the YAML of {WHO}: residency_offload: false" in caught.value.__notes__


@contextmanager
def logged() -> Iterator[list[str]]:
    """The warnings of the library."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("residency").addHandler(handler)
    yield lines
    logging.getLogger("residency").removeHandler(handler)


def main(folder: Path) -> None:
    sys.modules["axolotl_worker"] = sys.modules[__name__]
    set_up_process()
    take_device("1GiB", face="cuda", check_races=True)
    print("with", WHO)
    case.run(folder / "case0.json")


if __name__ == "__main__":
    main(Path(sys.argv[4]))
