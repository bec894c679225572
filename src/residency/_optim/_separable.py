"""Whether an optimizer may be stepped in parts, and how large the state is that it will make.

The classes of ``torch.optim`` are known; any other is tried out on tiny host tensors: all
parameters together against one at a time and against cuts of each, bitwise. Invariant: neither the
user's optimizer nor torch's random state is changed.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._errors import RefusedError
from residency._optim._shadow import Commit, quiet_global_hooks, shadow_step
from residency._transfer import align_up

# Cuts fall on whole vectors: CPU kernels round a bf16 tail differently, measured with SGD, RMSprop
# and ASGD.
CUT = 64
_NUM_STEPS = 3


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


def separability(optimizer: Optimizer) -> Separability:
    """Finds out how an optimizer may be cut.

    Raises:
        RefusedError: Its step couples the parameters, or cannot be tried out.
    """
    base = type(optimizer)
    for refused, reason in _REFUSED.items():
        if issubclass(base, refused):
            raise RefusedError(
                f"{base.__name__} cannot be offloaded: {reason}. Keep its state on the device."
            )
    if base in _ELEMENT_WISE:
        return Separability.ELEMENT_WISE
    if base in _PER_PARAMETER:
        return Separability.PER_PARAMETER
    return _try_out(optimizer, base)


def _try_out(optimizer: Optimizer, base: type[Optimizer]) -> Separability:
    random_state = torch.get_rng_state()
    try:
        with quiet_global_hooks():
            together = _Trial(optimizer, base)
            together.run([[*together.parameters, *together.idle]])
            if together.has_moved_idle():
                raise RefusedError(
                    f"{base.__name__} cannot be offloaded: its step changes parameters that have "
                    "no gradient. Keep its state on the device."
                )
            apart = _Trial(optimizer, base)
            apart.run([[p] for p in apart.parameters])
            if not together.is_equal(apart):
                raise RefusedError(
                    f"{base.__name__} cannot be offloaded: its step couples the parameters "
                    "(stepped one at a time they end at other values than together). Keep its "
                    "state on the device."
                )
            return _try_cuts(optimizer, base, together)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(
            f"{base.__name__} cannot be offloaded: its step failed on small host tensors "
            f"({type(error).__name__}: {error}), so whether it can be cut is unknown."
        ) from error
    finally:
        torch.set_rng_state(random_state)


def _try_cuts(optimizer: Optimizer, base: type[Optimizer], whole: _Trial) -> Separability:
    try:
        cut = _Trial(optimizer, base, is_cut=True)
        cut.run([[p] for p in cut.parameters])
    except Exception:  # a matrix optimizer may refuse a cut outright, which answers the question
        return Separability.PER_PARAMETER
    return Separability.ELEMENT_WISE if whole.is_equal(cut) else Separability.PER_PARAMETER


class _Trial:
    """Steps tiny stand-ins for an optimizer's parameters and remembers where they end."""

    def __init__(
        self, optimizer: Optimizer, base: type[Optimizer], *, is_cut: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._base = base
        self._groups: list[dict[str, Any]] = []
        self._pieces: list[list[Tensor]] = []
        self._state: dict[Tensor, dict[str, Any]] = {}
        self.idle: list[Tensor] = []
        for group in optimizer.param_groups:
            tiny: list[Tensor] = []
            for index, parameter in enumerate(_kinds(group["params"])):
                pieces = self._stand_in(parameter, index, is_cut)
                self._pieces.append(pieces)
                tiny += pieces
            # A parameter without a gradient must be left alone, because none of its state will be
            # there.
            idle = torch.nn.Parameter(torch.ones(_tiny_shape(2, 0)))
            self.idle.append(idle)
            self._groups.append({**host_group(group), "params": [*tiny, idle]})
        self.parameters = [p for pieces in self._pieces for p in pieces]

    def _stand_in(self, parameter: Tensor, index: int, is_cut: bool) -> list[Tensor]:
        shape = _tiny_shape(parameter.dim(), index)
        generator = torch.Generator().manual_seed(index)
        value = torch.randn(shape, generator=generator).to(parameter.dtype)
        inner = dict(self._optimizer.state.get(parameter, {}))
        state = {k: _shrink(k, v, parameter, shape) for k, v in inner.items()}
        if not is_cut or value.numel() <= CUT:
            pieces: list[Tensor] = [torch.nn.Parameter(value)]
        else:
            flat = value.flatten()
            pieces = [torch.nn.Parameter(flat[a:b].clone()) for a, b in ((0, CUT), (CUT, None))]
        for piece, (start, stop) in zip(pieces, _bounds(pieces), strict=True):
            if state:
                self._state[piece] = {
                    k: v.flatten()[start:stop].clone()
                    if isinstance(v, Tensor) and v.numel() == value.numel() and len(pieces) > 1
                    else copy.deepcopy(v)
                    for k, v in state.items()
                }
        return pieces

    def run(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Takes a few steps, each in the given parts, with gradients of very different sizes."""
        for step in range(_NUM_STEPS):
            generator = torch.Generator().manual_seed(1000 + step)
            for pieces in self._pieces:
                count = sum(piece.numel() for piece in pieces)
                gradient = torch.randn(count, generator=generator) * 10.0**step
                for piece, (start, stop) in zip(pieces, _bounds(pieces), strict=True):
                    piece.grad = gradient[start:stop].view(piece.shape).to(piece.dtype)
            # Only groups are written, and these are not the user's.
            commit = Commit(_Groups(self._groups))  # type: ignore[arg-type]  # as said above
            for part in parts:
                members = set(part)
                groups = [
                    {**g, "params": [p for p in g["params"] if p in members]} for g in self._groups
                ]
                state = {p: self._state[p] for p in part if p in self._state}
                outcome = shadow_step(self._optimizer, self._base, groups, state)
                self._state.update(outcome.state)
                commit.add(outcome)
            commit.write()

    def has_moved_idle(self) -> bool:
        """Says whether a parameter without a gradient was changed."""
        return any(bool((idle != 1).any()) or self._state.get(idle) for idle in self.idle)

    def is_equal(self, other: _Trial) -> bool:
        """Says whether another trial ended at the same bits, parameters and state."""
        for mine, theirs in zip(self._pieces, other._pieces, strict=True):
            if not _is_same(list(mine), list(theirs)):
                return False
            ours, cut = self._state.get(mine[0], {}), [other._state.get(p, {}) for p in theirs]
            if any(set(each) != set(ours) for each in cut):
                return False
            for key, value in ours.items():
                if not isinstance(value, Tensor):
                    if any(each[key] != value for each in cut):
                        return False
                elif value.dim() == 0 or len(cut) == 1:
                    if not all(_is_same([value], [each[key]]) for each in cut):
                        return False
                elif not _is_same([value], [each[key] for each in cut]):
                    return False
        return True


class _Groups:
    """Stands in for an optimizer whose group values are committed."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups


def host_group(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's values as they are for parameters on the host."""
    values = {k: v.cpu().clone() if isinstance(v, Tensor) else v for k, v in group.items()}
    return {**values, **({"fused": None} if "fused" in group else {})}


def _kinds(parameters: Sequence[Tensor]) -> list[Tensor]:
    found: dict[tuple[torch.dtype, int], Tensor] = {}
    for parameter in parameters:
        found.setdefault((parameter.dtype, parameter.dim()), parameter)
    kinds = list(found.values())
    return kinds if len(kinds) > 2 else kinds * 3


def _tiny_shape(num_dims: int, index: int) -> tuple[int, ...]:
    if num_dims == 0:
        return ()
    length = CUT * (2 + index % 2)
    return (length,) if num_dims == 1 else (*[1] * (num_dims - 2), length // 8, 8)


def _shrink(key: str, value: Any, parameter: Tensor, shape: tuple[int, ...]) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.dim() == 0:
        return value.detach().cpu().clone()
    if value.shape != parameter.shape:
        raise RefusedError(
            f"the state {key!r} has shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(parameter.shape)}; only states of the parameter's shape and scalars can be "
            "tried out. Offload the optimizer before its first step."
        )
    count = torch.Size(shape).numel()
    sample = value.detach().flatten()[:count].cpu()
    return sample.repeat(-(-count // max(sample.numel(), 1)))[:count].view(shape).clone()


def _bounds(pieces: Sequence[Tensor]) -> list[tuple[int, int]]:
    bounds, start = [], 0
    for piece in pieces:
        bounds.append((start, start + piece.numel()))
        start += piece.numel()
    return bounds


def _is_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    a = torch.cat([t.detach().flatten() for t in left])
    b = torch.cat([t.detach().flatten() for t in right])
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@dataclass(frozen=True, slots=True)
class StateSize:
    """Is what a parameter's state will take, estimated from a tiny one.

    Attributes:
        itemsizes: Bytes per element of each state that has as many elements as the parameter, or
            fewer.
        num_scalars: States with one element.
        is_exact: Whether every state is a scalar or has the parameter's shape.
    """

    itemsizes: tuple[int, ...]
    num_scalars: int
    is_exact: bool

    def bytes_for(self, num_elements: int) -> int:
        """Returns the bytes for so many elements, each state rounded up as in a slab."""
        sizes = sum(align_up(num_elements * itemsize) for itemsize in self.itemsizes)
        return sizes + align_up(1) * self.num_scalars


def state_size(
    optimizer: Optimizer, base: type[Optimizer], group: dict[str, Any], parameter: Tensor
) -> StateSize | None:
    """Estimates the state that the first step will make for a parameter.

    Returns:
        None where the step cannot be tried out on the host.
    """
    tiny = torch.nn.Parameter(torch.ones(_tiny_shape(parameter.dim(), 0)).to(parameter.dtype))
    tiny.grad = torch.ones_like(tiny)
    groups = [{**host_group(group), "params": [tiny]}]
    random_state = torch.get_rng_state()
    try:
        with quiet_global_hooks():
            state = shadow_step(optimizer, base, groups, {}).state.get(tiny, {})
    except Exception:  # whatever it is, the first step itself will say it; the size stays unknown
        return None
    finally:
        torch.set_rng_state(random_state)
    tensors = [v for v in state.values() if isinstance(v, Tensor)]
    # The state of a 0-dim parameter cannot be told from a scalar: count both the dear way.
    large = [t for t in tensors if t.dim() > 0]
    return StateSize(
        tuple(t.element_size() for t in large),
        len(tensors) - len(large),
        all(t.shape == tiny.shape for t in large),
    )
