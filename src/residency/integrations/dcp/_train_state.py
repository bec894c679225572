"""A training state as ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` take it, without the step
with which torch makes the state of an optimizer before a load.

What ``dcp.load`` fills are the parameters themselves, the homes of an offloaded optimizer, or host
tensors that wait for the first use of a plain optimizer's state. Invariant, which
``tests/integrations/test_dcp_training.py`` tries to break: whatever stands against a load is said
while it is planned, before a byte is read, because names of the state dict say what it is of.

[Note: names that say what a state is of] ``dcp.load`` looks for each name of the state dict in the
checkpoint before it reads, and for nothing else there. So that a checkpoint with a scheduler is not
loaded without one, nor Adam's into AdamW, which have the same names, the state dict has a name such
as ``about this state.the optimizer is AdamW ...``, which no other kind of state has.
"""

from __future__ import annotations

import copy
import difflib
import json
import secrets
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from residency._checkpoint._capture import (
    has_own_pair,
    own_state,
    parameter_names,
    plain_module,
    plain_optimizer,
)
from residency._checkpoint._restore import PlainReception, load_through, receive_plain
from residency._dtensor import local_of, remade
from residency._errors import InvalidArgumentError, RefusedError, warn
from residency._optim import OffloadedOptimizer, plain_schema_of, record_of
from residency._optim._trial import Schemas
from residency._transfer import (
    Incoming,
    before_write,
    copy_across,
    lending,
    owner_of,
    state_stays,
    tensors_in,
)
from residency._units import parse_bytes

_ABOUT = "about this state"
_WITHOUT_STATE = "without_state"
_STAGING_BYTES = parse_bytes("64MiB")
_State = dict[str, dict[str, Any]]
_Shared = dict[int, tuple[Tensor, Tensor]]


class TrainState(Stateful):
    """A model with its optimizer, scheduler and counters, which DCP saves and loads.

    ``dcp.save({"app": state}, ...)``, ``dcp.async_save``, and on a fresh process
    ``dcp.load({"app": state}, ...)``, after which everything is as it was at the save: states,
    group values such as ``lr``, the scheduler, the counters. Names and shapes follow torch's
    ``get_state_dict``, so that its recipes read these checkpoints; the recipes' checkpoints are
    read with ``planner=TrainStatePlanner()``.

    Args:
        model: Its parameters are filled in place.
        optimizer: An optimizer, offloaded or not, of parameters of the model; None saves none.
        scheduler: An object with ``state_dict`` and ``load_state_dict``.
        counters: Plain values, which are in ``counters`` from then on and are saved as they are
            there, or objects with ``state_dict`` and ``load_state_dict``, such as a data loader.

    Raises:
        InvalidArgumentError: A counter has the name of one of the parts; the optimizer is none.
        RefusedError: A parameter of the optimizer is not in the model, or is one of FSDP1's.

    Attributes:
        counters: The counters by name; change and read them there.

    Memory:
        Device: none at a save and at a load, except for state that stays there (``resident=``).
        Host: at a load into a plain optimizer its state, until its first use moves it to the
        device, a bucket at a time; into an offloaded one none beside its homes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        **counters: Any,
    ) -> None:
        """Takes the parts; reads and changes nothing."""
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise InvalidArgumentError(
                f"the optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer, "
                "such as the one that a trainer's own wrapper has inside."
            )
        taken = {"model", "optimizer", "scheduler", _ABOUT} & set(counters)
        if taken:
            raise InvalidArgumentError(
                f"{', '.join(sorted(taken))} is the name of a part; give the counter another name."
            )
        for name in counters:
            _note_misspelt(name)
        self.model = model
        self.optimizer = None if optimizer is None else plain_optimizer(optimizer)
        self.scheduler = scheduler
        self.counters = counters
        self._token = ""
        self._names()

    def state_dict(self) -> dict[str, Any]:
        """Returns the tensors themselves, for ``dcp.save`` to write and ``dcp.load`` to fill.

        An optimizer without state gets a template on the host, which counts as no state.

        Raises:
            RefusedError: The state that a first step makes cannot be foreseen, so that there
                is no template; or the host has no room for it; or its state dict has keys of its
                own. Nothing was changed.
        """
        values: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        without_state: list[str] = []
        if self.optimizer is not None:
            values["optimizer"], without_state = self._optimizer_state()
        # `dcp.load` may write into them: it comes after the copies of a save that is under way.
        before_write(tensors_in(values))
        if self.scheduler is not None:
            values["scheduler"] = copy.deepcopy(self.scheduler.state_dict())
        for name, value in self.counters.items():
            values[name] = value.state_dict() if _has_state_dict(value) else copy.deepcopy(value)
        # First, so that its names are looked for first.
        self._token = secrets.token_hex(8)
        about = dict.fromkeys(self._contents(values), True)
        return {_ABOUT: {**about, _WITHOUT_STATE: [self._token, *without_state]}, **values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state dict that ``dcp.load`` has filled; keeps nothing of it.

        Raises:
            RefusedError: It is of other parts, or of another optimizer, than these. Nothing was
                changed here; ``dcp.load`` finds that before it reads.
        """
        about = dict(state_dict.get(_ABOUT, {}))
        token, *names = about.pop(_WITHOUT_STATE, [self._token])
        # What was given is still there where the checkpoint says nothing of it, as torch's recipes.
        without_state = set() if token == self._token else set(names)
        here = set(self._contents(state_dict))
        if about and set(about) != here:
            raise RefusedError(_difference(set(about), here))
        groups = self._groups_in(state_dict)
        set_model_state_dict(self.model, state_dict["model"])
        if self.optimizer is not None:
            self._load_optimizer(state_dict["optimizer"]["state"], groups, without_state)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])
        for name, value in self.counters.items():
            if _has_state_dict(value):
                value.load_state_dict(state_dict[name])
            else:
                self.counters[name] = state_dict[name]
        state_dict.clear()  # the caller may keep the dict, and should not keep the tensors

    def _names(self) -> list[list[str]]:
        """Returns the names of the optimizer's parameters, group by group."""
        known = parameter_names(plain_module(self.model))
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        strangers = [p for group in groups for p in group["params"] if p not in known]
        if strangers:
            raise RefusedError(
                f"{len(strangers)} parameters of the optimizer, the first of shape "
                f"{tuple(strangers[0].shape)}, are not in the model, so that a checkpoint has no "
                "names for them. Give the model that the optimizer was made for."
            )
        found = [[known[p] for p in group["params"]] for group in groups]
        if any("_flat_param" in name for group in found for name in group):
            raise RefusedError(
                "the model is wrapped by FSDP1, whose flat parameters have no names of their own. "
                "Use fully_shard (FSDP2)."
            )
        return found

    def _contents(self, values: Mapping[str, Any]) -> list[str]:
        """Returns what the state is of. [Note: names that say what a state is of]"""
        model = sorted(
            get_model_state_dict(self.model) if "model" not in values else values["model"]
        )
        facts = [f"the model has {len(model)} tensors ({_sum(model)})", "the optimizer is none"]
        if self.optimizer is not None:
            names = self._names()
            sizes = " + ".join(str(len(group)) for group in names)
            facts[1] = f"the optimizer is {_class_name(self.optimizer)} of {sizes} parameters"
            facts[1] += f" ({_sum(names)})"
        kind = "none" if self.scheduler is None else type(self.scheduler).__name__
        return [*facts, f"the scheduler is {kind}", f"besides {sorted(self.counters)}"]

    def _optimizer_state(self) -> tuple[dict[str, Any], list[str]]:
        """Returns the optimizer's state dict by names, and the names whose state is a template."""
        assert self.optimizer is not None
        optimizer, names = self.optimizer, self._names()
        _check_has_torchs_form(optimizer)
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        stateless = {p for p in everything if _is_stateless(optimizer, p)}
        offload = record_of(optimizer)
        shown = offload is not None and offload.shows_templates
        if stateless and isinstance(optimizer, OffloadedOptimizer):
            optimizer.prime()
        with state_stays():
            saved = optimizer.state_dict()
        if offload is not None:  # who asks the optimizer itself did not ask for a template
            offload.shows_templates = shown
        state: _State = {}
        schemas = Schemas()
        for mine, packed, called in zip(
            optimizer.param_groups, saved["param_groups"], names, strict=True
        ):
            for parameter, key, name in zip(mine["params"], packed["params"], called, strict=True):
                if saved["state"].get(key):
                    values = saved["state"][key]
                    state[name] = {k: _free_to_fill(v) for k, v in values.items()}
                elif parameter in stateless:
                    state[name] = host_template(optimizer, mine, parameter, name, schemas)
        groups = [
            {**copy.deepcopy({k: v for k, v in packed.items() if k != "params"}), "params": called}
            for packed, called in zip(saved["param_groups"], names, strict=True)
        ]
        flat = [name for called in names for name in called]
        without_state = [n for n, p in zip(flat, everything, strict=True) if p in stateless]
        return {"state": state, "param_groups": groups}, without_state

    def _groups_in(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the saved groups in the order of the optimizer's."""
        if self.optimizer is None:
            return []
        saved = {frozenset(g["params"]): g for g in state_dict["optimizer"]["param_groups"]}
        wanted = [frozenset(called) for called in self._names()]
        if set(saved) != set(wanted):
            raise RefusedError(
                "the saved groups share out the optimizer's parameters in another way than those "
                "here. Groups and states were not changed; the tensors that dcp.load had already "
                "read were."
            )
        return [saved[called] for called in wanted]

    def _load_optimizer(
        self, state: _State, groups: list[dict[str, Any]], without_state: set[str]
    ) -> None:
        assert self.optimizer is not None
        filled: dict[Tensor, dict[str, Any]] = {}
        shared: _Shared = {}
        for mine, group, called in zip(
            self.optimizer.param_groups, groups, self._names(), strict=True
        ):
            for parameter, name in zip(mine["params"], called, strict=True):
                if name in state and name not in without_state:
                    filled[parameter] = state[name]
            for key, value in group.items():
                if key != "params":
                    mine[key] = _one_for_all(mine.get(key), value, shared)
        put_state(self.optimizer, filled)


class TrainStatePlanner(DefaultLoadPlanner):
    """A planner of a ``TrainState``'s loads: says what differs in one error, and takes torch's own.

    Checkpoints that torch's own recipes wrote have no such description; they are matched by the
    names of their tensors only.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Compares the parts of the state with the parts that were saved.

        Raises:
            RefusedError: They differ. Nothing was read.
        """
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None:
            return
        mark = f".{_ABOUT}."
        saved, here = (
            {name for name in names if mark in f".{name}"}
            for names in (metadata.state_dict_metadata, self.state_dict)
        )
        if not saved:
            self.state_dict = {k: v for k, v in self.state_dict.items() if k not in here}
        elif saved != here:
            facts = [{name.partition(mark[1:])[2] for name in each} for each in (saved, here)]
            raise RefusedError(_difference(*facts))


def _note_misspelt(counter: str) -> None:
    """Warns of a counter that is nearly called as a part: saved as one, it would miss there."""
    for part in difflib.get_close_matches(counter, ("optimizer", "scheduler"), 1, 0.8):
        if not counter.startswith(part):  # `optimizer_steps`, `scheduler2`
            warn(f"{counter}= is a counter of this TrainState; did you mean {part}=?")


def _difference(saved: set[str], here: set[str]) -> str:
    return (
        f"the checkpoint is of another state: there {'; '.join(sorted(saved - here)) or 'less'}, "
        f"here {'; '.join(sorted(here - saved)) or 'less'}. Nothing was loaded; make the state of "
        "the parts that were saved."
    )


def _sum(names: Any) -> str:
    return f"{zlib.crc32(json.dumps(names).encode()):08x}"


def _class_name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__  # that of an offloaded one is its own class'


def _has_state_dict(value: Any) -> bool:
    return all(callable(getattr(value, n, None)) for n in ("state_dict", "load_state_dict"))


def _free_to_fill(value: Any) -> Any:
    """Returns a copy of a loan that lasts for good, as to a snapshot that a caller keeps.

    Other loans end by themselves, with a write to the disk.
    """
    if (
        isinstance(value, Tensor)
        and (local := local_of(value)).is_cpu
        and lending.is_lasting(local)
    ):
        return remade(value, Tensor.clone)
    return value


def _check_has_torchs_form(optimizer: Optimizer) -> None:
    if not has_own_pair(optimizer):
        return
    state = own_state(optimizer)
    if state is None or state.others:
        what = "another form" if state is None else f"{', '.join(map(str, state.others))} besides"
        raise RefusedError(
            f"the state dict of {type(optimizer).__name__} has {what}; torch's get_state_dict "
            "has state and param_groups alone. Nothing was saved; use "
            "residency.Checkpointer, which gives an optimizer its own state dict back."
        )


def _one_for_all(before: object, value: object, shared: _Shared) -> object:
    """Returns a group's value, the same tensor for all groups that had one tensor before.

    Args:
        before: What the group has.
        value: What was saved of it.
        shared: Tensors that groups had, by their ids, and what took their place.
    """
    if not isinstance(before, Tensor) or not isinstance(value, Tensor):
        return value
    _, found = shared.setdefault(id(before), (before, value))
    return found if torch.equal(found, value) else value


def _is_stateless(optimizer: Optimizer, parameter: Tensor) -> bool:
    if not parameter.requires_grad:
        return False
    with state_stays():
        values: Any = dict.get(optimizer.state, parameter)
    # Beside a parameter of the host, an offloaded optimizer has a plain dict.
    return not values or (hasattr(values, "is_template") and values.is_template())


def host_template(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    name: str,
    schemas: Schemas,
) -> dict[str, Any]:
    """Returns zeros on the host for what a first step of a plain optimizer makes."""
    schema = plain_schema_of(optimizer, group, parameter, schemas)
    if schema is None:
        raise RefusedError(
            f"the state that {type(optimizer).__name__} makes for {name} in its first step cannot "
            "be foreseen, so there is nothing to load into. Nothing was changed; take one step "
            "before the load, or offload the optimizer."
        )
    return {
        key: remade(like, partial(torch.zeros_like, device="cpu"))
        if isinstance(like, Tensor)
        else copy.deepcopy(like)
        for key, like in schema.values.items()
    }


@state_stays()
def put_state(optimizer: Optimizer, filled: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Makes what was filled the optimizer's state, where each value belongs."""
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    schemas = Schemas()
    states = {
        parameter: {
            key: _incoming(optimizer, group_of[parameter], parameter, key, value, schemas)
            for key, value in values.items()
        }
        for parameter, values in filled.items()
    }
    owner = owner_of(optimizer)
    is_own = has_own_pair(optimizer)
    reception = None if owner is None else owner.receive(optimizer, states)
    if reception is None:
        reception = receive_plain(optimizer, states, eager=is_own, staging_bytes=_STAGING_BYTES)
    others: dict[tuple[Tensor, str], Any] = {}
    for parameter, values in filled.items():
        for key, value in values.items():
            entry = parameter, key
            if not isinstance(value, Tensor):
                others[entry] = value
            elif isinstance(reception, PlainReception) and entry in reception.waiting:
                reception.targets[entry] = reception.waiting[entry] = value
            elif local_of(reception.targets[entry]).data_ptr() != local_of(value).data_ptr():
                copy_across(local_of(reception.targets[entry]), local_of(value))
    reception.finish(others, {})
    if is_own:
        load_through(optimizer, {}, is_plain=isinstance(reception, PlainReception))


def _incoming(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    key: str,
    value: Any,
    schemas: Schemas,
) -> Incoming | None:
    if not isinstance(value, Tensor):
        return None
    is_host = value.is_cpu
    if value.dim() == 0 and key != "step" and not dict.get(optimizer.state, parameter):
        # A template's scalars are all on the host, wherever steps keep them.
        schema = plain_schema_of(optimizer, group, parameter, schemas)
        is_host = schema is None or key not in schema.device
    return Incoming(value.dtype, tuple(value.shape), is_host)
