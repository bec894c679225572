"""Walks a state tree: containers, modules, optimizers and whatever has a ``state_dict``.

The walk names every tensor by its dotted path, as ``torch.distributed.checkpoint`` flattens nested
state dicts, and puts everything else into the document. An optimizer's states bear the names of
their parameters, so that they find their way back in another order, and in another process.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from residency._checkpoint._capture._own_pairs import (
    ModuleEntry,
    ModuleState,
    OptimizerState,
    has_own_pair,
    is_whole_object,
    memory_key,
    own_state,
)
from residency._checkpoint._capture._wrappers import (
    clean_names,
    compiled_module,
    plain_module,
    plain_optimizer,
)
from residency._checkpoint._document._decode import tensor_nodes
from residency._checkpoint._document._encode import Encoder, Leaf, check_is_finite, joined
from residency._checkpoint._document._nodes import (
    KIND,
    MAPPING,
    MODULE,
    OPTIMIZER,
    PLAIN,
    SCALER,
    STATEFUL,
    Node,
    has_halves,
    mapping_node,
)
from residency._dtensor import local_of
from residency._errors import RefusedError
from residency._nesting import refuse_inside
from residency._ranks import rank_and_world_size
from residency._storages import is_wrapper, storage_key, strided_as
from residency._transfer import (
    Lent,
    Loans,
    is_any_away,
    is_away,
    owner_of,
    state_stays,
    tensors_in,
    waiting_of,
)

_STATE_METHODS = ("state_dict", "load_state_dict")
_Found = TypeVar("_Found")
_APART = "PostLocalSGDOptimizer"  # of torch: lets the ranks' replicas differ between averagings


@dataclass(slots=True)
class Description:
    """A state tree as a save sees it.

    Attributes:
        tree: The JSON node of the whole.
        leaves: Its tensors by name.
        replicated: Names that every rank has with the same bytes (those of a
            ``DistributedDataParallel`` module and of its optimizer).
        loans: What optimizers lent for it, whatever of that is among the leaves.
    """

    tree: Node
    leaves: dict[str, Leaf]
    replicated: set[str] = field(default_factory=set)
    loans: Loans = field(default_factory=Loans)


def describe(
    tree: object, *, is_lasting: bool = False, into: Description | None = None
) -> Description:
    """Describes a state tree, without a wait for the device.

    Args:
        tree: Modules, optimizers, LR schedulers, ``GradScaler``, whatever has ``state_dict`` and
            ``load_state_dict``, tensors, arrays, plain values, and containers of all these.
        is_lasting: Whether loans may last for good, as those of a snapshot do.
        into: An empty description to fill, which knows of each loan before it begins.

    Raises:
        RefusedError: Something in it cannot be saved, by its name. Loans made so far are ended.
    """
    refuse_inside("a save or a snapshot", object())
    check_is_finite(tree)
    found = Description({}, {}) if into is None else into
    walk = _StateWalk(tree, found.loans, is_lasting)
    try:
        found.tree = walk.encoder.node("", tree)
    except BaseException:
        found.loans.end()
        raise
    found.leaves, found.replicated = walk.encoder.leaves, walk.replicated
    return found


class ParameterName(NamedTuple):
    """The name of a parameter of a module in a tree.

    Attributes:
        path: The module's, in the tree.
        name: Its own, below the module.
    """

    path: str
    name: str

    @property
    def full(self) -> str:
        return joined(self.path, self.name)


def parameters_of(tree: object) -> dict[Tensor, ParameterName]:
    """Returns every parameter of the modules of a tree, with its name."""
    found: dict[Tensor, ParameterName] = {}
    for keys, outer in _found_in(tree, nn.Module):
        path = functools.reduce(joined, keys, "")
        module = plain_module(outer)
        parameters = dict(module.named_parameters())
        names = clean_names(module, parameters)
        for name, parameter in zip(names, parameters.values(), strict=True):
            found.setdefault(parameter, ParameterName(path, name))
    return found


def parameter_names(tree: object) -> dict[Tensor, str]:
    """Names every parameter of the modules of a tree, below its module.

    Where two modules use one name, both get their paths in front.
    """
    found = parameters_of(tree)
    uses = Counter(each.name for each in found.values())
    return {p: each.name if uses[each.name] == 1 else each.full for p, each in found.items()}


def optimizers_in(tree: object) -> Iterator[Optimizer]:
    """Returns the optimizers of a tree, those inside of accelerate's wrappers."""
    return (plain_optimizer(each) for _, each in _found_in(tree, Optimizer))


def _found_in(
    tree: object, kind: type[_Found], *path: object
) -> Iterator[tuple[tuple[object, ...], _Found]]:
    """Yields the objects of a class in a tree, each with the keys that lead to it."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, kind):
        yield path, tree
    elif isinstance(tree, Mapping):
        pairs = tree.items()
    elif isinstance(tree, list | tuple):
        pairs = enumerate(tree)
    for key, value in pairs:
        if type(value) not in PLAIN:
            yield from _found_in(value, kind, *path, key)


def _takes_its_values(value: object) -> bool:
    """Returns whether a value is a mapping that a restore can fill in place."""
    # A chain puts whatever it is given into its first mapping.
    return isinstance(value, MutableMapping) and not isinstance(value, ChainMap)


class _StateWalk:
    def __init__(self, tree: Any, loans: Loans, is_lasting: bool) -> None:
        self._loans = loans
        self._is_lasting = is_lasting
        # Weakly: a cycle would keep tensors and loans until Python looks for cycles.
        me = weakref.proxy(self)
        self.encoder = Encoder(lambda path, value: me._object(path, value))
        self.replicated: set[str] = set()
        self._names = parameter_names(tree)
        self._replicated_parameters: set[Tensor] = set()
        self._optimizers = list(optimizers_in(tree))
        # Replicas, until optimizers step them apart.
        self._is_alike = all(type(each).__name__ != _APART for each in self._optimizers)

    def _object(self, path: str, value: Any) -> Node | None:
        """Returns the node of what is filled in place, or None for a value."""
        if isinstance(value, nn.Module):
            return self._module(path, value)
        if isinstance(value, Optimizer):
            return self._optimizer(path, plain_optimizer(value))
        if isinstance(value, torch.amp.GradScaler):
            is_whole = is_whole_object(value)
            return self._whole(path, value) if is_whole else self._scaler(path, value)
        if isinstance(value, Tensor):
            return None
        if all(callable(getattr(value, name, None)) for name in _STATE_METHODS):
            return self._whole(path, value)
        if _takes_its_values(value):
            node = mapping_node(MAPPING, self.encoder.pairs(path, value))
            return {**node, "class": class_name(value)}
        return None

    def _module(self, path: str, module: nn.Module) -> Node:
        common = _names_in_common(module) if self._is_alike else set()
        module = plain_module(module)
        state = ModuleState(module)
        keys, names, extra = [], [], {}
        for name, entry in state.entries.items():
            full = joined(path, name)
            if has_halves(name):
                raise RefusedError(
                    f"{full} has half a surrogate pair in its name, which UTF-8 cannot write. "
                    "Nothing was saved; rename that part of the module."
                )
            if entry.is_made:
                self._check_is_taken(full, module, state, entry)
            value = entry.value
            if not isinstance(value, Tensor):
                extra[name] = self._placed(full, value)
                continue
            # A hook may hand out views of parameters; anything else may change in forward.
            is_own = value in state.parameters or memory_key(value) in state.memory
            self.encoder.tensor(full, value, is_early=not is_own)
            keys.append(name)
            names.append(full)
            if entry.raw in common:
                self.replicated.add(full)
        if common:
            replicas = {p for n, p in module.named_parameters() if n in common}
            groups = [group["params"] for each in self._optimizers for group in each.param_groups]
            # An optimizer with a part of them has those of its rank, as torch's ZeRO has.
            if {p for p in replicas if p.requires_grad}.issubset(itertools.chain(*groups)):
                self._replicated_parameters |= replicas
        node = {KIND: MODULE, "keys": keys, "names": names, "extra": extra}
        if state.is_loaded and state.metadata is not None:
            node["metadata"] = self._value(joined(path, "_metadata"), dict(state.metadata))
        return node

    def _check_is_taken(
        self, name: str, module: nn.Module, state: ModuleState, entry: ModuleEntry
    ) -> None:
        """Refuses what a module puts into its state dict and takes from none; of a snapshot, no
        restore is promised.
        """
        if self._is_lasting or is_lazy(entry.value):
            return
        if not (state.is_taken(entry) or state.is_of_a_parameter(entry)):
            raise RefusedError(
                f"{name} is in the state_dict() of {type(module).__name__}, and no method or hook "
                "of it takes that back in load_state_dict. Nothing was saved; give the part that "
                "adds it a _load_from_state_dict, or leave it out of the state dict."
            )

    def _optimizer(self, path: str, optimizer: Optimizer) -> Node:
        found = self._state_of(optimizer)
        if found is None:
            return self._whole(path, optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = {p: self._names.get(p, str(index)) for index, p in enumerate(parameters)}
        if len(set(names.values())) < len(names):  # a module's parameter that is called "0"
            names = {p: str(index) for index, p in enumerate(parameters)}
        state, states_path = {}, joined(path, "state")
        going = {storage_key(local_of(each.tensor)) for each in waiting_of(optimizer)}
        any_parked = is_any_away()
        for parameter, values in found.by_parameter.items():
            name = names[parameter]
            inner_path = joined(states_path, name)
            is_on_host = parameter.is_cpu
            if any_parked:
                is_on_host &= not is_away(parameter)
                going |= _parked(values)
            state[name] = {
                key: self._state(joined(inner_path, key), v, is_on_host, going)
                for key, v in values.items()
            }
            if parameter in self._replicated_parameters:
                self.replicated |= {joined(inner_path, key) for key in values}
        hyper = [
            {
                key: self._placed(joined(joined(path, f"param_groups.{index}"), key), value)
                for key, value in group.items()
            }
            for index, group in enumerate(found.groups)
        ]
        return {
            KIND: OPTIMIZER,
            "class": type(optimizer).__name__,
            "parameters": [[names[p] for p in group["params"]] for group in optimizer.param_groups],
            "groups": hyper,
            "state": state,
            "loose": self._placed(joined(path, "loose"), found.by_other_key),
            "others": self._placed(path, dict(found.others)),
        }

    def _state_of(self, optimizer: Optimizer) -> OptimizerState | None:
        """Returns the state of an optimizer, in which what is at home on the host is lent; None
        where only its own methods know it.
        """
        own = None
        with state_stays():
            if has_own_pair(optimizer):  # of an offloaded one, this waits for the copies home
                own = own_state(optimizer)
                if own is None:
                    return None
            owner = owner_of(optimizer)
            values: Mapping[Any, Any] = optimizer.state
            if owner is not None:
                values = owner.lend(optimizer, self._loans, is_lasting=self._is_lasting)
        if own is not None:
            lent = {local_of(each.value).data_ptr(): each for each in self._loans}
            return replace(own, by_parameter=_with_loans(own.by_parameter, lent))
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        in_groups = {p for group in optimizer.param_groups for p in group["params"]}
        return OptimizerState(
            {key: each for key, each in values.items() if key in in_groups},
            {key: each for key, each in values.items() if key not in in_groups},
            groups,
            {},
        )

    def _state(self, name: str, value: object, is_on_host: bool, going: Collection[object]) -> Node:
        if isinstance(value, Lent):
            return self.encoder.tensor(name, value.value, is_early=False, lent=value)
        if isinstance(value, Tensor):
            node = self.encoder.tensor(name, value, is_early=False)
            inner = [(node, value)]
        else:
            node = self._value(name, value)
            leaves = self.encoder.leaves
            inner = [(each, leaves[each["name"]].value) for each in tensor_nodes(node)]
        # Beside a parameter on a device, what is on the host belongs there, or waits for it.
        for each, tensor in inner if not is_on_host else ():
            local = local_of(tensor)
            if local.is_cpu and storage_key(local) not in going:
                each["place"] = "host"
        return node

    def _value(self, name: str, value: object) -> Node:
        """Returns the node of what is read anew: a value without objects in it."""
        check_is_finite(value, name)
        return self.encoder.plain(name, value)

    def _scaler(self, path: str, scaler: torch.amp.GradScaler) -> Node:
        """Saves the tensors: ``state_dict`` would wait for the device to tell the scale."""
        state: dict[str, object] = {}
        if scaler.is_enabled():  # torch gives another one no fields
            scale, tracker = scaler._scale, scaler._growth_tracker
            state = {
                "scale": scaler._init_scale if scale is None else scale,
                "growth_factor": scaler.get_growth_factor(),
                "backoff_factor": scaler.get_backoff_factor(),
                "growth_interval": scaler.get_growth_interval(),
                "_growth_tracker": scaler._init_growth_tracker if tracker is None else tracker,
            }
        return {KIND: SCALER, "state": self._value(path, state)}

    def _placed(self, name: str, value: object) -> Node:
        """Returns the node of what an object's own method takes, where it was: a tensor of a
        device is given to it on one.
        """
        if type(value) in PLAIN:
            return self.encoder.node(name, value)
        node = self._value(name, value)
        parked = _parked(value) if is_any_away() else ()
        for each in tensor_nodes(node):
            leaf = local_of(self.encoder.leaves[each["name"]].value)
            if not leaf.is_cpu or storage_key(leaf) in parked:
                each["place"] = "device"
        return node

    def _whole(self, path: str, value: Any) -> Node:
        """Returns the node of what is the state dict that it gives. An optimizer of this kind
        moves what it takes to its parameters itself.
        """
        to_node = self._value if isinstance(value, Optimizer) else self._placed
        return {
            KIND: STATEFUL,
            "class": class_name(value),
            "state": to_node(path, value.state_dict()),
        }


def _with_loans(value: Any, lent: Mapping[int, Lent]) -> Any:
    """Returns a value with loans in the place of the tensors that are lent."""
    if isinstance(value, Tensor):
        local = local_of(value)
        if is_wrapper(local) or not local.numel():
            return value
        found = lent.get(local.data_ptr())
        is_it = found is not None and strided_as(local_of(found.value)) == strided_as(local)
        return found if is_it else value
    if isinstance(value, Mapping):
        return {key: _with_loans(each, lent) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_loans(each, lent) for each in value)
    return value


def class_name(value: object) -> str:
    """Returns what a document calls the class of an object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _names_in_common(module: nn.Module) -> set[str]:
    """Returns the names of what all ranks have, of a module in ``DistributedDataParallel``."""
    while not isinstance(module, DistributedDataParallel):
        inner = compiled_module(module)
        if inner is None:
            return set()
        module = inner
    # Those of a part of the ranks may be the stages of a pipeline, which share their names.
    group: Any = module.process_group
    if group.size() != rank_and_world_size()[1]:
        return set()
    wrapped = module.module
    names = {name for name, _ in wrapped.named_parameters(remove_duplicate=False)}
    if module.broadcast_buffers:  # each forward begins with those of rank 0
        names |= {name for name, _ in wrapped.named_buffers(remove_duplicate=False)}
    return names - set(module.parameters_to_ignore)


def check_plain_layout(leaf: Leaf, local: Tensor) -> None:
    """Refuses tensors whose bytes are not all in one dense storage of their own.

    Raises:
        RefusedError: By the tensor's name.
    """
    problem = layout_problem(local)
    if problem is not None:
        what, remedy = problem
        raise RefusedError(f"{leaf.name} is {what}. Nothing was saved; {remedy}.")


def layout_problem(local: Tensor) -> tuple[str, str] | None:
    """Returns what a tensor is whose bytes are not all in one dense storage of its own, and what
    to save instead; None for a plain one.
    """
    is_special = is_wrapper(local)
    if is_special or local.layout is not torch.strided or local.is_quantized or local.is_meta:
        what = type(local).__name__ if is_special else f"{local.layout} tensor on {local.device}"
        return (
            f"a {what} of {local.dtype}, which has no plain layout of bytes in one storage",
            "save its parts, or a dense tensor",
        )
    if local.is_conj() or local.is_neg():
        return (
            "a lazy conjugate or negative, whose bytes belong to another tensor",
            "call resolve_conj() or resolve_neg() on it",
        )
    return None


def _parked(value: object) -> set[int]:
    """Returns the storages of a value that are on the host only as long as they are parked."""
    return {storage_key(local_of(each)) for each in tensors_in(value) if is_away(each)}
