"""Whether an optimizer may be stepped in parts.

The classes of ``torch.optim`` are known; any other, a subclass of theirs too, is tried out on small
host tensors: all parameters together against one at a time, bitwise. It is never cut, because what
a step does with a small tensor says nothing about a large one: second moments are factored,
momentum is quantised in blocks, from some size on. Invariant, which ``tests/optim/test_foreign.py``
tries to break: neither the user's optimizer nor torch's random state is changed.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import local_of
from residency._errors import RefusedError, ResidencyError
from residency._modes import callers_modes_off
from residency._optim._trial._copies import copied, is_equal, on_host
from residency._optim._trial._generators import Draws, generators_kept, others_kept
from residency._optim._trial._partial_step import (
    Commit,
    is_torchs_own,
    refuse_shared_bytes,
    shadow_step,
    stand_in,
)
from residency._optim._trial._step_call import NO_ARGUMENTS, StepCall
from residency._storages import sharing
from residency._transfer import ELEMENT_WISE

# Cuts fall on whole vectors: CPU kernels round a bf16 tail differently, measured with SGD, RMSprop
# and ASGD.
CUT = 64
_NUM_STEPS = 3  # the first makes the state, the second reads it, the third reads what it wrote
# More than the five after which some classes do more. [Note: the second trial]
_NUM_PRECISE_STEPS = 8
# The last is above where classes commonly begin to treat a tensor as a large one (4,096 elements,
# 128 rows and columns).
_LENGTHS = (2 * CUT, 3 * CUT, 320 * CUT)
_ROW = {2 * CUT: 8, 3 * CUT: 8, 320 * CUT: 160}


class Separability(enum.Enum):
    """The parts into which a step can be cut without a change of any bit."""

    ELEMENT_WISE = "element-wise"
    PER_PARAMETER = "per parameter"


_optim = torch.optim
_PER_PARAMETER = {_optim.Adafactor, *([_optim.Muon] if hasattr(_optim, "Muon") else [])}
_REFUSED = {
    _optim.LBFGS: "it steps all parameters as one vector",
    _optim.SparseAdam: "it takes sparse gradients",
}


def separability(
    optimizer: Optimizer,
    base: type[Optimizer],
    groups: Sequence[dict[str, Any]],
    call: StepCall = NO_ARGUMENTS,
) -> Separability:
    """Finds out how an optimizer may be cut.

    Args:
        optimizer: Is not changed.
        base: The class that it has, or had before it was offloaded.
        groups: Its groups, or those that it is to get.
        call: What its step is called with.

    Raises:
        RefusedError: Its step couples the parameters, or cannot be tried out.
    """
    for refused, reason in _REFUSED.items():
        if issubclass(base, refused):
            raise RefusedError(
                f"{base.__name__} cannot be offloaded: {reason}. Keep its state on the device."
            )
    if base in ELEMENT_WISE:
        return Separability.ELEMENT_WISE
    if base not in _PER_PARAMETER:
        _try_out(optimizer, base, groups, call)
    return Separability.PER_PARAMETER


def _try_out(
    optimizer: Optimizer,
    base: type[Optimizer],
    groups: Sequence[dict[str, object]],
    call: StepCall,
) -> None:
    try:
        # A step is taken with gradients on, as callers take it.
        with callers_modes_off(), torch.enable_grad(), others_kept(), generators_kept() as draws:
            refuse_shared_bytes(optimizer, base)
            _refuse_what_is_paged(optimizer, base)
            _compare(optimizer, base, groups, call, _NUM_STEPS, None, draws)
            # [Note: the second trial] In float32 a global factor may round to 1 in the first steps,
            # measured with pytorch_optimizer's Ranger21, or come only every fifth step.
            with contextlib.suppress(_FailedError):  # many classes compute in float32 only
                _compare(optimizer, base, groups, call, _NUM_PRECISE_STEPS, torch.float64, draws)
    except RefusedError:
        raise
    except _FailedError as error:
        cause = error.__cause__
        raise RefusedError(
            f"{base.__name__} cannot be offloaded: its step failed on small host tensors "
            f"({type(cause).__name__}: {cause}), so whether it can be cut is unknown. "
            "Keep its state on the device."
        ) from cause


class _FailedError(Exception):
    """The error of a trial, raised from what its step raised."""


def _compare(
    optimizer: Optimizer,
    base: type[Optimizer],
    groups: Sequence[dict[str, object]],
    call: StepCall,
    num_steps: int,
    dtype: torch.dtype | None,
    draws: Draws,
) -> None:
    name = base.__name__
    try:
        together = _Trial(optimizer, base, groups, call, dtype)
        together.run([[*together.parameters, *together.idle]], num_steps)
        if draws.has_drawn:
            raise RefusedError(
                f"{name} cannot be offloaded: its step draws random numbers, in parts in another "
                "order. Keep its state on the device."
            )
        if together.has_moved_idle():
            raise RefusedError(
                f"{name} cannot be offloaded: its step changes parameters that have no gradient. "
                "Keep its state on the device."
            )
        apart = _Trial(optimizer, base, groups, call, dtype)
        _run_apart(apart, name, num_steps)
        if not together.is_equal(apart) and together.shares_states():
            raise RefusedError(
                f"{name} cannot be offloaded: its step keeps one buffer under two keys, or views "
                "of one buffer, and each state moves by itself (the ends differ). Keep its state "
                "on the device, or keep a copy under each key."
            )
        if not together.is_equal(apart):
            raise RefusedError(
                f"{name} cannot be offloaded: its step couples the parameters (stepped one at a "
                "time they end at other values than together). Keep its state on the device."
            )
    except RefusedError:
        raise
    except ResidencyError as error:
        raise RefusedError(f"{name} cannot be offloaded: {error}") from error
    except Exception as error:
        raise _FailedError from error


def _run_apart(trial: _Trial, name: str, num_steps: int) -> None:
    try:
        trial.run([[p] for p in trial.parameters], num_steps)
    except ResidencyError:
        raise
    except Exception as error:  # with all parameters there was none
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise RefusedError(
            f"{name} cannot be offloaded: its step takes all parameters at once and fails with one "
            f"of them ({type(error).__name__}: {error}, in {where.name}), so it couples the "
            "parameters. Keep its state on the device."
        ) from error


def _refuse_what_is_paged(optimizer: Optimizer, base: type[Optimizer]) -> None:
    """Refuses what the classes of bitsandbytes do that no trial on the host shows."""
    attributes = vars(optimizer)
    if attributes.get("is_paged") is True:
        raise RefusedError(
            f"{base.__name__} cannot be offloaded: it is paged, so the driver moves its state to "
            "the host already. Use the class that is not paged, or do not offload it."
        )
    overrides = getattr(attributes.get("mng"), "__dict__", {})
    if overrides.get("index2config") or overrides.get("module_weight_config_triple"):
        raise RefusedError(
            f"{base.__name__} cannot be offloaded: its GlobalOptimManager overrides settings by a "
            "parameter's place in its group, which is another in a part of a step. Call "
            "override_config without register_parameters, or put them into groups."
        )


class _Trial:
    """A trial with small stand-ins for an optimizer's parameters; it remembers where they end."""

    def __init__(
        self,
        optimizer: Optimizer,
        base: type[Optimizer],
        groups: Sequence[dict[str, Any]],
        call: StepCall,
        dtype: torch.dtype | None,
    ) -> None:
        self._base = base
        self._num_evaluations = 0
        self._call = call.on_trial(self._count_evaluation)
        self._dtype = dtype
        self._groups: list[dict[str, Any]] = []
        self._state: dict[Tensor, dict[str, Any]] = {}
        self.parameters: list[Tensor] = []
        self.idle: list[Tensor] = []
        known: dict[int, Tensor] = {}
        for group in groups:
            small: list[Tensor] = []
            for index, parameter in enumerate(_kinds(group["params"])):
                made = self._stand_in(optimizer, parameter, index)
                known.setdefault(id(parameter), made)
                small.append(made)
            self.parameters += small
            # A parameter without a gradient must be left alone, because none of its state will be
            # there.
            idle = torch.nn.Parameter(torch.ones(_small_shape(2, 0)))
            self.idle.append(idle)
            self._groups.append({**host_group(group, base), "params": [*small, idle]})
        # Parameters that an attribute names and no stand-in represents have no gradient either.
        self._model = stand_in(
            optimizer, base, parameter_of=lambda p: known.get(id(p), self.idle[0])
        )
        self._model.param_groups = self._groups

    def _stand_in(self, optimizer: Optimizer, parameter: Tensor, index: int) -> Tensor:
        shape = _small_shape(parameter.dim(), index)
        generator = torch.Generator().manual_seed(index)
        dtype = self._dtype or parameter.dtype
        made = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        values = dict(dict.get(optimizer.state, parameter) or {})
        _refuse_subclasses(self._base, values)
        # One that has factors or blocks has no sample of a small tensor's; its step makes them.
        if values and all(v.shape == parameter.shape for v in values.values() if _moves(v)):
            self._state[made] = {
                k: self._cast(_shrink(v, shape)) if isinstance(v, Tensor) else copy.deepcopy(v)
                for k, v in values.items()
            }
        return made

    def _cast(self, value: Any) -> Any:
        is_cast = self._dtype is not None and isinstance(value, Tensor) and value.dim() > 0
        return value.to(self._dtype) if is_cast and value.is_floating_point() else value

    def run(self, parts: Sequence[Sequence[Tensor]], num_steps: int) -> None:
        """Takes a few steps, each in the given parts, with gradients of very different sizes."""
        is_apart = len(parts) > 1
        for step in range(num_steps):
            generator = torch.Generator().manual_seed(1000 + step)
            for parameter in self.parameters:
                gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3)
                parameter.grad = gradient.to(parameter.dtype)
            commit = Commit(self._model, advice="Keep its state on the device.")
            for index, part in enumerate(parts):
                members = set(part)
                groups = [
                    {**g, "params": [p for p in g["params"] if p in members]} for g in self._groups
                ]
                state = {p: self._state[p] for p in part if p in self._state}
                lent = [v for values in state.values() for v in values.values() if _moves(v)]
                is_last = index == len(parts) - 1
                self._num_evaluations = 0
                outcome = shadow_step(
                    self._model, self._base, groups, state, not is_last, self._call
                )
                if not outcome.state.keys() <= members:
                    raise RefusedError(
                        f"{self._base.__name__} cannot be offloaded: its step keeps state for "
                        "other parameters than those that it is given. Keep its state on the "
                        "device."
                    )
                for values in outcome.state.values():
                    _refuse_subclasses(self._base, values)
                self._state.update(_sent_home(outcome.state, lent) if is_apart else outcome.state)
                commit.add(outcome)
            commit.write()

    def _count_evaluation(self) -> None:
        self._num_evaluations += 1
        if self._num_evaluations > 1:
            raise RefusedError(
                f"{self._base.__name__} cannot be offloaded: its step evaluates its closure more "
                "than once, between changes of all parameters. Keep its state on the device."
            )

    def shares_states(self) -> bool:
        """Returns whether a buffer is the state of two keys or parameters."""
        states = [v for values in self._state.values() for v in values.values() if _moves(v)]
        return bool(sharing(states))

    def has_moved_idle(self) -> bool:
        """Returns whether a parameter without a gradient was changed."""
        return any(bool((idle != 1).any()) or self._state.get(idle) for idle in self.idle)

    def is_equal(self, other: _Trial) -> bool:
        """Returns whether another trial ended at the same bits, parameters and state."""
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if not _is_same(mine, theirs):
                return False
            ours, others = self._state.get(mine, {}), other._state.get(theirs, {})
            if ours.keys() != others.keys():
                return False
            for key, value in ours.items():
                if isinstance(value, Tensor) and isinstance(others[key], Tensor):
                    if not _is_same(value, others[key]):
                        return False
                elif not is_equal(value, others[key]):
                    return False
        return True


def _moves(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0


def _sent_home(
    states: Mapping[Tensor, dict[str, object]], lent: Sequence[Tensor]
) -> dict[Tensor, dict[str, object]]:
    """Returns what is left of states when each was copied home, and others have the slots since."""
    home = {
        parameter: {k: v.clone() if _moves(v) else v for k, v in values.items()}
        for parameter, values in states.items()
    }
    for slot in lent:
        if slot.is_floating_point() and not slot.is_inference():
            slot.fill_(float("nan"))
    return home


def host_group(group: dict[str, Any], base: type[Optimizer]) -> dict[str, Any]:
    """Returns copies of a group's values, as they are for parameters on the host."""
    host = {k: v for k, v in group.items() if k != "params"}
    if is_torchs_own(base):  # no step of theirs changes a value in place
        host = {k: on_host(v) if isinstance(v, Tensor) else v for k, v in host.items()}
    else:
        host = copied(host, owner=base.__name__, instead={}, tensor_of=on_host)
    return {**host, **({"fused": None} if "fused" in group else {})}


def _kinds(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns one parameter of each kind, once for each length that stand-ins have."""
    found: dict[tuple[torch.dtype, int], Tensor] = {}
    for parameter in parameters:
        found.setdefault((parameter.dtype, parameter.dim()), parameter)
    return [parameter for parameter in found.values() for _ in _LENGTHS]


def _small_shape(num_dims: int, index: int) -> tuple[int, ...]:
    if num_dims == 0:
        return ()
    length = _LENGTHS[index % len(_LENGTHS)]
    row = _ROW[length]
    return (length,) if num_dims == 1 else (*[1] * (num_dims - 2), length // row, row)


def _refuse_subclasses(base: type[Optimizer], values: Mapping[str, object]) -> None:
    for key, value in values.items():
        if isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
            raise RefusedError(
                f"{base.__name__} cannot be offloaded: its state {key!r} is a "
                f"{type(value).__name__}, a subclass of torch.Tensor, and only plain tensors can "
                "be moved. Keep its state on the device."
            )


def _shrink(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    if value.dim() == 0:
        return local_of(value).detach().cpu().clone()
    count = torch.Size(shape).numel()
    sample = local_of(value).detach().flatten()[:count].cpu()
    if not sample.numel():  # an empty shard
        return torch.zeros(shape, dtype=value.dtype)
    return sample.repeat(-(-count // max(sample.numel(), 1)))[:count].view(shape).clone()


def _is_same(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach().flatten(), b.detach().flatten()
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
