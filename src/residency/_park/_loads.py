"""What an optimizer loads while its parameters are parked.

Torch puts a state to where its parameters are, which is the host for as long as they are parked; it
follows them when it is used after they are back. Invariant, which ``tests/park/test_loads.py``
tries to break: after ``unpark`` the state is where a load without the parking would have put it.

A function stands in the place of ``Optimizer.__setstate__``, to which every load comes, while
anything is parked. [Note: no hook in the module]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import local_of, moved
from residency._transfer import Waiting, is_looked_at, let_wait, owner_of, tensors_in

_torch_setstate = Optimizer.__setstate__


def watch_loads(*, is_on: bool) -> None:
    """Begins the watch, or ends it; where others have put a function there meanwhile, theirs stays,
    with what it calls.
    """
    global _torch_setstate
    kind: Any = Optimizer
    if is_on and kind.__setstate__ is not _setstate:
        _torch_setstate = kind.__setstate__
        kind.__setstate__ = _setstate
    elif not is_on and kind.__setstate__ is _setstate:
        kind.__setstate__ = _torch_setstate


def _setstate(self: Optimizer, state: dict[str, Any]) -> None:
    _torch_setstate(self, state)
    # A restore of the library's own says itself what waits, and an owner has its own way.
    if "state" in state and not is_looked_at() and owner_of(self) is None:
        let_wait(self, _following(self), _move)


def _following(optimizer: Optimizer) -> Iterator[tuple[Tensor, str, Tensor | None]]:
    """Yields what a load puts to where the parameters are.

    Source: ``Optimizer._process_value_according_to_param_policy`` of torch 2.13.
    """
    state = vars(optimizer)["state"]
    for group in optimizer.param_groups:
        has_step = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            for key, value in dict(state.get(parameter, {})).items() if parameter.is_cpu else ():
                if key == "step" and not has_step:
                    continue
                if isinstance(value, Tensor):
                    yield parameter, key, None
                else:
                    yield from ((parameter, key, each) for each in tensors_in(value))


def _move(waiting: list[Waiting], put: Callable[[Waiting, Tensor], None]) -> None:
    while waiting:
        each = waiting.pop()
        put(each, moved(each.tensor, local_of(each.parameter).device))
