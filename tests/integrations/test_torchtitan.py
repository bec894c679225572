"""The overrides for torchtitan: its own container and manager, where they are installed.

Elsewhere a stand-in for its published interface (`torchtitan_published.py`) takes their place;
`make test-projects` runs torchtitan's own trainer and debug model. That steps have torch's bits
over all settings is in ``tests/optim``; FSDP2 is in `dcp_training_worker.py`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

import torchtitan_published
from same_values import assert_same
from torchtitan_training import (
    DOOR,
    STATE_BYTES_PER_VALUE,
    Training,
    optimizer_config,
    ours,
    titan,
    widened,
)
from worker_cases import allocated_peak

from residency import InvalidArgumentError, OffloadedOptimizer, RefusedError

OURS = {"offloaded": True, "managed": True}
MODES = ("disabled", "async", "async_with_pinned_mem")


@pytest.fixture(scope="module", autouse=True)
def _torchtitan() -> Iterator[None]:
    is_there = importlib.util.find_spec("torchtitan") is not None
    if not is_there:
        torchtitan_published.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    if not is_there:
        torchtitan_published.uninstall()


def steps_in(folder: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (folder / "checkpoint").glob("step-*"))


# The optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_steps_and_the_state_dict_are_those_of_torchtitans_container(
    device: torch.device, tmp_path: Path, implementation: str
) -> None:
    plain, offloaded = (
        Training(device, tmp_path, offloaded=offload, implementation=implementation)
        for offload in (False, True)
    )
    for training in (plain, offloaded):
        training.train(4)
    assert_same(offloaded.picture(), plain.picture())
    expected, found = plain.optimizers.state_dict(), offloaded.optimizers.state_dict()
    assert list(found) == list(expected)
    assert_same(on_host(found), on_host(expected))
    kinds = [type(each).__mro__ for each in offloaded.optimizers]
    assert all(OffloadedOptimizer in kind for kind in kinds)
    assert len(kinds) == 2


def on_host(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def test_a_state_dict_before_the_first_step_takes_no_step_and_no_device_memory(
    device: torch.device, tmp_path: Path
) -> None:
    training = Training(device, tmp_path, offloaded=True)
    before = training.picture()
    assert allocated_peak(training.optimizers.state_dict) == 0
    found = training.optimizers.state_dict()
    assert {name for name in found if name.startswith("state.")}
    assert not any(v.any() for k, v in found.items() if k.startswith("state."))
    after = training.picture()
    assert_same({name: after[name] for name in before}, before)
    stock = Training(device, tmp_path)
    assert allocated_peak(stock.optimizers.state_dict) > 0  # what torchtitan's own takes


def test_the_bias_of_experts_is_balanced_before_each_step_as_in_torchtitan(
    device: torch.device, tmp_path: Path
) -> None:
    """The hook is on the container, and writes into buffers of which a save is under way."""
    plain = Training(device, tmp_path / "plain")
    plain.train(3)
    training = Training(device, tmp_path, **OURS, async_mode="async")
    training.train(3, saves=[1, 2])
    training.manager.close()
    bias = "layers.0.moe.expert_bias_E"
    assert training.picture()[bias].any()
    assert_same(training.picture(), plain.picture())
    resumed = Training(device, tmp_path, **OURS, load_step=1)
    resumed.manager.load(1)
    assert not torch.equal(resumed.picture()[bias], plain.picture()[bias])
    resumed.train(2)
    assert_same(resumed.picture(), plain.picture())


def test_moments_in_bfloat16_are_those_that_torchtitans_hook_makes(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in ("_fused_adam_", "_fused_adamw_"):
        monkeypatch.setattr(torch, kernel, widened(getattr(torch, kernel)))
    how = {"implementation": "fused_opt_states_bf16", "async_mode": "async"}
    plain = Training(device, tmp_path / "plain", **how)
    plain.train(4)
    training = Training(device, tmp_path, **OURS, **how)
    training.train(4, saves=[2])
    training.manager.close()
    moments = [v for k, v in training.picture().items() if ".exp_avg" in k]
    assert {each.dtype for each in moments} == {torch.bfloat16}
    assert_same(training.picture(), plain.picture())
    resumed = Training(device, tmp_path, **OURS, **how)
    assert allocated_peak(resumed.manager.load) == 0
    resumed.train(2)
    assert_same(resumed.picture(), plain.picture())
    # A plain optimizer's hook may make what its class does not: it gets torchtitan's own load,
    # in which torch makes float32 of the moments.
    hooked = Training(device, tmp_path, managed=True, **how)
    assert allocated_peak(lambda: hooked.manager.load(2)) > 0
    homes = sum(each.statistics().home_bytes for each in resumed.optimizers)
    values = sum(p.numel() for p in resumed.model.parameters())
    scalars = 4 * len(list(resumed.model.parameters()))
    assert homes == values * STATE_BYTES_PER_VALUE // 2 + scalars


def test_master_weights_and_other_settings_reach_the_optimizers(
    device: torch.device, tmp_path: Path
) -> None:
    settings = {"master_weights": True, "resident": "1MiB", "slots": 2, "bucket": "8KiB"}
    training = Training(device, tmp_path, offloaded=settings, dtype=torch.bfloat16)
    training.train(1)
    figures = [each.statistics() for each in training.optimizers]
    assert all(each.resident_bytes > 0 and each.num_slots == 2 for each in figures)
    assert any(name.endswith(".master_weight") for name in training.optimizers.state_dict())


def test_parameters_on_the_host_are_stepped_saved_and_loaded_as_ever(
    device: torch.device, tmp_path: Path
) -> None:
    """What torchtitan's ``enable_cpu_offload`` has: nothing is there to be offloaded."""
    host = torch.device("cpu")
    plain = Training(host, tmp_path / "plain")
    plain.train(4)
    training = Training(host, tmp_path, **OURS, async_mode="async")
    training.train(4, saves=[2])
    training.manager.close()
    assert_same(training.picture(), plain.picture())
    resumed = Training(host, tmp_path, **OURS)
    assert resumed.manager.load()
    resumed.train(2)
    assert_same(resumed.picture(), plain.picture())


# Saves and loads --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offloaded", [True, False], ids=["offloaded", "plain"])
def test_a_resumed_run_is_the_uninterrupted_one_and_takes_no_device_memory(
    device: torch.device, tmp_path: Path, mode: str, offloaded: bool
) -> None:
    whole = Training(device, tmp_path / "whole")
    whole.train(4)
    how: dict[str, Any] = {"offloaded": offloaded, "managed": True, "async_mode": mode}
    training = Training(device, tmp_path, **how)
    training.train(2)
    assert allocated_peak(lambda: training.manager.save(2)) == 0
    training.train(2)  # while the save is being written
    training.manager.close()
    assert_same(training.picture(), whole.picture())
    resumed = Training(device, tmp_path, **how)
    assert allocated_peak(resumed.manager.load) == 0
    assert resumed.step == 2
    resumed.train(2)
    assert_same(resumed.picture(), whole.picture())
    resumed.manager.close()


@pytest.mark.parametrize("offloaded", [True, False], ids=["offloaded", "plain"])
def test_checkpoints_that_torchtitan_wrote_are_loaded_and_the_greater_step_counts(
    device: torch.device, tmp_path: Path, offloaded: bool
) -> None:
    stock = Training(device, tmp_path)
    stock.train(2, saves=[2])
    training = Training(device, tmp_path, offloaded=offloaded, managed=True)
    assert training.manager.load()
    assert_same(training.picture(), stock.picture())
    training.train(1, saves=[3])
    stock.train(1)
    again = Training(device, tmp_path, offloaded=offloaded, managed=True)
    assert again.manager.load()
    assert_same(again.picture(), stock.picture())
    assert again.manager.load(2)
    assert again.step == 2
    with pytest.raises(FileNotFoundError, match="load_step=7"):
        again.manager.load(7)


def test_a_run_that_goes_back_saves_its_steps_once_more(
    device: torch.device, tmp_path: Path
) -> None:
    training = Training(device, tmp_path, **OURS)
    training.train(3, saves=[1, 2, 3])
    back = Training(device, tmp_path, **OURS)
    assert back.manager.load(1)
    with torch.no_grad():
        next(back.model.parameters()).zero_()
    back.train(2, saves=[2, 3])
    assert steps_in(tmp_path) == [1, 2, 3]
    loaded = Training(device, tmp_path, **OURS)
    assert loaded.manager.load()
    assert_same(loaded.picture(), back.picture())


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_as_many_checkpoints_stay_as_torchtitan_keeps(
    device: torch.device, tmp_path: Path, mode: str
) -> None:
    stock = Training(device, tmp_path)
    stock.train(3, saves=[1, 2, 3])
    training = Training(device, tmp_path, **OURS, async_mode=mode, keep_latest_k=2)
    training.manager.load()
    training.train(1, saves=[4])
    training.manager.close()
    assert steps_in(tmp_path) == [3, 4]
    training = Training(device, tmp_path, **OURS, async_mode=mode, keep_latest_k=2)
    training.manager.load()
    training.train(3, saves=[5, 6, 7])
    training.manager.close()
    assert steps_in(tmp_path) == [6, 7]


def test_a_damaged_newest_save_is_passed_over_unless_it_is_named(
    device: torch.device, tmp_path: Path
) -> None:
    training = Training(device, tmp_path, **OURS)
    training.train(1, saves=[1])
    expected = training.picture()
    training.train(1, saves=[2])
    damage(tmp_path, 2)
    resumed = Training(device, tmp_path, **OURS)
    with pytest.warns(UserWarning, match="save of step 2 is damaged, so step 1 is loaded"):
        assert resumed.manager.load()
    assert_same(resumed.picture(), expected)
    with pytest.raises(CheckpointException, match="optimizer"):
        Training(device, tmp_path, **OURS).manager.load(2)
    damage(tmp_path, 1)
    with pytest.raises(CheckpointException), pytest.warns(UserWarning, match="step 1 is loaded"):
        Training(device, tmp_path, **OURS).manager.load()


def damage(folder: Path, step: int) -> None:
    (file,) = (folder / "checkpoint" / f"step-{step:08d}").glob("optimizer*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("keep", [0, 2])
def test_a_save_that_failed_raises_once_removes_nothing_and_the_next_one_works(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    training = Training(device, tmp_path, **OURS, async_mode="async", keep_latest_k=keep)
    training.train(2, saves=[1, 2])
    training.manager.maybe_wait_for_saving()

    def fail(*args: object) -> None:
        raise OSError("no space left, let us say")

    with monkeypatch.context() as broken:
        broken.setattr("residency.integrations.dcp.ResidencyStorageWriter.write_data", fail)
        training.train(1, saves=[3])
        with pytest.raises(CheckpointException, match="no space left"):
            training.manager.maybe_wait_for_saving()
    assert steps_in(tmp_path) == [1, 2]
    training.train(1, saves=[4])
    training.manager.close()
    assert steps_in(tmp_path) == ([1, 2, 4] if keep == 0 else [2, 4])


def test_the_last_save_changes_its_dtype_on_the_host(device: torch.device, tmp_path: Path) -> None:
    how = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    training = Training(device, tmp_path, **OURS, **how)
    training.train(1)
    assert allocated_peak(lambda: training.manager.save(1, last_step=True)) == 0
    path = str(tmp_path / "checkpoint" / "step-00000001")
    loaded = Training(device, tmp_path / "other", **OURS, initial_load_path=path)
    assert loaded.manager.load()
    rounded = {k: v.bfloat16().float() for k, v in training.model.state_dict().items()}
    assert_same(on_host(loaded.model.state_dict()), on_host(rounded))


def test_a_manager_that_is_not_enabled_does_nothing(device: torch.device, tmp_path: Path) -> None:
    config = ours("save_with_residency")(titan("CheckpointManager").Config())
    nothing = dict.fromkeys(("dataloader", "optimizers", "lr_schedulers", "sd_adapter"))
    manager = config.build(**nothing, model_parts=[], states={}, base_folder=str(tmp_path))
    assert not manager.save(1)
    assert not manager.load()
    manager.close()


# What a configuration says ----------------------------------------------------------------------


def configuration(**fields: Any) -> Any:
    """Returns a tree of configs, as the trainer's is one."""
    from dataclasses import make_dataclass

    base = titan("Configurable").Config
    kinds = [(name, type(value)) for name, value in fields.items()]
    made = make_dataclass("Configuration", kinds, bases=(base,), kw_only=True, slots=True)
    return made(**fields)


def applied(root: Any, *imports: Any) -> Any:
    overrides = titan("OverrideConfig")(imports=list(imports))
    titan("apply_overrides")(overrides, root)
    return root


def test_the_overrides_are_found_by_their_names_and_keep_every_field(tmp_path: Path) -> None:
    kept = titan("CheckpointManager").Config(interval=7, async_mode="async", folder="here")
    root = applied(
        configuration(optimizer=optimizer_config("foreach"), checkpoint=kept),
        (f"{DOOR}.offload_optimizers", {"bucket": "1MiB", "slots": 2}),
        (f"{DOOR}.save_with_residency", {"spare": "all"}),
    )
    assert type(root.optimizer) is ours("OffloadedOptimizers").Config
    assert (root.optimizer.bucket, root.optimizer.slots) == ("1MiB", 2)
    assert root.optimizer.implementation == "foreach"
    assert len(root.optimizer.param_groups) == 3
    assert type(root.checkpoint) is ours("ResidencyCheckpointManager").Config
    assert (root.checkpoint.interval, root.checkpoint.async_mode) == (7, "async")
    assert (root.checkpoint.folder, root.checkpoint.spare) == ("here", "all")


def test_every_public_name_stands_in_the_reference() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "api" / "integrations.md"
    section = page.read_text().partition(f"## `{DOOR}`\n")[2].partition("\n## ")[0]
    for name in importlib.import_module(DOOR).__all__:
        assert re.search(rf"^- `{name}[(`]", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("override", "settings", "said"),
    [
        ("offload_optimizers", {"buckets": 1}, r"no setting 'buckets'.*torchtitan.*it takes resid"),
        ("offload_optimizers", {"bucket": "12 GB"}, "bucket"),
        ("save_with_residency", {"pin": False}, r"no setting 'pin'.*torchtitan.*it takes spare"),
        ("save_with_residency", {"spare": "much"}, "spare"),
    ],
)
def test_a_setting_that_means_nothing_is_refused_before_anything_is_built(
    override: str, settings: dict[str, Any], said: str
) -> None:
    root = configuration(
        optimizer=optimizer_config(), checkpoint=titan("CheckpointManager").Config()
    )
    with pytest.raises(InvalidArgumentError, match=said):
        applied(root, (f"{DOOR}.{override}", settings))


def test_what_is_overridden_twice_or_is_another_class_is_refused() -> None:
    name = f"{DOOR}.offload_optimizers"
    with pytest.raises(ValueError, match=r"named by two entries. List it once"):
        applied(configuration(optimizer=optimizer_config()), name, name)
    once = applied(configuration(optimizer=optimizer_config()), name)
    with pytest.raises(RefusedError, match=r"is a OffloadedOptimizers.Config already"):
        applied(once, name)

    class Others(titan("OptimizersContainer")):  # type: ignore[misc]
        Config = type("Config", (titan("OptimizersContainer").Config,), {"__slots__": ()})

    with pytest.raises(
        RefusedError, match=r"replaces the OptimizersContainer.Config of torchtitan"
    ):
        applied(configuration(optimizer=Others.Config(param_groups=[])), name)


def test_a_folder_that_cannot_rename_is_refused(tmp_path: Path) -> None:
    config = titan("CheckpointManager").Config(enable=True, folder="gs://bucket/run")
    parts = SimpleNamespace()
    with pytest.raises(RefusedError, match=r"gs://bucket/run.*leave save_with_residency out"):
        ours("save_with_residency")(config).build(
            dataloader=None,
            model_parts=[],
            optimizers=parts,
            lr_schedulers=parts,
            states={},
            sd_adapter=None,
            base_folder=str(tmp_path),
        )


# Other versions ---------------------------------------------------------------------------------


def imported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(DOOR)]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module(DOOR)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("config", "override"),
        ("components.optimizer", "OptimizersContainer"),
        ("components.checkpointer", "CheckpointManager"),
    ],
)
def test_a_version_without_a_hook_is_named(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module(DOOR)
    monkeypatch.delattr(sys.modules[f"torchtitan.{module}"], name)
    expected = rf"torchtitan .*has no torchtitan.{module}.{name}, .*install torchtitan 0.3.0"
    with pytest.raises(RefusedError, match=expected):
        imported_again(monkeypatch)


def test_a_version_without_a_method_or_a_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module(DOOR)
    with monkeypatch.context() as older:
        older.delattr(titan("CheckpointManager"), "_find_load_step")
        with pytest.raises(RefusedError, match=r"has no CheckpointManager._find_load_step"):
            imported_again(older)
    monkeypatch.setitem(sys.modules, "torchtitan.components.checkpointer", None)
    with pytest.raises(RefusedError, match=r"has no torchtitan.components.checkpointer"):
        imported_again(monkeypatch)


def test_without_torchtitan_the_error_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torchtitan":
                raise ModuleNotFoundError(name, name=name)

    for name in [n for n in sys.modules if n.partition(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Nowhere(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"pip install 'torchtitan>=0.3.0'"):
        imported_again(monkeypatch)
