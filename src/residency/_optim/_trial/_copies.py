"""Copies and compares what an optimizer keeps outside of its state: attributes and group values.

A part of a step that changes such a value in place must not change the optimizer's own, so it works
on a copy. Invariant, which ``tests/optim/test_foreign.py`` tries to break: a copy shares its
tensors with the original (a copy of each per part could be gigabytes), except host tensors of one
element, which are numbers in another form; references to the optimizer itself lead to its shadow.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._errors import RefusedError

_ATOMS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.BuiltinFunctionType,
    types.FunctionType,
    types.ModuleType,
    torch.device,
    torch.dtype,
)


def reachable(value: object) -> Iterator[Any]:
    """Yields what a value refers to, itself first, through containers and instances' attributes.

    Does not look into tensors and optimizers.
    """
    seen: set[int] = set()
    pending = [value]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen or isinstance(found, _ATOMS):
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, Tensor | Optimizer):
            continue
        if isinstance(found, dict):
            pending += [*dict.keys(found), *dict.values(found)]
        elif isinstance(found, list | tuple | set | frozenset | deque):
            pending += found
        elif isinstance(found, types.MethodType):
            pending.append(found.__self__)
        else:
            pending.append(getattr(found, "__dict__", None))


def is_of_atoms(value: object) -> bool:
    """Returns whether a value is one that no code can change, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(is_of_atoms, value))
    return value is None or isinstance(value, _ATOMS)


def share(tensor: Tensor) -> Tensor:
    """Returns what a part of a step sees of a tensor: a number's copy, or the tensor itself."""
    return tensor.clone() if tensor.is_cpu and tensor.numel() == 1 else tensor


def on_host(tensor: Tensor) -> Tensor:
    """Returns what a trial on the host sees of a tensor: a copy, which the trial may change."""
    return tensor.detach().cpu().clone()


def copied(
    values: Mapping[str, object],
    *,
    owner: str,
    instead: dict[int, Any],
    tensor_of: Callable[[Tensor], Tensor] = share,
) -> dict[str, Any]:
    """Returns deep copies of attributes or group values.

    Args:
        values: What to copy, by name.
        owner: Whose they are, for the error.
        instead: By ``id``, what stands in the copy for an object; filled with what was copied, so
            that several calls keep shared references shared.
        tensor_of: What stands in the copy for a tensor that ``instead`` does not name.

    Raises:
        RefusedError: A value cannot be copied.
    """
    result = {}
    for name, value in values.items():
        for found in reachable(value):
            if isinstance(found, Tensor) and id(found) not in instead:
                instead[id(found)] = tensor_of(found)
        try:
            result[name] = copy.deepcopy(value, instead)
        except Exception as error:
            raise RefusedError(
                f"{owner} cannot be stepped in parts: its {name!r}, a {type(value).__name__}, "
                f"cannot be copied ({type(error).__name__}: {error}), and a step that changes it "
                "would do so once for each part. Keep its state on the device, or keep that value "
                "out of the optimizer."
            ) from error
    return result


def is_equal(left: Any, right: Any, _pairs: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Returns whether two values are the same, as far as copying sees them.

    What defines no equality of its own is compared by what it would be rebuilt from.
    """
    if left is right or (id(left), id(right)) in _pairs:
        return True
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        # Wherever they are: bitsandbytes moves its tables to the device when a part needs them.
        return (
            isinstance(left, Tensor)
            and isinstance(right, Tensor)
            and left.dtype == right.dtype
            and torch.equal(left.to(right.device), right)
        )
    if isinstance(left, Optimizer) and isinstance(right, Optimizer):
        return True  # the shadows of one optimizer
    if type(left) is not type(right):
        return False
    pairs = _pairs | {(id(left), id(right))}
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_equal(left[k], right[k], pairs) for k in left)
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(
            is_equal(a, b, pairs) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, types.MethodType):
        return left.__func__ is right.__func__ and is_equal(left.__self__, right.__self__, pairs)
    if isinstance(left, float) and left != left and right != right:
        return True
    has_own = any("__eq__" in vars(each) for each in type(left).__mro__[:-1])  # but object's
    same = left == right if has_own else None
    if isinstance(same, bool):
        return same
    parts = [_rebuilt_from(value) for value in (left, right)]
    return parts[0] is not None and is_equal(parts[0], parts[1], pairs)


def _rebuilt_from(value: object) -> object:
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # it says by this that it cannot be rebuilt, so nothing is known about it
        return None
    # The iterators over items that end a long form are read here: they are no values.
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]
