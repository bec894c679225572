"""Whether an optimizer may be stepped in parts.

The classes of ``torch.optim`` are known; any other, a subclass of theirs too, is tried out on small
host tensors: all parameters together against one at a time, bitwise. It is never cut, because what
a step does with a small tensor says nothing about a large one: second moments are factored,
momentum is quantised in blocks, from some size on. Invariant: neither the user's optimizer nor
torch's random state is changed.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._errors import RefusedError, ResidencyError
from residency._optim._attributes import copied, is_equal, on_host
from residency._optim._shadow import (
    Commit,
    is_torchs_own,
    quiet_global_hooks,
    shadow_step,
    stand_in,
)
from residency._optim._sharding import local_of

# Cuts fall on whole vectors: CPU kernels round a bf16 tail differently, measured with SGD, RMSprop
# and ASGD.
CUT = 64
_NUM_STEPS = 3
# The last is above where classes commonly begin to treat a tensor as a large one (4,096 elements,
# 128 rows and columns).
_LENGTHS = (2 * CUT, 3 * CUT, 320 * CUT)
_ROW = {2 * CUT: 8, 3 * CUT: 8, 320 * CUT: 160}


class Separability(enum.Enum):
    """Says into what parts a step can be cut without a change of any bit."""

    ELEMENT_WISE = "element-wise"
    PER_PARAMETER = "per parameter"


_optim = torch.optim
_ELEMENT_WISE = {
    _optim.SGD, _optim.Adam, _optim.AdamW, _optim.Adamax, _optim.NAdam, _optim.RAdam,
    _optim.Adadelta, _optim.Adagrad, _optim.RMSprop, _optim.Rprop, _optim.ASGD,
}  # fmt: skip
_PER_PARAMETER = {_optim.Adafactor, *([_optim.Muon] if hasattr(_optim, "Muon") else [])}
_REFUSED = {
    _optim.LBFGS: "it steps all parameters as one vector",
    _optim.SparseAdam: "it takes sparse gradients",
}


def separability(
    optimizer: Optimizer, base: type[Optimizer], groups: Sequence[dict[str, Any]]
) -> Separability:
    """Finds out how an optimizer may be cut.

    Args:
        optimizer: Is not changed.
        base: The class that it has, or had before it was offloaded.
        groups: Its groups, or those that it is to get.

    Raises:
        RefusedError: Its step couples the parameters, or cannot be tried out.
    """
    for refused, reason in _REFUSED.items():
        if issubclass(base, refused):
            raise RefusedError(
                f"{base.__name__} cannot be offloaded: {reason}. Keep its state on the device."
            )
    if base in _ELEMENT_WISE:
        return Separability.ELEMENT_WISE
    if base not in _PER_PARAMETER:
        _try_out(optimizer, base, groups)
    return Separability.PER_PARAMETER


def _try_out(optimizer: Optimizer, base: type[Optimizer], groups: Sequence[dict[str, Any]]) -> None:
    random_state = torch.get_rng_state()
    try:
        with quiet_global_hooks():
            together = _Trial(optimizer, base, groups)
            together.run([[*together.parameters, *together.idle]])
            if together.has_moved_idle():
                raise RefusedError(
                    f"{base.__name__} cannot be offloaded: its step changes parameters that have "
                    "no gradient. Keep its state on the device."
                )
            apart = _Trial(optimizer, base, groups)
            apart.run([[p] for p in apart.parameters])
            if not together.is_equal(apart):
                raise RefusedError(
                    f"{base.__name__} cannot be offloaded: its step couples the parameters "
                    "(stepped one at a time they end at other values than together). Keep its "
                    "state on the device."
                )
    except RefusedError:
        raise
    except ResidencyError as error:
        raise RefusedError(f"{base.__name__} cannot be offloaded: {error}") from error
    except Exception as error:
        raise RefusedError(
            f"{base.__name__} cannot be offloaded: its step failed on small host tensors "
            f"({type(error).__name__}: {error}), so whether it can be cut is unknown."
        ) from error
    finally:
        torch.set_rng_state(random_state)


class _Trial:
    """Steps small stand-ins for an optimizer's parameters and remembers where they end."""

    def __init__(
        self, optimizer: Optimizer, base: type[Optimizer], groups: Sequence[dict[str, Any]]
    ) -> None:
        self._base = base
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
        made = torch.nn.Parameter(torch.randn(shape, generator=generator).to(parameter.dtype))
        values = dict(dict.get(optimizer.state, parameter) or {})
        if values:
            self._state[made] = {k: _shrink(k, v, parameter, shape) for k, v in values.items()}
        return made

    def run(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Takes a few steps, each in the given parts, with gradients of very different sizes."""
        for step in range(_NUM_STEPS):
            generator = torch.Generator().manual_seed(1000 + step)
            for parameter in self.parameters:
                gradient = torch.randn(parameter.shape, generator=generator) * 10.0**step
                parameter.grad = gradient.to(parameter.dtype)
            commit = Commit(self._model)
            for index, part in enumerate(parts):
                members = set(part)
                groups = [
                    {**g, "params": [p for p in g["params"] if p in members]} for g in self._groups
                ]
                state = {p: self._state[p] for p in part if p in self._state}
                is_last = index == len(parts) - 1
                outcome = shadow_step(self._model, self._base, groups, state, not is_last)
                if not outcome.state.keys() <= members:
                    raise RefusedError(
                        f"{self._base.__name__} cannot be offloaded: its step keeps state for "
                        "other parameters than those that it is given. Keep its state on the "
                        "device."
                    )
                self._state.update(outcome.state)
                commit.add(outcome)
            commit.write()

    def has_moved_idle(self) -> bool:
        """Says whether a parameter without a gradient was changed."""
        return any(bool((idle != 1).any()) or self._state.get(idle) for idle in self.idle)

    def is_equal(self, other: _Trial) -> bool:
        """Says whether another trial ended at the same bits, parameters and state."""
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


def _shrink(key: str, value: Any, parameter: Tensor, shape: tuple[int, ...]) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.dim() == 0:
        return local_of(value).detach().cpu().clone()
    if value.shape != parameter.shape:
        raise RefusedError(
            f"the state {key!r} has shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(parameter.shape)}; only states of the parameter's shape and scalars can be "
            "tried out. Offload the optimizer before its first step."
        )
    count = torch.Size(shape).numel()
    sample = local_of(value).detach().flatten()[:count].cpu()
    if not sample.numel():  # an empty shard
        return torch.zeros(shape, dtype=value.dtype)
    return sample.repeat(-(-count // max(sample.numel(), 1)))[:count].view(shape).clone()


def _is_same(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach().flatten(), b.detach().flatten()
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
