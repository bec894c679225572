"""Runs an optimizer's own step on a part of its parameters, without touching the optimizer.

A shadow is an instance of the same class with the same attributes, but its own ``state`` and
``param_groups``, restricted to the part; its hooks are empty. Invariant, which
``tests/optim/test_foreign.py`` tries to break: every part sees the attributes and group values from
before the step, and what a step changes there, in place or not, is changed once, by the last part,
and only when all parts agree.

[Note: what parts see] All parts but the last get copies; the last gets the optimizer's own objects,
so that one plain step's changes happen to them, with their identity kept. The classes of
``torch.optim`` replace attributes and change none in place, so their parts share. Tensors are
always shared, host scalars aside: a step that changes one in place is found by its version.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import local_of, locals_of, write_count
from residency._errors import RefusedError, ResidencyError
from residency._optim._trial._borrowed import borrowed
from residency._optim._trial._copies import copied, is_equal, on_host, reachable
from residency._optim._trial._step_call import StepCall
from residency._registries import WeakRegistry
from residency._storages import sharing

PRIVATE = "_residency"
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OWN = frozenset({"step", "state", "param_groups", PRIVATE, *_HOOKS})
# What classes that exchange parameters with their state do so in.
EXCHANGES = ("train", "eval")
_MISSING = object()
MIDWAY = "Some parameters have been stepped: reload a checkpoint, and do not offload it."


_shadows: WeakRegistry[Optimizer] = WeakRegistry()


class _UnlessShadow:
    """A hook of all optimizers, in its own place in torch's registry, that leaves shadows out: a
    subclass' ``super().step()`` would run it for each part.

    It asks the optimizer, not a flag: a flag that an interrupt leaves set would silence the hook of
    every later step, by which a step waits for the copies of a save.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, optimizer: Optimizer, *arguments: object, **settings: object) -> object:
        if optimizer in _shadows:
            return None
        return self._hook(optimizer, *arguments, **settings)


def _leave_out_of_global_hooks(shadow: Optimizer) -> None:
    _shadows.add(shadow)
    registries: tuple[Any, Any] = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    for hooks in registries:
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _UnlessShadow):
                hooks[key] = _UnlessShadow(hook)


def is_torchs_own(base: type[Optimizer]) -> bool:
    """Returns whether a class is one of ``torch.optim`` itself, whose steps are known."""
    return vars(torch.optim).get(base.__name__) is base


@dataclass(slots=True)
class Outcome:
    """The state that one shadow step left behind, with all attributes, group values, arguments."""

    state: Mapping[Tensor, dict[str, Any]]
    group_values: list[dict[str, Any]]
    attributes: dict[str, Any]
    arguments: Mapping[str, object]


class Shadow:
    """An optimizer of the same class for some of the parameters, and what its step left behind.

    Attributes:
        optimizer: Has the attributes and group values of the one that it stands for.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base: type[Optimizer],
        groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, dict[str, Any]],
        is_copied: bool,
        call: StepCall,
    ) -> None:
        """Makes a shadow; for the arguments see ``shadow_step``."""
        shadow = object.__new__(base)
        lent = {k: v for k, v in optimizer.__dict__.items() if k not in _OWN}
        values = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self._call, self._arguments = call, call.values
        if is_copied:
            instead: dict[int, object] = {id(optimizer): shadow}
            # No part of a step may change hooks, which hold whatever users put there.
            hooks = {k: v for k, v in lent.items() if k.startswith("_optimizer_")}
            others = {k: v for k, v in lent.items() if k not in hooks}
            lent = {**hooks, **copied(others, owner=base.__name__, instead=instead)}
            values = [copied(each, owner=base.__name__, instead=instead) for each in values]
            self._arguments = copied(call.values, owner=base.__name__, instead=instead)
        shadow.__dict__.update(lent)
        for name, value in lent.items():
            if isinstance(value, types.MethodType) and value.__self__ is optimizer:
                shadow.__dict__[name] = types.MethodType(value.__func__, shadow)
        shadow.__dict__.update({name: OrderedDict() for name in _HOOKS})
        shadow.state = state if isinstance(state, defaultdict) else defaultdict(dict, state)
        shadow.param_groups = [
            {**each, "params": list(group["params"])}
            for each, group in zip(values, groups, strict=True)
        ]
        self.optimizer = shadow
        _leave_out_of_global_hooks(shadow)
        self._base = base
        shared = (lent, *values, call.values)
        self._is_torchs = is_torchs_own(base)
        self._watch = () if self._is_torchs else _watched(optimizer, shared)

    def step(self) -> Any:
        """Runs the class' own step."""
        return self._call.run(self._base, self.optimizer, self._arguments)

    def outcome(self) -> Outcome:
        """Returns what a step that ran left behind.

        Raises:
            ResidencyError: The step changed a shared tensor in place, or left a state that is a
                gradient, or whatever else ``borrowed`` finds.
        """
        for name, tensor, version in self._watch:
            if write_count(tensor) != version:
                raise ResidencyError(
                    f"{self._base.__name__}.step changed the tensor in {name!r} in place, which "
                    "would happen once for each part of the parameters. Replace it with a new "
                    "tensor in the step, or keep it in the state of a parameter."
                )
        groups = self.optimizer.param_groups
        found = None
        if not self._is_torchs:
            found = borrowed(groups, self.optimizer.state, self._arguments)
        if found is not None:
            raise ResidencyError(
                f"{self._base.__name__}.step left a state that is something else, too: {found}. A "
                "state moves by itself, so keep a copy in it (`clone()`)."
            )
        after = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        attributes = {k: v for k, v in self.optimizer.__dict__.items() if k not in _OWN}
        return Outcome(self.optimizer.state, after, attributes, self._arguments)


def shadow_step(
    optimizer: Optimizer,
    base: type[Optimizer],
    groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    is_copied: bool,
    call: StepCall,
) -> Outcome:
    """Steps some parameters with the optimizer's own code, to try it out.

    Args:
        optimizer: Lends its attributes.
        base: The class whose step runs.
        groups: All groups, each with the parameters of this part only.
        state: The state of those parameters, on the device that the step expects; a defaultdict
            is used itself, so that what a failing step left there can be read.
        is_copied: Whether the step works on copies of the attributes and group values.
        call: What the step is called with.

    Returns:
        The state, the attributes and the group values after the step.

    Raises:
        RefusedError: An attribute cannot be copied; nothing was stepped.
        ResidencyError: The step changed a shared tensor in place.
    """
    shadow = Shadow(optimizer, base, groups, state, is_copied, call)
    if all(callable(getattr(base, name, None)) for name in EXCHANGES):
        shadow.optimizer.train()  # type: ignore[attr-defined]  # as callers do before a step
    shadow.step()
    return shadow.outcome()


def _watched(
    optimizer: Optimizer, shared: Sequence[Mapping[str, object]]
) -> list[tuple[str, Tensor, int]]:
    """Lists the shared tensors with their versions, parameters aside: a step is to change those."""
    return [
        (name, found, write_count(found))
        for names in shared
        for name, found in tensors_beside(optimizer, names)
        if not found.is_inference() and not (found.is_cpu and found.numel() == 1)
    ]


def tensors_beside(
    optimizer: Optimizer, values: Mapping[str, object]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that attributes or group values refer to, by name; not the parameters, nor
    other tensors over just the bytes of one (``p.data``).
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p) for p in parameters}
    spans = {(local.data_ptr(), local.numel()) for local in locals_of(parameters)}
    for name, value in values.items():
        for found in reachable(value):
            if not isinstance(found, Tensor) or id(found) in known:
                continue
            if found.layout is torch.strided and not found.is_meta and found.numel():
                local = local_of(found)
                if (local.data_ptr(), local.numel()) in spans:
                    continue
            yield name, found


def refuse_shared_bytes(optimizer: Optimizer, base: type[Optimizer]) -> None:
    """Checks that no attribute and no group value reaches parameters through their bytes.

    Raises:
        RefusedError: One does: a part of a step would change what the others are to see.
    """
    parameters = locals_of([p for group in optimizer.param_groups for p in group["params"]])
    attributes = {k: v for k, v in optimizer.__dict__.items() if k not in _OWN}
    values = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for names in (attributes, *values):
        for name, found in tensors_beside(optimizer, names):
            if found.layout is not torch.strided:
                continue
            for group in sharing([*parameters, local_of(found)]):
                if group[-1] == len(parameters):
                    raise RefusedError(
                        f"{base.__name__} cannot be offloaded: its {name!r} has a tensor of shape "
                        f"{tuple(found.shape)} over the bytes of {len(group) - 1} of its "
                        "parameters, so the effect of a part of a step on it reaches other parts. "
                        "Nothing was changed; keep its state on the device."
                    )


def stand_in(
    optimizer: Optimizer, base: type[Optimizer], *, parameter_of: Callable[[Tensor], Tensor]
) -> Optimizer:
    """Returns an instance with copies of the attributes on the host, to try steps out on.

    It has no parameters and no state. Tensors are copied too, so that no step reaches the user's.

    Args:
        optimizer: Is not changed.
        base: Its class.
        parameter_of: What stands for a parameter that an attribute refers to.

    Raises:
        RefusedError: An attribute cannot be copied, or is an optimizer itself.
    """
    made = object.__new__(base)
    instead: dict[int, object] = {id(optimizer): made}
    for group in optimizer.param_groups:
        instead.update((id(p), parameter_of(p)) for p in group["params"])
    attributes: dict[str, object] = {}
    for name, value in optimizer.__dict__.items():
        if name in _OWN:
            continue
        if name.startswith("_optimizer_"):
            attributes[name] = OrderedDict()
            continue
        for found in reachable(value):
            if isinstance(found, Optimizer) and found is not optimizer:
                raise RefusedError(
                    f"{base.__name__} cannot be offloaded: its {name!r} holds another optimizer, a "
                    f"{type(found).__name__}, which steps parameters of its own choice. Offload "
                    "that one instead."
                )
        attributes[name] = value
    made.__dict__.update(
        copied(attributes, owner=base.__name__, instead=instead, tensor_of=on_host)
    )
    made.__dict__.update({name: OrderedDict() for name in _HOOKS})
    made.state, made.param_groups = defaultdict(dict), []
    return made


class Commit:
    """The values that the parts of a step left outside of state; those of the last one go to the
    optimizer, once.
    """

    def __init__(self, optimizer: Optimizer, advice: str = MIDWAY) -> None:
        self._optimizer = optimizer
        self._advice = advice
        self._first: Outcome | None = None
        self._last: Outcome | None = None

    def add(self, outcome: Outcome) -> None:
        """Takes a part's outcome; the last part's was not ``is_copied``.

        Raises:
            ResidencyError: It differs from the first part's, so the step couples its parameters.
        """
        self._last = replace(outcome, state={})
        if self._first is None:
            self._first = self._last
            return
        pairs = [
            ("attribute", self._first.attributes, outcome.attributes),
            ("argument", self._first.arguments, outcome.arguments),
            *(
                (f"value of param_groups[{i}]", a, b)
                for i, (a, b) in enumerate(
                    zip(self._first.group_values, outcome.group_values, strict=True)
                )
            ),
        ]
        for what, first, other in pairs:
            for name in first.keys() | other.keys():
                if not is_equal(first.get(name, _MISSING), other.get(name, _MISSING)):
                    raise ResidencyError(
                        f"{type(self._optimizer).__name__}.step left the {what} {name!r} at "
                        f"{_shown(first.get(name))} for one part of the parameters and at "
                        f"{_shown(other.get(name))} for another, so it cannot be stepped in "
                        f"parts. {self._advice}"
                    )

    def write(self) -> None:
        """Writes the agreed values to the optimizer."""
        if self._last is None:
            return
        for group, values in zip(
            self._optimizer.param_groups, self._last.group_values, strict=True
        ):
            _replace(group, values, but=("params",))
        attributes = {
            name: types.MethodType(value.__func__, self._optimizer)
            if isinstance(value, types.MethodType) and isinstance(value.__self__, Optimizer)
            else value
            for name, value in self._last.attributes.items()
        }
        _replace(self._optimizer.__dict__, attributes, but=_OWN)


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _replace(
    target: dict[str, object], values: Mapping[str, object], *, but: Collection[str]
) -> None:
    for name in [n for n in target if n not in values and n not in but]:
        del target[name]
    for name, value in values.items():
        before = target.get(name, _MISSING)
        is_method = isinstance(value, types.MethodType) and before == value
        if before is not value and not is_method:
            target[name] = value
