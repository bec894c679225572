"""Stands in for torchtitan where it is not installed: what the parts for it hook into.

Written from the interface of torchtitan 0.3.0 and pytorch/torchtitan b5bcd76c (2026-08-21):
``config`` (``Configurable``, ``override``, ``derive``, ``apply_overrides``),
``components/optimizer`` and ``components/checkpointer``: names, arguments, fields, defaults, the
flat state dict, the hooks, and who calls whom. `make test-projects` runs the real one, and so do
the tests beside this where it is installed.
"""

from __future__ import annotations

import enum
import importlib
import queue
import re
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER = "model", "optimizer", "lr_scheduler", "dataloader"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self, **parts: Any) -> Any:
            return self._owner(config=replace(self), **parts)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            cls.Config._owner = cls


@dataclass(kw_only=True, slots=True)
class OverrideConfig:
    imports: list[Any] = field(default_factory=list)


_REGISTRY: dict[str, tuple[type, Callable[..., Any]]] = {}


def override(*, target: type, description: str = "") -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _REGISTRY[f"{function.__module__}.{function.__name__}"] = target, function
        return function

    return register


def derive(source: Any, target: Any, **deltas: Any) -> Any:
    known = {each.name for each in fields(source)}
    shared = {each.name for each in fields(target)} & known
    return target(**{**{name: getattr(source, name) for name in shared}, **deltas})


def apply_overrides(config: OverrideConfig, root: Any) -> None:
    entries = [(each, {}) if isinstance(each, str) else each for each in config.imports]
    claimed: set[str] = set()
    for name, settings in entries:
        importlib.import_module(name.rpartition(".")[0])
        if name not in _REGISTRY:
            raise ValueError(f"override.imports target '{name}' names no registered @override.")
        if name in claimed:
            raise ValueError(f"Override '{name}' is named by two entries. List it once.")
        claimed.add(name)
        target, function = _REGISTRY[name]
        for each in fields(root):
            if isinstance(value := getattr(root, each.name), target):
                setattr(root, each.name, function(value, **settings))


@dataclass(kw_only=True, slots=True)
class ParamGroupConfig:
    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


class OptimizersContainer(Optimizer, Stateful, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        param_groups: list[ParamGroupConfig] = field(default_factory=list)
        implementation: str = "fused"
        optimizer_factory_kwargs_by_name: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.optimizers: list[Optimizer] = []
        self.model_parts = model_parts
        everything: list[nn.Parameter] = []
        how = {
            "fused": config.implementation.startswith("fused"),
            "foreach": config.implementation == "foreach",
        }
        for part in model_parts:
            free = dict(part.named_parameters())
            groups: dict[str, list[dict[str, Any]]] = {}
            for given in config.param_groups:
                mine = {n: free.pop(n) for n in list(free) if re.search(given.pattern, n)}
                named = {"params": [*mine.values()], "param_names": [*mine]}
                group = {**named, **how, **given.optimizer_kwargs}
                groups.setdefault(given.optimizer_name, []).append(group)
                everything += mine.values()
            for name, of_name in groups.items():
                self.optimizers.append(getattr(torch.optim, name)(of_name))
        if config.implementation == "fused_opt_states_bf16":
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(_make_bf16_state)
        Optimizer.__init__(self, everything, {})

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            saved = optimizer.state_dict()
            for group in saved["param_groups"]:
                for index, name in zip(group["params"], group["param_names"], strict=True):
                    state = saved["state"].get(index, {})
                    found |= {f"state.{name}.{key}": value for key, value in state.items()}
                    for key in [k for k in group if k not in ("params", "param_names")]:
                        found[f"param_groups.{name}.{key}"] = group[key]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            wanted = optimizer.state_dict()
            state: dict[int, Any] = {}
            groups = []
            for group in wanted["param_groups"]:
                for index, name in zip(group["params"], group["param_names"], strict=True):
                    if keys := wanted["state"].get(index):
                        state[index] = {key: state_dict[f"state.{name}.{key}"] for key in keys}
                first = f"param_groups.{group['param_names'][0]}."
                saved = {k: state_dict[first + k] for k in group if first + k in state_dict}
                groups.append({"params": group["params"], **saved})
            optimizer.load_state_dict({"state": state, "param_groups": groups})


def init_optim_state(optimizer: Optimizer) -> None:
    """Takes the step with zero gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or any(p.grad is not None for p in parameters):
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def _make_bf16_state(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is not None and not state:
                state["step"] = torch.zeros((), device=parameter.device)
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(parameter, dtype=torch.bfloat16)


def register_moe_load_balancing_hook(
    optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: object
) -> None:
    def balance(*args: object) -> None:
        for block in [b for part in model_parts for b in part.get_submodule("layers").values()]:
            if block.moe_enabled:
                counts = block.moe.tokens_per_expert_E.float()
                delta = block.moe.load_balance_coeff * torch.sign(counts.mean() - counts)
                with torch.no_grad():
                    block.moe.expert_bias_E.add_(delta - delta.mean())
                    block.moe.tokens_per_expert_E.zero_()

    optimizers.register_step_pre_hook(balance)


class AsyncMode(enum.StrEnum):
    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


class ModelWrapper(Stateful):
    def __init__(self, model: list[nn.Module]) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {key: value for each in self.model for key, value in each.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each in self.model:
            each.load_state_dict(state_dict, strict=False)


class BaseCheckpointManager(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        initial_load_model_only: bool = True
        last_save_model_only: bool = True
        last_save_in_hf: bool = False
        export_dtype: str = "float32"
        keep_latest_k: int = 10
        load_step: int = -1
        exclude_from_loading: list[str] = field(default_factory=list)
        load_only: bool = False

    enable: bool
    save_future: Future[Any] | None

    def load(self, step: int = -1) -> bool:
        return self.enable and self._load(step)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.enable and self._save(curr_step, last_step)

    def maybe_wait_for_staging(self) -> None:
        if self.enable:
            self._maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        if self.enable and self.save_future is not None:
            self._wait_for_saving()

    def close(self) -> None:
        if getattr(self, "enable", False):
            self._close()

    _load: Callable[..., bool]
    _save: Callable[..., bool]
    _close: Callable[[], None]
    _wait_for_saving: Callable[[], None]
    _maybe_wait_for_staging: Callable[[], None]


class CheckpointManager(BaseCheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        async_mode: str = "disabled"

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.folder = str(Path(base_folder) / config.folder)
        self.states = states
        parts = {MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers}
        self.states.update({**parts, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers})
        for each in fields(config):
            if each.name not in ("enable", "folder", "export_dtype", "async_mode"):
                setattr(self, each.name, getattr(config, each.name))
        self.export_dtype = DTYPES[config.export_dtype]
        self.async_mode = AsyncMode(config.async_mode)
        is_async = self.async_mode != AsyncMode.DISABLED
        self.pg: Any = dist.new_group(backend="gloo") if is_async else None
        self.stager: Any = None
        self.staging_future: Any = None
        self.save_future = None
        self.purge_thread = None
        if self.keep_latest_k > 0:
            self.purge_queue: queue.Queue[str | None] = queue.Queue()
            self.purge_thread = threading.Thread(target=self._purge, daemon=True)
            self.purge_thread.start()

    def __del__(self) -> None:
        self.close()

    def _purge(self) -> None:
        while (path := self.purge_queue.get()) is not None:
            shutil.rmtree(path, ignore_errors=True)

    def _close(self) -> None:
        if self.purge_thread is not None and self.purge_thread.is_alive():
            self.purge_queue.put(None)
            self.purge_thread.join()
        if self.stager is not None:
            self.stager.close()

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        if async_mode == AsyncMode.DISABLED:
            return dcp.save(state_dict, checkpoint_id=checkpoint_id)
        return dcp.async_save(state_dict, checkpoint_id=checkpoint_id, process_group=self.pg)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        dcp.load(state_dict, checkpoint_id=checkpoint_id)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.load_only or not (last_step or curr_step % self.interval == 0):
            return False
        self.maybe_wait_for_saving()
        if last_step:
            self._save_last_step(curr_step)
            return True
        states, path = self._flattened_model_states_sd(), self._create_checkpoint_id(curr_step)
        result = self.dcp_save(states, path, self.async_mode, self.async_mode != "async")
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            self.staging_future = result.staging_completion
            self.save_future = result.upload_completion
        elif self.async_mode == AsyncMode.ASYNC:
            assert isinstance(result, Future)
            self.save_future = result
        self._purge_stale_checkpoints()
        return True

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        found = step if step != -1 else self._find_load_step()
        model_only = found == 0
        path = self._create_checkpoint_id(found)
        if found == -1:
            if not self.initial_load_path:
                return False
            model_only, path = self.initial_load_model_only, self.initial_load_path
        if not Path(path).is_dir():
            raise FileNotFoundError(f"--checkpoint.load_step={step} not found at {path}")
        self.dcp_load(self._states_to_load(model_only), path, from_hf=False, from_quantized=False)
        return True

    def _maybe_wait_for_staging(self) -> None:
        if self.staging_future is not None:
            self.staging_future.result()
            self.staging_future = None

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        self.save_future.result()
        self.save_future = None

    def _find_load_step(self, folder: str = "") -> int:
        found = Path(folder or self.folder).glob("step-*/.metadata")
        return max((int(p.parent.name.removeprefix("step-")) for p in found), default=-1)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return str(Path(folder or self.folder) / f"step-{step}")

    def _flattened_model_states_sd(self, states: dict[str, Any] | None = None) -> dict[str, Any]:
        states = self.states if states is None else states
        others = {key: value for key, value in states.items() if key != MODEL}
        return {**others, **(states[MODEL].state_dict() if MODEL in states else {})}

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        if model_only:
            found: dict[str, Any] = self.states[MODEL].state_dict()
            return found
        kept = {k: v for k, v in self.states.items() if k not in self.exclude_from_loading}
        return self._flattened_model_states_sd(kept)

    def _save_last_step(self, curr_step: int) -> None:
        states = self._flattened_model_states_sd()
        if self.last_save_model_only:
            model = self.states[MODEL].state_dict()
            states = {key: value.to(self.export_dtype) for key, value in model.items()}
        self.dcp_save(states, self._create_checkpoint_id(curr_step), AsyncMode.DISABLED)

    def _should_purge(self) -> bool:
        return self.keep_latest_k > 0 and dist.get_rank() == 0 and Path(self.folder).is_dir()

    def _purge_stale_checkpoints(self) -> None:
        if self._should_purge():
            found = sorted(Path(self.folder).glob("step-*"), key=lambda p: int(p.name[5:]))
            for path in found[: -self.keep_latest_k]:
                self.purge_queue.put(str(path))


def install() -> None:
    """Makes torchtitan's modules importable, each with the names that are here."""
    for name in ("", ".components", ".config", ".components.optimizer", ".components.checkpointer"):
        module = types.ModuleType(f"torchtitan{name}")
        module.__dict__.update({k: v for k, v in globals().items() if not k.startswith("__")})
        sys.modules[module.__name__] = module


def uninstall() -> None:
    """Takes them away again, and what was made over them."""
    ours = ["residency", "integrations", "torchtitan"]
    for name in [n for n in sys.modules if ours == n.split(".")[:3] or ours[2] == n.split(".")[0]]:
        del sys.modules[name]
