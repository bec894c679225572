"""Restores optimizers: their groups at once, their states where each optimizer keeps them.

States find their parameters by name: that in a module of the same save or call, or else the one
in the groups' ``param_names``; by position where one side has neither.
Torch's own ``load_state_dict`` is not called: it casts, moves everything to the device and keeps a
second copy. A class with an own one, or with hooks, has it called with the states that are there.
[Note: an object's own pair]
Settings that say how a step computes (``foreach`` and the like) stay those of the optimizer that is
restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._checkpoint._capture._own_pairs import has_own_pair
from residency._checkpoint._capture._walk import ParameterName
from residency._checkpoint._document._decode import tensor_nodes
from residency._checkpoint._document._nodes import TENSOR, Node, kind_of
from residency._checkpoint._restore._groups import plan_group, put_group
from residency._checkpoint._restore._own_loads import load_through
from residency._checkpoint._restore._plain_optimizers import PlainReception, receive_plain
from residency._checkpoint._restore._plan import Remedied, RestorePlan
from residency._checkpoint._restore._values import SavedValue, unusable_is_damage
from residency._dtensor import moved
from residency._transfer import Incoming, Reception, owner_of, replaced, state_stays

_Incomings = dict[Tensor, dict[str, Incoming | None]]

_PARAM_NAMES = "param_names"  # torch's key for what `named_parameters` called them
_AS_SAVED = "make the groups as they were when it was saved (add_param_group, unfreeze) before"


def plan_optimizer(
    plan: RestorePlan,
    path: str,
    node: Mapping[str, Any],
    optimizer: Optimizer,
    *,
    names: Mapping[Tensor, ParameterName],
    eager: bool,
) -> None:
    """Plans the restore of an optimizer, noting in the plan whatever does not fit.

    Args:
        plan: Gets its states and values.
        path: What it is called.
        node: What was saved of it.
        optimizer: What is here; without wrappers.
        names: What the parameters of the modules in the state are called.
        eager: Whether a plain one gets its state on the device at once.
    """
    problem, order = _match(node, optimizer, names)
    if problem is not None:
        plan.differing.append(Remedied(f"{path}: {problem}"))
        return
    is_own = has_own_pair(optimizer)
    eager = eager or is_own  # its methods expect the state where its steps do
    by_name: dict[str, Tensor] = {}
    for index, group in enumerate(node["parameters"]):
        mine = optimizer.param_groups[order[index].group]["params"]
        for name, position in zip(group, order[index].positions, strict=True):
            by_name[name] = mine[position]
    found = _incoming(plan, path, node, by_name)
    if found is None:
        return
    loose = plan.value(node.get("loose") or {}, f"{path}.loose")
    own = plan.value(node.get("others") or {}, path)
    groups = []
    for index, saved in enumerate(node["groups"]):
        group = optimizer.param_groups[order[index].group]
        named = _named_here(saved, group, order[index])
        groups.append((group, plan_group(plan, f"{path}.param_groups.{index}", named, group)))
    coming = _ComingOptimizer(plan, optimizer, eager, is_own, *found, loose, own, groups)
    plan.checks.append(coming.rehearse)
    plan.before.append(coming.make_room)
    plan.after.append(coming.finish)


@dataclass(slots=True)
class _ComingOptimizer:
    """An optimizer whose restore is planned.

    Attributes:
        is_own: Whether it has methods of its own, which know more than its fields.
        states: What its states will be, for its owner.
        tensors: The name of each stored state.
        others: States that are no tensors.
        loose: The state by other keys than parameters.
        own: What its state dict has beside torch's keys.
        groups: The groups with what is to stand in them.
        reception: Where its states arrive, once there is room for them.
    """

    plan: RestorePlan
    optimizer: Optimizer
    eager: bool
    is_own: bool
    states: Mapping[Tensor, Mapping[str, Incoming | None]]
    tensors: Mapping[tuple[Tensor, str], str]
    others: Mapping[tuple[Tensor, str], SavedValue]
    loose: SavedValue
    own: SavedValue
    groups: Sequence[tuple[dict[str, Any], Mapping[str, Tensor | SavedValue]]]
    reception: Reception | None = None

    def rehearse(self) -> None:
        """Gives another object of a class of torch the states: what it cannot use is damage.

        The classes of torch change nothing there but what they are given; of others, it is seen
        when the states are in place.
        """
        optimizer = self.optimizer
        if type(optimizer).__module__.partition(".")[0] != "torch" or owner_of(optimizer):
            return
        states: dict[Tensor, dict[str, Any]] = {}
        for parameter, entries in self.states.items():
            states[parameter] = {
                key: self.others[parameter, key]()
                if incoming is None
                else torch.empty(incoming.shape, dtype=incoming.dtype, device="meta")
                for key, incoming in entries.items()
            }
        groups = [dict(group) for group in optimizer.param_groups]
        other = object.__new__(type(optimizer))
        other.__dict__.update(optimizer.__dict__, defaults=dict(optimizer.defaults))
        self._give(other, {**states, **self.loose()}, groups)

    def _give(
        self, optimizer: Optimizer, state: Mapping[Any, Any], groups: list[dict[str, Any]]
    ) -> None:
        """Lets a class repair what its older versions did not save."""
        with unusable_is_damage(f"{type(optimizer).__name__} cannot use the states"):
            optimizer.__setstate__({"state": state, "param_groups": groups})

    def make_room(self) -> None:
        """Makes the targets of the states, and plans what fills them."""
        owner = owner_of(self.optimizer)
        if owner is not None:
            self.reception = owner.receive(self.optimizer, self.states)
        if self.reception is None:
            self.reception = receive_plain(
                self.optimizer,
                self.states,
                eager=self.eager,
                staging_bytes=self.plan.staging_bytes,
            )
        for (parameter, key), name in self.tensors.items():
            self.plan.fill(name, self.reception.targets[parameter, key])

    def finish(self) -> None:
        """Puts groups and states in place, once bytes are there."""
        reception = self.reception
        assert reception is not None
        values = {entry: each() for entry, each in self.others.items()}
        _settle_nested(reception, values, self.others, self.plan.fresh)
        self.reception = None
        optimizer = self.optimizer
        devices = (p.device for group in optimizer.param_groups for p in group["params"])
        device = next(devices, None)
        reception.finish(values, self.loose(device))
        for group, planned in self.groups:
            put_group(group, planned)
        if self.is_own:
            is_plain = isinstance(reception, PlainReception)
            load_through(optimizer, self.own(device), is_plain=is_plain)
        elif owner_of(optimizer) is None:
            with state_stays():
                self._give(optimizer, optimizer.state, optimizer.param_groups)


def _settle_nested(
    reception: Reception,
    values: dict[tuple[Tensor, str], object],
    others: Mapping[tuple[Tensor, str], SavedValue],
    fresh: Mapping[str, Tensor],
) -> None:
    """Sees to it that tensors within lists and the like get where the step needs them."""
    for (parameter, key), value in values.items():
        on_device = [
            fresh[each["name"]]
            for each in tensor_nodes(others[parameter, key].node)
            if each.get("place") != "host"
        ]
        if isinstance(reception, PlainReception) and not reception.eager:
            reception.nested[parameter, key] = on_device
        else:
            there = {id(each): moved(each, parameter.device) for each in on_device}
            values[parameter, key] = replaced(value, there)


def _incoming(
    plan: RestorePlan, path: str, node: Mapping[str, Any], by_name: Mapping[str, Tensor]
) -> tuple[_Incomings, dict[tuple[Tensor, str], str], dict[tuple[Tensor, str], SavedValue]] | None:
    """Returns the states by parameter, the names of those that are tensors, and the others; None
    where some do not fit.
    """
    states: _Incomings = {}
    tensors: dict[tuple[Tensor, str], str] = {}
    others: dict[tuple[Tensor, str], SavedValue] = {}
    known: dict[tuple[torch.dtype, tuple[int, ...], bool], Incoming] = {}
    is_whole = True
    for name, values in node["state"].items():
        parameter = by_name[name]
        incoming: dict[str, Incoming | None] = {}
        for key, each in values.items():
            incoming[key] = None
            if kind_of(each) != TENSOR:
                others[parameter, key] = plan.value(each, f"{path}.state.{name}.{key}")
                continue
            tensors[parameter, key] = each["name"]
            shards = plan.source.tensors.get(each["name"])
            if not shards:
                plan.missing.append(each["name"])
                is_whole = False
                continue
            shape = tuple(shards[0].whole_shape)
            is_cut = shards[0].shape != shape or len(shards) > 1
            if is_cut and shape != tuple(parameter.shape):
                plan.differing.append(
                    f"{each['name']}: a shard of shape {shape}, of a parameter of shape "
                    f"{tuple(parameter.shape)} here"
                )
                is_whole = False
            form = shards[0].dtype, shape, each.get("place") == "host"
            incoming[key] = known.setdefault(form, Incoming(*form))
        states[parameter] = incoming
    return (states, tensors, others) if is_whole else None


@dataclass(frozen=True, slots=True)
class _GroupMatch:
    """The group of the optimizer that a saved group is, with the place of each parameter in it."""

    group: int
    positions: Sequence[int]


def _named_here(
    saved: Mapping[str, Node], group: Mapping[str, Any], match: _GroupMatch
) -> Mapping[str, Node]:
    """Returns a saved group in which names are those of the parameters here, in their order: what
    the group here calls them, or else as they were saved.
    """
    if _PARAM_NAMES not in saved:
        return saved
    others = {key: node for key, node in saved.items() if key != _PARAM_NAMES}
    names = saved[_PARAM_NAMES]
    if _PARAM_NAMES in group or not _names_all(names, len(match.positions)):
        return others
    in_order = sorted(zip(match.positions, names, strict=True))
    return {**others, _PARAM_NAMES: [name for _, name in in_order]}


def _names_all(names: object, count: int) -> bool:
    return (
        isinstance(names, list)
        and len(names) == count
        and all(isinstance(name, str) for name in names)
    )


def _named_by_groups(
    groups: Sequence[Mapping[str, Any]], known: list[list[str]]
) -> list[list[str]] | None:
    """Returns the names of modules, else those in the groups; None where they have none, or one
    twice.
    """
    if not _is_nameless(known):
        return known
    names = [group.get(_PARAM_NAMES) for group in groups]
    if not all(_names_all(of, len(each)) for of, each in zip(names, known, strict=False)):
        return None
    found = [list(of) for of in names if of is not None]
    flat = [name for of in found for name in of]
    return found if len(found) == len(known) and len(set(flat)) == len(flat) else None


def _is_nameless(names: Sequence[Sequence[str]]) -> bool:
    return all(name.isdecimal() for group in names for name in group)


def _match(
    node: Mapping[str, Any], optimizer: Optimizer, names: Mapping[Tensor, ParameterName]
) -> tuple[str | None, list[_GroupMatch]]:
    """Finds the saved groups in the optimizer; returns what stands against it, or None."""
    if node.get("class") != type(optimizer).__name__:
        here = type(optimizer).__name__
        return f"saved a {node.get('class')}, here a {here}; pass an optimizer of that class", []
    saved: list[list[str]] = node["parameters"]
    mine = _names_in(optimizer, names, saved)
    if _is_nameless(saved) or _is_nameless(mine):
        theirs = _named_by_groups(node["groups"], saved)
        ours = _named_by_groups(optimizer.param_groups, mine)
        if theirs and ours and set(chain(*theirs)) == set(chain(*ours)):
            saved, mine = theirs, ours
    if len(saved) != len(mine):
        sizes = [[len(group) for group in side] for side in (saved, mine)]
        return f"saved groups of {sizes[0]} parameters, here of {sizes[1]}; {_AS_SAVED}", []
    left = set(range(len(mine)))
    matches = []
    for index, group in enumerate(saved):
        candidates = [i for i in sorted(left, key=lambda i: i != index) if _same(group, mine[i])]
        if not candidates:
            break
        left.remove(candidates[0])
        where = {name: position for position, name in enumerate(mine[candidates[0]])}
        matches.append(_GroupMatch(candidates[0], [where[name] for name in group]))
    if len(matches) == len(saved):
        return _against_others(node, optimizer, matches), matches
    is_nameless = _is_nameless(saved) or _is_nameless(mine)
    if is_nameless and [len(g) for g in saved] == [len(g) for g in mine]:
        places = [_GroupMatch(index, range(len(group))) for index, group in enumerate(saved)]
        return _against_others(node, optimizer, places), places
    return _unlike(saved, mine), []


def _against_others(
    node: Mapping[str, Any], optimizer: Optimizer, matches: Sequence[_GroupMatch]
) -> str | None:
    """Returns what stands against the keys beside ``state`` and ``param_groups``, or None."""
    keys = ", ".join(sorted(map(str, node.get("others") or {})))
    if not keys:
        return None
    if not has_own_pair(optimizer):
        return (
            f"its state dict has {keys}, which only a load_state_dict of its own takes; pass an "
            "optimizer of the class that was saved"
        )
    is_moved = any(
        match.group != index or list(match.positions) != list(range(len(match.positions)))
        for index, match in enumerate(matches)
    )
    if is_moved:  # its own keys may mean parameters by their numbers
        return (
            f"its state dict has {keys}, of parameters in another order than here; give them in "
            "the order in which they were saved"
        )
    return None


def _same(left: Sequence[str], right: Sequence[str]) -> bool:
    return len(left) == len(right) and set(left) == set(right)


def _unlike(saved: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> str:
    ours = {name for group in mine for name in group}
    theirs = {name for group in saved for name in group}
    if ours == theirs:
        return f"the saved groups have the same parameters, shared out in another way; {_AS_SAVED}"
    only = [
        f"{what} {', '.join(sorted(names)[:8])}"
        for what, names in (("only saved:", theirs - ours), ("only here:", ours - theirs))
        if names
    ]
    return f"other parameters than were saved ({'; '.join(only)}); {_AS_SAVED}"


def _names_in(
    optimizer: Optimizer,
    names: Mapping[Tensor, ParameterName],
    saved: Sequence[Sequence[str]],
) -> list[list[str]]:
    """Names the parameters as a save did, in which a name may have its module's path in front or
    not: that depended on what else was saved.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    wanted = {name for group in saved for name in group}
    short = Counter(names[p].name for p in parameters if p in names)
    found: dict[Tensor, str] = {}
    for index, p in enumerate(parameters):
        name = names.get(p)
        if name is None:
            found[p] = str(index)
        elif name.full in wanted or short[name.name] > 1:
            found[p] = name.full
        else:
            found[p] = name.name
    if len(set(found.values())) < len(found):
        found = {p: str(index) for index, p in enumerate(parameters)}
    return [[found[p] for p in group["params"]] for group in optimizer.param_groups]
