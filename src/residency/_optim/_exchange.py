"""A class' own ``train`` and ``eval``, with the state of one parameter at a time on the device.

Schedule-free classes exchange parameters with their state there, outside of a step, and some expect
the state beside the parameters. Invariant, which ``tests/optim/test_train_and_eval.py`` tries
to break: the ends are the plain optimizer's, and the device has one parameter's state at most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency import _device
from residency._dtensor import local_of, moved
from residency._modes import inference_mode_off
from residency._optim._masters import MASTER
from residency._optim._offload_record import Offload, record_of
from residency._optim._placement import follow_caller, members_of
from residency._optim._plan import Member, Piece, Seat
from residency._optim._stand_ins import StandIns
from residency._optim._state import ParameterState
from residency._optim._trial._partial_step import EXCHANGES, Commit, Shadow
from residency._optim._trial._step_call import StepCall
from residency._transfer import before_write


def exchanges_of(base: type[Optimizer]) -> dict[str, Callable[..., Any]]:
    """Returns what an offloaded class has in the place of its own ``train`` and ``eval``, by name;
    nothing for a class without them.
    """
    own = {name: getattr(base, name, None) for name in EXCHANGES}
    return {name: _by_parameter(method) for name, method in own.items() if callable(method)}


def _by_parameter(method: Callable[..., Any]) -> Callable[..., Any]:
    @torch._disable_dynamo  # type: ignore[attr-defined]  # what torch.optim itself uses
    @functools.wraps(method)
    @inference_mode_off()
    def exchange(self: Optimizer, *args: object, **settings: object) -> Any:
        offload = record_of(self)
        if offload is None:
            return method(self, *args, **settings)
        follow_caller(self, offload)
        if offload.host is None:
            return method(self, *args, **settings)
        return _Exchange(self, offload, lambda shadow: method(shadow, *args, **settings)).run()

    return exchange


class _Exchange:
    """One call of such a method."""

    def __init__(
        self, optimizer: Optimizer, offload: Offload, call: Callable[[Optimizer], object]
    ) -> None:
        self._optimizer = optimizer
        self._offload = offload
        self._call = call
        self._homes, self._state = offload.on_host.homes, offload.on_host.state
        self._stand_ins = StandIns(offload, self._state)
        self._commit = Commit(optimizer)

    def run(self) -> object:
        """Calls the method for each parameter that has state, then for all others.

        Raises:
            RefusedError: Two parameters have one mapping as their state, or a state was put over
                other memory. Nothing was changed.
            ResidencyError: It left attributes or group values differently for two parameters.
            torch.OutOfMemoryError: The device has no room for the largest state. Nothing was
                changed.
        """
        members = members_of(self._optimizer)
        inners = [self._state.peek(member.parameter) for member in members]
        self._state.require_own_mappings("Nothing was changed")
        for inner in inners:
            if inner:
                inner.require_in_place()
        self._check_room([inner for inner in inners if inner])
        others = []
        for member, inner in zip(members, inners, strict=True):
            if inner:
                self._of_one(member, inner)
            else:
                others.append(member)
        result, left = self._called(others, {}, is_last=True)
        for parameter, values in left.items():
            if values:
                self._state[parameter] = values
        self._commit.write()
        return result

    def _check_room(self, inners: list[ParameterState]) -> None:
        sizes = [sum(h.num_bytes for h in inner.homes_by_key.values()) for inner in inners]
        _device.unfilled_bytes(max(sizes, default=0), self._homes.device)

    def _of_one(self, member: Member, inner: ParameterState) -> None:
        inner.fence()
        values: dict[str, Any] = dict(dict.items(inner))
        at_home = set(inner.homes_by_key)
        values |= {key: moved(values[key], self._homes.device) for key in at_home}
        piece = Piece(member.group_index, Seat(member.parameter, inner))
        master = values.pop(MASTER, None)
        views = {} if master is None else {MASTER: local_of(master)}
        stand_in = self._stand_ins.of(piece, views, is_local=False)
        stays = [value for value in values.values() if isinstance(value, Tensor)]
        before_write([member.parameter, *(each for each in stays if not each.is_cpu)])
        _, left = self._called([Member(member.group_index, stand_in)], {stand_in: values})
        after = dict(left.get(stand_in, {}))
        if stand_in is not member.parameter:
            after[MASTER] = self._stand_ins.write_back(piece, stand_in)
        for key in [key for key in dict.keys(inner) if key not in after]:
            inner.forget(key)
        for key, value in after.items():
            if key in at_home or dict.get(inner, key) is not value:
                inner.place(key, value, is_streamed=key in at_home)

    def _called(
        self, members: list[Member], state: dict[Tensor, dict[str, Any]], *, is_last: bool = False
    ) -> tuple[object, dict[Tensor, dict[str, Any]]]:
        groups = [{**group, "params": []} for group in self._optimizer.param_groups]
        for index, parameter in members:
            groups[index]["params"].append(parameter)
        shadow = Shadow(self._optimizer, self._offload.base, groups, state, not is_last, StepCall())
        result = self._call(shadow.optimizer)
        outcome = shadow.outcome()
        self._commit.add(outcome)
        return result, dict(outcome.state)
