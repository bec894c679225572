"""What an offloaded optimizer knows besides what its class knows, in one object on one attribute.

It never refers to the optimizer, so that an optimizer still dies with its last reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from residency._dtensor import is_sharded, layout_of, locals_of, sharded_among
from residency._errors import RefusedError
from residency._optim._homes import Home, Homes
from residency._optim._masters import (
    MASTER,
    as_masters_state,
    master_like,
    needs_master,
    refuse_shared_masters,
)
from residency._optim._overlap import Ahead
from residency._optim._places import Residents, StatePlace, needs_device
from residency._optim._plan import Member, Members, Plan, make_plan, members_with_gradient
from residency._optim._state import ParameterState
from residency._optim._states import State
from residency._optim._statistics import Timeline
from residency._optim._ties import Ties, ties_of
from residency._optim._trial._first_step import Schema, Schemas, StateSize
from residency._optim._trial._partial_step import PRIVATE, is_torchs_own
from residency._optim._trial._separable import Separability, separability
from residency._optim._trial._step_call import NO_ARGUMENTS, StepCall
from residency._transfer import LARGEST_BUCKET_BYTES, default_bucket


class Loading:
    """One call of ``load_state_dict``.

    Attributes:
        adapted: The saved dict, once the hooks that may adapt it have run.
    """

    adapted: dict[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class HostState:
    """An optimizer's state that lives on the host.

    Attributes:
        homes: The memory.
        state: The mapping that is ``optimizer.state``.
        ahead: State that is on the device between steps; None without overlap.
    """

    homes: Homes
    state: State
    ahead: Ahead | None = None

    def home_for(self, parameter: Tensor, key: str) -> Home | None:
        """Returns the home that a state has, or that is reserved for it."""
        inner = self.state.peek(parameter)
        if inner is not None:
            return inner.home_for(key)
        return self.homes.reserved_for(parameter).get(key)


@dataclass(slots=True)
class Offload:
    """The settings, the homes, the plan and the counters of one offloaded optimizer.

    Attributes:
        base: The class that the optimizer had.
        bucket_bytes: Bytes of state that move together; None for those that fit the state.
        host: Its state on the host; None when the parameters are there too, and nothing moves.
        resident_bytes: Bytes of state that may stay on the device.
        resident: The parameters whose state stays on the device.
        is_entered: Whether a step came in through the offloaded class.
        shows_templates: Whether ``state_dict`` has the zeros of ``prime``, as a caller asked for.
        loading: The call of ``load_state_dict`` that runs. A dead one is over, however it ended.
        logged_for: The device for which the log says what the offload saves; None until it does.
        call: What the newest step was called with, of a class from outside of ``torch.optim``.
        overlaps: Whether state moves under the passes of the run, too.
        keeps: Whether state stays on the device as far as the run leaves room.
    """

    base: type[Optimizer]
    separability: Separability
    bucket_bytes: int | None
    num_slots: int
    resident_bytes: int = 0
    host: HostState | None = None
    resident: Residents = field(default_factory=Residents)
    pin: bool = True
    master_weights: bool = False
    guard: RemovableHandle | None = None
    is_entered: bool = False
    shows_templates: bool = False
    loading: weakref.ref[Loading] | None = None
    logged_for: torch.device | None = None
    slot_bytes: int = 0
    num_buckets: int = 0
    num_steps: int = 0
    copied_to_device_bytes: int = 0
    copied_to_host_bytes: int = 0
    timeline: Timeline | None = None
    call: StepCall = NO_ARGUMENTS
    overlaps: bool = False
    keeps: bool = False
    _tried: set[Hashable] = field(default_factory=lambda: {()})
    _plan: Plan | None = None
    _plan_key: tuple[Any, ...] = ()
    _plan_ties: Ties = ()
    _seated: list[list[Any]] = field(default_factory=list)
    _layouts: list[Hashable] = field(default_factory=list)
    _schemas: Schemas = field(default_factory=Schemas)

    @property
    def on_host(self) -> HostState:
        """The state on the host, of an optimizer that has its parameters on the accelerator."""
        assert self.host is not None
        return self.host

    @property
    def most_in_bucket(self) -> int:
        """The most bytes of state that move together."""
        return LARGEST_BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes

    @property
    def is_local(self) -> bool:
        """Whether steps see local tensors of sharded parameters, and cuts of them."""
        return self.separability is Separability.ELEMENT_WISE

    def layouts_of(self, members: Members) -> list[Hashable]:
        """Returns ``layout_of`` each parameter of a step, for which the plan is asked next: those
        from before where nothing has changed.
        """
        parameters = members.parameters
        local = locals_of(parameters)
        seated: list[list[Any]] = [
            members.group_indices,
            list(map(id, parameters)),
            [tensor.shape for tensor in local],
            [tensor.dtype for tensor in local],
            [tensor.stride() for tensor in local],
            [layout_of(p) for p in parameters] if sharded_among(parameters) else [],
        ]
        if seated != self._seated:
            self._seated = seated
            self._layouts = [layout_of(parameter) for parameter in parameters]
        return self._layouts

    def plan_for(
        self,
        optimizer: Optimizer,
        members: Members,
        inners: Sequence[ParameterState | None],
        *,
        is_template: bool = False,
    ) -> Plan:
        """Returns the plan for a step over ``members``, made anew only when something changed.

        A template step, of which only the state is wanted, has buckets of half the size: what the
        step itself allocates then fits one bucket too.
        """
        settings = tuple(_settings_of(group) for group in optimizer.param_groups)
        key = (self.on_host.homes.version, is_template, self._seated, settings, self.call.kind)
        plan, ties = self._plan if key == self._plan_key else None, self._plan_ties
        # What goes through one step is in the list of the plain one, whatever shares bytes in it.
        if plan is None or ties or self.master_weights or not plan.is_one_list:
            ties = self._ties_of(members)
        if plan is None or ties != self._plan_ties:
            self._forget_the_gone(optimizer)
            self.ask_budget(optimizer, members)
            self._plan = plan = self._plan_of(
                optimizer, members, self.bucket_bytes, ties, part=2 if is_template else 1
            )
            self._plan_key, self._plan_ties = key, ties
        plan.seat(members.parameters, inners)
        return plan

    def plan_like_newest(self, optimizer: Optimizer, bucket_bytes: int | None) -> Plan:
        """Returns the plan of another step over the parameters of the newest one, with buckets of
        a size; it is only looked at.
        """
        members = members_with_gradient(optimizer)
        return self._plan_of(optimizer, members, bucket_bytes, self._plan_ties)

    def _plan_of(
        self,
        optimizer: Optimizer,
        members: Members,
        bucket_bytes: int | None,
        ties: Ties,
        *,
        part: int = 1,
    ) -> Plan:
        def bucket_of(state_bytes: int, whole_bytes: int) -> int:
            fitting = default_bucket(state_bytes, whole_bytes, self.num_slots)
            return (fitting if bucket_bytes is None else bucket_bytes) // part

        return make_plan(
            members,
            self.on_host.state,
            resident=self.resident,
            bucket_of=bucket_of,
            can_cut=self.is_local,
            size_of=lambda member: self.size_of(optimizer, member),
            later_of=lambda member: self._later_of(optimizer, member),
            has_master=self.has_master,
            ties=ties,
        )

    def take_call(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> StepCall:
        """Takes in what a step is called with, which is tried out where no step had its like.

        Raises:
            TypeError: The class' own step does not take these arguments.
            RefusedError: Parts of a step cannot be given them, or they couple the parameters.
        """
        call = StepCall.of(self.base, args, kwargs)
        if is_torchs_own(self.base):
            return call  # a closure changes nothing of what they do
        if call.kind not in self._tried:
            try:
                separability(optimizer, self.base, optimizer.param_groups, call)
            except RefusedError as error:
                raise RefusedError(
                    f"{self.base.__name__}.step was given {sorted(call.values)}, and nothing was "
                    f"stepped, because with these {error}"
                ) from error
            self._tried.add(call.kind)
        self.call = call
        return call

    def leave_plan(self) -> None:
        """Lets go of the parameters of the step that the newest plan was used for."""
        if self._plan is not None:
            self._plan.leave()

    def ask_budget(self, optimizer: Optimizer, members: Iterable[Member]) -> None:
        """Decides where the state goes that steps make: it may be another than was foreseen."""
        for member in members if self.resident_bytes else ():
            if self.on_host.state.peek(member.parameter):
                continue  # what is there was asked for when it came
            schema = self.schema_of(optimizer, member)
            made = () if schema is None else (*schema.device.values(), *schema.later.values())
            if schema is None or not self.resident.allow(id(member.parameter), made):
                self.resident.revoke(id(member.parameter))

    def places_of(
        self,
        parameter: Tensor,
        values: Mapping[str, object],
        schema: Schema | None,
        residents: Residents,
        *,
        is_arranged: bool = False,
    ) -> dict[str, StatePlace]:
        """Returns the places of the tensors of a whole state, from the schema of a first step, the
        state that was there, and the budget.

        Args:
            parameter: Whose state it is.
            values: The state.
            schema: None where it cannot be known.
            residents: The budget that the state is to fit.
            is_arranged: Whether a step or a caller has put the tensors where they are; then what is
                on the device stays there as far as the budget has room, and what is on the host is
                moved only with a whole state that is there because its parameter was. Else they may
                be anywhere, and the state stays on the device only if the one before did.
        """
        tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        inner = self.host.state.peek(parameter) if self.host is not None else None

        here = {k: v for k, v in tensors.items() if is_arranged and not v.is_cpu}
        for key, value in {} if here else tensors.items():
            before = None if inner is None else inner.seen(key)
            if needs_device(key, value, before, parameter=parameter, schema=schema) or (
                self.host is not None and self.host.homes.has(value)
            ):
                here[key] = value
        may_stay = self.resident_bytes and (is_arranged or parameter in self.resident)
        stays = may_stay and residents.allow(id(parameter), self.kept(parameter, here).values())
        place = StatePlace.DEVICE if stays else StatePlace.HOME
        return {key: place if key in here else StatePlace.HOST for key in tensors}

    def kept(self, parameter: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns ``as_kept`` of each value, with a tensor like the master if that is missing."""
        found = {key: self.as_kept(value, parameter) for key, value in values.items()}
        if self.has_master(parameter):
            found.setdefault(MASTER, master_like(parameter))
        return found

    def as_kept(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Returns a state as steps keep it: with a master, in the master's dtype."""
        has_master = self.master_weights and needs_master(parameter)
        return as_masters_state(value, parameter) if has_master else value

    def _forget_the_gone(self, optimizer: Optimizer) -> None:
        """Drops what is kept for parameters that neither a group nor the state names any more."""
        in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
        known = in_groups | {id(key) for key in dict.keys(self.on_host.state)}
        self.on_host.homes.forget_reserved(known)
        self.resident.forget_others(known)
        self._schemas.forget_others(self.base, optimizer.param_groups)

    def _ties_of(self, members: Members) -> Ties:
        parameters = members.parameters
        ties = ties_of(parameters, members.gradients)
        for tie in ties:
            low = [parameters[i] for i in tie if self.has_master(parameters[i])]
            refuse_shared_masters(low)
        return ties

    def size_of(self, optimizer: Optimizer, member: Member) -> StateSize | None:
        """Returns the size of the state that a first step makes; None when it cannot be known."""
        schema = self.schema_of(optimizer, member)
        return (
            None
            if schema is None
            else StateSize.of([*schema.device.values(), *schema.later.values()])
        )

    def _later_of(self, optimizer: Optimizer, member: Member) -> dict[str, Tensor]:
        if is_torchs_own(self.base):
            return {}
        schema = self.schema_of(optimizer, member)
        return {} if schema is None else schema.later

    def schema_of(self, optimizer: Optimizer, member: Member) -> Schema | None:
        """Returns what a first step makes on the device for a parameter; None when it cannot be
        known.
        """
        group = optimizer.param_groups[member.group_index]
        return self.schema_in(optimizer, group, member.parameter)

    def schema_in(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        parameter: Tensor,
        known: Schemas | None = None,
    ) -> Schema | None:
        """Returns ``schema_of``; for a group that the optimizer may not have yet, ``known`` are
        those that were found before.
        """
        return (self._schemas if known is None else known).of(
            optimizer,
            self.base,
            group,
            parameter,
            is_local=self.is_local,
            has_master=self.has_master(parameter),
            call=self.call,
        )

    def has_master(self, parameter: Tensor) -> bool:
        """Returns whether a float32 master is stepped in a parameter's place."""
        return self.master_weights and needs_master(parameter)

    def forget_plan(self) -> None:
        """Plans anew at the next step."""
        self._plan = None

    def forget_schemas(self) -> None:
        """Forgets what first steps make: some values of groups are known by identity, and go."""
        self._schemas.clear()


def _settings_of(group: dict[str, object]) -> tuple[object, ...]:
    # What may decide which states a step makes: that a setting is on, not how large it is, which
    # schedulers change at every step (`lr`, and OneCycleLR's `betas` and `momentum`).
    switches = ((k, v if isinstance(v, tuple) else (v,)) for k, v in group.items() if k != "lr")
    plain = (bool, int, float)
    return tuple((k, *(bool(v) for v in vs if isinstance(v, plain))) for k, vs in switches)


def record_of(optimizer: Optimizer) -> Offload | None:
    """Returns what an offloaded optimizer knows; of any other optimizer None."""
    record = optimizer.__dict__.get(PRIVATE)
    return record if isinstance(record, Offload) else None


def plain_schema_of(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, known: Schemas
) -> Schema | None:
    """Returns what a first step of the optimizer's own class makes for a parameter, offloaded or
    not; None where that cannot be foreseen.
    """
    offload = record_of(optimizer)
    base = type(optimizer) if offload is None else offload.base
    return known.of(optimizer, base, group, parameter, is_local=is_sharded(parameter))


def put_record(optimizer: Optimizer, record: Offload | None) -> None:
    """Makes this the optimizer's record; with None it has none from here on."""
    if record is None:
        optimizer.__dict__.pop(PRIVATE, None)
    else:
        optimizer.__dict__[PRIVATE] = record
