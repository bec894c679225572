"""Walks a state tree: containers, modules, optimizers and whatever has a ``state_dict``.

The walk names every tensor by its dotted path, as ``torch.distributed.checkpoint`` flattens nested
state dicts, and puts everything else into the document. An optimizer's states bear the names of
their parameters, so that they find their way back in another order, and in another process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from residency._checkpoint._encode import Encoder, Leaf, Node, joined
from residency._errors import RefusedError
from residency._transfer import Lent, is_sharded, owner_of

# Wrappers put themselves into the names of what they wrap. Source: the constants of
# torch.distributed.fsdp, checkpoint_wrapper and torch._dynamo.
_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_KEEPS_STATE = ("state_dict", "load_state_dict")


@dataclass(slots=True)
class Description:
    """Is a state tree as a save sees it.

    Attributes:
        tree: The JSON node of the whole.
        leaves: Its tensors by name.
        replicated: Names that every rank has with the same bytes (those of a
            ``DistributedDataParallel`` module and of its optimizer).
    """

    tree: Node
    leaves: dict[str, Leaf]
    replicated: set[str] = field(default_factory=set)


def describe(tree: Any, *, keep: bool = False) -> Description:
    """Describes a state tree, without a wait for the device.

    Args:
        tree: Modules, optimizers, LR schedulers, ``GradScaler``, whatever has ``state_dict`` and
            ``load_state_dict``, tensors, arrays, plain values, and containers of all these.
        keep: Whether loans may last for good, as those of a snapshot do.

    Raises:
        RefusedError: Something in it cannot be saved, by its name. Loans made so far are given
            back.
    """
    walk = _Walk(tree, keep)
    try:
        node = walk.node("", tree)
    except BaseException:
        end_loans(walk.encoder.leaves.values())
        raise
    return Description(node, walk.encoder.leaves, walk.replicated)


def end_loans(leaves: Iterable[Leaf]) -> None:
    """Gives back what is lent of these."""
    for leaf in leaves:
        if leaf.lent is not None:
            leaf.lent.give_back()


def plain_module(module: nn.Module) -> nn.Module:
    """Returns the module inside of wrappers that only change how it is called."""
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif (inner := module._modules.get("_orig_mod")) is not None:  # torch.compile's
            module = inner
        else:
            return module


def plain_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside of accelerate's wrapper, or what it is given."""
    inner = getattr(optimizer, "optimizer", None)
    is_wrapped = isinstance(optimizer, Optimizer) and isinstance(inner, Optimizer)
    return inner if is_wrapped else optimizer


def clean_name(name: str) -> str:
    """Returns a module's or parameter's name without what wrappers add."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


def parameter_names(tree: Any) -> dict[Tensor, str]:
    """Names every parameter of the modules of a tree, below its module.

    Where two modules use one name, both get their paths in front.
    """
    found: dict[Tensor, tuple[str, str]] = {}
    uses: dict[str, int] = {}
    for path, module in _modules_in(tree, ""):
        for name, parameter in plain_module(module).named_parameters():
            if parameter not in found:
                clean = clean_name(name)
                found[parameter] = (path, clean)
                uses[clean] = uses.get(clean, 0) + 1
    return {
        parameter: clean if uses[clean] == 1 else joined(path, clean)
        for parameter, (path, clean) in found.items()
    }


def _is_plain_mapping(value: Any) -> bool:
    """Says whether a mapping comes back as a dict; an ordered one does where it holds objects."""
    if type(value) is OrderedDict:
        return any(isinstance(each, nn.Module | Optimizer) for each in value.values())
    return isinstance(value, Mapping)


def optimizers_in(tree: Any) -> Iterator[Optimizer]:
    """Yields the optimizers of a tree, those inside of accelerate's wrappers."""
    if isinstance(tree, Optimizer):
        yield plain_optimizer(tree)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from optimizers_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from optimizers_in(value)


def _modules_in(tree: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(tree, nn.Module):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _modules_in(value, joined(path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _modules_in(value, joined(path, index))


class _Walk:
    def __init__(self, tree: Any, keep: bool) -> None:
        self._keep = keep
        self.encoder = Encoder()
        self.replicated: set[str] = set()
        self._names = parameter_names(tree)
        self._replicated_parameters: set[Tensor] = set()

    def node(self, path: str, value: Any) -> Node:
        if isinstance(value, nn.Module):
            return self._module(path, value)
        if isinstance(value, Optimizer):
            return self._optimizer(path, plain_optimizer(value))
        if isinstance(value, torch.amp.GradScaler):
            return self._scaler(path, value)
        if _is_plain_mapping(value) and all(type(k) is str and k[:1] != "$" for k in value):
            return {key: self.node(joined(path, key), each) for key, each in value.items()}
        if type(value) in (list, tuple):
            items = [self.node(joined(path, index), each) for index, each in enumerate(value)]
            return items if type(value) is list else {"$": "tuple", "items": items}
        if not isinstance(value, Mapping | Tensor) and all(
            callable(getattr(value, name, None)) for name in _KEEPS_STATE
        ):
            return self._stateful(path, value)
        return self.encoder.node(path, value)

    def _module(self, path: str, module: nn.Module) -> Node:
        is_replicated = isinstance(module, DistributedDataParallel)
        module = plain_module(module)
        parameters = set(module.parameters())
        storages = {p.detach().untyped_storage()._cdata for p in parameters if not is_sharded(p)}
        keys, names, extra = [], [], {}
        for raw, value in module.state_dict(keep_vars=True).items():
            name = clean_name(raw)
            full = joined(path, name)
            if not isinstance(value, Tensor):
                extra[name] = self.encoder.node(full, value)
                continue
            # A hook may hand out views of parameters; anything else may change in forward.
            is_own = value in parameters or (
                not is_sharded(value) and value.untyped_storage()._cdata in storages
            )
            self.encoder.tensor(full, value, is_early=not is_own)
            keys.append(name)
            names.append(full)
            if is_replicated:
                self.replicated.add(full)
        if is_replicated:
            self._replicated_parameters |= parameters
        return {"$": "module", "keys": keys, "names": names, "extra": extra}

    def _optimizer(self, path: str, optimizer: Optimizer) -> Node:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        index_names = {p: str(index) for index, p in enumerate(parameters)}
        names = {p: self._names.get(p, index_names[p]) for p in parameters}
        if len(set(names.values())) < len(names):  # a module's parameter that is called "0"
            names = index_names
        by_parameter, others, loose = self._state_of(optimizer)
        state = {}
        for parameter, values in by_parameter.items():
            name = names[parameter]
            place = joined(joined(path, "state"), name)
            is_on_host = parameter.is_cpu
            state[name] = {
                key: self._state(joined(place, key), v, is_on_host) for key, v in values.items()
            }
            if parameter in self._replicated_parameters:
                self.replicated |= {joined(place, key) for key in values}
        hyper = [
            {
                key: self.encoder.node(joined(joined(path, f"param_groups.{index}"), key), value)
                for key, value in group.items()
                if key != "params"
            }
            for index, group in enumerate(optimizer.param_groups)
        ]
        return {
            "$": "optimizer",
            "class": type(optimizer).__name__,
            "parameters": [[names[p] for p in group["params"]] for group in optimizer.param_groups],
            "groups": hyper,
            "state": state,
            "loose": self.encoder.node(joined(path, "loose"), loose),
            "others": {k: self.encoder.node(joined(path, k), v) for k, v in others.items()},
        }

    def _state_of(
        self, optimizer: Optimizer
    ) -> tuple[Mapping[Tensor, Mapping[str, Any]], dict[str, Any], dict[Any, Any]]:
        """Returns the states by parameter, other keys of the state dict, and other keys of the
        state.
        """
        owner = owner_of(optimizer)
        if owner is not None:
            lent = owner.lend(optimizer, keep=self._keep)
            loose = {k: v for k, v in lent.items() if not isinstance(k, Tensor)}
            return {k: v for k, v in lent.items() if isinstance(k, Tensor)}, {}, loose
        saved = optimizer.state_dict()
        parameters = {
            index: parameter
            for group, theirs in zip(saved["param_groups"], optimizer.param_groups, strict=True)
            for index, parameter in zip(group["params"], theirs["params"], strict=True)
        }
        by_parameter = {parameters[k]: v for k, v in saved["state"].items() if k in parameters}
        others = {k: v for k, v in saved.items() if k not in ("state", "param_groups")}
        return (
            by_parameter,
            others,
            {k: v for k, v in saved["state"].items() if k not in parameters},
        )

    def _state(self, name: str, value: Any, is_on_host: bool) -> Node:
        if isinstance(value, Lent):
            return self.encoder.tensor(name, value.value, is_early=False, lent=value)
        if isinstance(value, Tensor):
            node = self.encoder.tensor(name, value, is_early=False)
            # Beside a parameter on a device, what is on the host belongs there.
            return {**node, "place": "host"} if value.is_cpu and not is_on_host else node
        return self.encoder.node(name, value)

    def _scaler(self, path: str, scaler: torch.amp.GradScaler) -> Node:
        """Saves the tensors: ``state_dict`` would wait for the device to tell the scale."""
        scale, tracker = scaler._scale, scaler._growth_tracker
        return {
            "$": "scaler",
            "scale": self.encoder.node(
                joined(path, "scale"), float(scaler._init_scale) if scale is None else scale
            ),
            "growth_tracker": self.encoder.node(
                joined(path, "growth_tracker"),
                int(scaler._init_growth_tracker) if tracker is None else tracker,
            ),
            "growth_factor": float(scaler.get_growth_factor()),
            "backoff_factor": float(scaler.get_backoff_factor()),
            "growth_interval": int(scaler.get_growth_interval()),
            "enabled": bool(scaler.is_enabled()),
        }

    def _stateful(self, path: str, value: Any) -> Node:
        kind = type(value)
        return {
            "$": "stateful",
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "state": self.encoder.node(path, value.state_dict()),
        }


def check_plain_layout(leaf: Leaf, local: Tensor) -> None:
    """Refuses tensors whose bytes are not all in one dense storage of their own.

    Raises:
        RefusedError: By the tensor's name.
    """
    kind = type(local)
    is_wrapper = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    if is_wrapper or local.layout is not torch.strided or local.is_quantized or local.is_meta:
        what = kind.__name__ if is_wrapper else f"{local.layout} tensor on {local.device}"
        raise RefusedError(
            f"{leaf.name} is a {what} of {local.dtype}, which has no plain layout of bytes in one "
            "storage. Nothing was saved; save its parts, or a dense tensor."
        )
    if local.is_conj() or local.is_neg():
        raise RefusedError(
            f"{leaf.name} is a lazy conjugate or negative, whose bytes are those of another "
            "tensor. Nothing was saved; call resolve_conj() or resolve_neg() on it."
        )
