"""What a function that changes attention's scores has captured, of which a gradient is asked.

Dynamo reads it from the function's code; here the function runs once on single numbers, and torch's
own hook for calls sees what it reads. It runs again with others in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# torch has no public name for it (2.13); its own function modes take trees apart so.
from torch.utils import _pytree as pytree

_Score = Callable[..., torch.Tensor]


class _Seeing(TorchFunctionMode):
    """A look at the tensors of all calls: without gradients, only what was there learns."""

    def __init__(self) -> None:
        """Begins with none."""
        super().__init__()
        self.seen: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Calls the function and notes which tensors it was given."""
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):  # its shape is no matter of gradients
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    self.seen.setdefault(id(leaf), leaf)
        return result


class _Replacing(TorchFunctionMode):
    """A mode in which calls get other tensors in the place of some."""

    def __init__(self, others: Mapping[int, object]) -> None:
        """Takes the others by the identities of those that they stand for."""
        super().__init__()
        self._others = others

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Calls the function with what stands for its arguments."""
        given = pytree.tree_map(self._other, (tuple(args), kwargs or {}))
        return function(*given[0], **given[1])

    def _other(self, value: object) -> object:
        return self._others.get(id(value), value)


def captured_by(score: _Score, query: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that learn, which a function reads that it was not given.

    Args:
        score: The function, of a score and its batch, head, query and key.
        query: Whose scores it changes.

    Memory:
        A few numbers on the device, while it runs.
    """
    # Torch has no public name for how such a function's indices are tensors (2.13).
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    seeing = _Seeing()
    given = [query.new_zeros(())] + [query.new_zeros((), dtype=torch.int) for _ in range(4)]
    with torch.no_grad(), TransformGetItemToIndex(), seeing:
        score(*given)
    return list(seeing.seen.values())


def with_others(score: _Score, captured: Sequence[torch.Tensor]) -> _Score:
    """Returns a function that takes what stands for the captured tensors as further arguments."""
    names = [id(each) for each in captured]

    def called(*args: Any) -> torch.Tensor:
        given, others = args[: -len(names)], args[-len(names) :]
        with _Replacing(dict(zip(names, others, strict=True))):
            return score(*given)

    return called
