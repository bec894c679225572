"""Gives device memory back where verl's training ends and the engine's turn begins.

The guard is a function around methods of verl's worker classes, which subclasses inherit. Nothing
of it is imported before verl's workers are, nothing heavy before the first transition. Invariant,
which ``tests/integrations/test_verl_door.py`` tries to break: what a method computes and returns,
and what verl's ``register`` wrote on it, is as without it.

[Note: the order of a transition] Spent gradients are dropped, then what FSDP2 gathered and kept
(after a forward without a backward the root stays gathered). Both happen on every rank alike,
whatever its figures: a rank that alone keeps its parameters gathered would leave the others waiting
in the next gather. Then `residency.reclaim`'s means, cheapest first, and the proof. Ranks hear of
each other last, so that none returns, and lets an engine wake, before all have given back.

[Note: which calls] The actor's update runs the training worker's ``train_mini_batch``, which is the
critic's own update where it is called by itself: below ``critic_warmup`` the last one before a
rollout. So only the outermost method of a thread makes the transition. A model with an adapter is
its own reference, without the adapter: the batch of that call of ``compute_log_prob`` says so, and
the one that recomputes the policy's own, right before its update, is left alone.

[Note: when garbage is looked for] In a process of verl's the search for cycles takes a second, as
the collection would. Garbage on the device shows as more held bytes than after the same method the
last time; without such growth there is no search.

[Note: no derived need] The engine's ``gpu_memory_utilization`` says what it may hold in total, not
what its next allocation takes, and how much of that it holds already cannot be seen from the bytes
of other processes. So the need is what the user states, and without one all that pays goes back.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import residency
from residency._errors import HandOffError
from residency._memory import ImportWatch
from residency._units import format_figures, parse_bytes
from residency.integrations._common._framework import missing_in, named_with_version

if TYPE_CHECKING:
    import torch

    from residency._handoff import Reclaimed

_log = logging.getLogger("residency")

NEED_VARIABLE = "RESIDENCY_VERL_NEED"
_CLASS = "ActorRolloutRefWorker"
# Where a worker has what it trains: also under the names of 0.7's FSDP workers, and of a critic.
_OPTIMIZERS = ("actor_optimizer", "critic_optimizer", "actor.engine.optimizer", "engine.optimizer")
_MODELS = (
    *("actor_module_fsdp", "ref_module_fsdp", "critic_module"),
    *("actor.engine.module", "ref.engine.module", "engine.module"),
)
_NO_ADAPTER = "no_lora_adapter"  # what the batch of a reference without its adapter has
_PATIENCE_SECONDS = 600.0  # as long as verl's own collectives wait


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A method of a worker that the guard runs after. [Note: which calls]

    Attributes:
        owner: The worker's class.
        method: Its name there.
        is_update: Whether it leaves gradients that were stepped with.
        is_needed: Whether a verl without it is left as it is; else it is passed over.
        is_reference_alone: Whether only calls without the adapter count.
    """

    owner: str
    method: str
    is_update: bool = False
    is_needed: bool = True
    is_reference_alone: bool = False


_UPDATE = _Call(owner=_CLASS, method="update_actor", is_update=True)
_REFERENCE = _Call(owner=_CLASS, method="compute_ref_log_prob")
# The workers of verl 0.7 to 0.9, and those for FSDP alone that went with 0.8.
_CALLS = {
    "verl.workers.engine_workers": (
        _UPDATE,
        _REFERENCE,
        _Call(owner=_CLASS, method="compute_log_prob", is_needed=False, is_reference_alone=True),
        _Call(owner="TrainingWorker", method="train_mini_batch", is_update=True, is_needed=False),
    ),
    "verl.workers.fsdp_workers": (
        _UPDATE,
        _REFERENCE,  # calls the other one itself, where the model has an adapter
        _Call(owner="CriticWorker", method="update_critic", is_update=True, is_needed=False),
    ),
}
_inside = threading.local()  # whether a guarded method is under way


_MEANINGS = {
    "num_transitions": "methods that it has run after",
    "freed_bytes": "that went back to the device in all of them",
    "seconds": "for it, without the wait for other ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardStatistics:
    """The figures of the guard's work in this process.

    Attributes:
        num_transitions: How many methods it has run after.
        freed_bytes: The bytes that went back to the device in all of them.
        seconds: How long that took, without the wait for other ranks.
    """

    num_transitions: int = 0
    freed_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return format_figures("the guard of verl's workers", self, _MEANINGS)


class _Guard:
    """The guard of one process, from its installation to its removal."""

    def __init__(self, need: int | str | None, *, collect: bool) -> None:
        self._need = None if need is None else parse_bytes(need, name="need")
        self._from_environment = need is None
        self._collect = collect
        self._is_on = True
        self._held: dict[str, int] = {}  # after each method, when it last ran
        self._undo: list[Callable[[], None]] = []
        self._watch = ImportWatch(dict.fromkeys(_CALLS, self._wrap))
        self.statistics = GuardStatistics()

    def start(self) -> None:
        self._watch.start()

    def stop(self) -> None:
        self._is_on = False  # for a function that other code has put around one of ours
        self._watch.stop()
        while self._undo:
            self._undo.pop()()

    def _wrap(self, module: ModuleType) -> None:
        """Puts the guard around all methods, or around none.

        Raises:
            RefusedError: This version of verl has another class.
            InvalidArgumentError: The environment's size does not parse.
        """
        stated = os.environ.get(NEED_VARIABLE)
        if self._from_environment and stated:
            self._need = parse_bytes(stated, name=NEED_VARIABLE)
        found = [(call, _method(module, call)) for call in _CALLS[module.__name__]]
        for call, method in found:
            if method is None and call.is_needed:
                raise missing_in(
                    "verl",
                    f"{module.__name__}.{call.owner}.{call.method} that is a plain method",
                    "set VERL_USE_EXTERNAL_PLUGINS=none, or install verl 0.7.1 to 0.9.1",
                )
        for call, method in found:
            if method is None:
                _log.warning(
                    "%s has no %s.%s.%s: no memory is given back after it",
                    named_with_version("verl"),
                    module.__name__,
                    call.owner,
                    call.method,
                )
                continue
            self._put(vars(module)[call.owner], call, method)

    def _put(self, owner: object, call: _Call, found: Callable[..., object]) -> None:
        @functools.wraps(found)  # with the attribute by which Ray's worker group finds the method
        def guarded(worker: object, *args: object, **kwargs: object) -> object:
            if not self._is_on or vars(_inside):
                return found(worker, *args, **kwargs)
            counts = not call.is_reference_alone or _is_without_adapter(*args, *kwargs.values())
            vars(_inside)["of"] = self
            try:
                result = found(worker, *args, **kwargs)
            finally:
                vars(_inside).clear()
            del args, kwargs  # the batch
            if counts:
                self._after(worker, call)
            return result

        def take_back() -> None:
            if vars(owner).get(call.method) is guarded:
                setattr(owner, call.method, found)

        setattr(owner, call.method, guarded)
        self._undo.append(take_back)

    def _after(self, worker: object, call: _Call) -> None:
        """Makes the transition. [Note: the order of a transition]"""
        from residency import _device
        from residency._ranks import all_ranks

        device = _device.accelerator()
        if device is None:
            return
        if call.is_update:
            drop_gradients(worker)
        drop_gathered(worker)
        group = all_ranks()
        freed: list[Reclaimed] = []
        try:
            freed = self._free(device, call.method)
        finally:  # also where it failed: the others are not to wait for this rank
            if group is not None:
                _tell_ranks(group, is_free=bool(freed))
        self.statistics = replace(
            self.statistics,
            num_transitions=self.statistics.num_transitions + 1,
            freed_bytes=self.statistics.freed_bytes + sum(each.total for each in freed),
            seconds=self.statistics.seconds + sum(each.seconds for each in freed),
        )

    def _free(self, device: torch.device, name: str) -> list[Reclaimed]:
        """Gives back what is needed. [Note: when garbage is looked for]"""
        freed = [residency.reclaim(self._need, device=device, collect=False)]
        grown = freed[0].after.held > self._held.get(name, -1)
        if self._collect and (grown or self._need is not None):
            freed.append(residency.reclaim(self._need, device=device))
        self._held[name] = freed[-1].after.held
        if self._need is not None:
            _prove(self._need, device)
        for each in freed:
            _log.info("after %s: %s", name, each)
        return freed


def _method(module: ModuleType, call: _Call) -> Callable[..., object] | None:
    """Returns a plain method of a worker's own class; None where this verl has another."""
    owner = getattr(module, call.owner, None)
    found = vars(owner).get(call.method) if isinstance(owner, type) else None
    return found if inspect.isfunction(found) and not inspect.iscoroutinefunction(found) else None


def _is_without_adapter(data: object = None, *others: object) -> bool:
    """Returns whether a batch asks for the model without its adapter."""
    from verl.utils import tensordict_utils  # type: ignore[import-not-found]  # is verl's worker

    return bool(tensordict_utils.get(data, _NO_ADAPTER, default=False))


def _prove(need: int, device: torch.device) -> None:
    """Does nothing where the bytes are free.

    Raises:
        HandOffError: They are not.
    """
    try:
        with residency.hand_off(need, device=device, collect=False):
            pass
    except HandOffError as error:
        error.add_note(
            f"The size is {NEED_VARIABLE}, or the argument of install_guard: the bytes that the"
            " rollout engine is to find free after verl's training."
        )
        raise


def drop_gradients(worker: object) -> None:
    """Drops gradients that an optimizer of torch has stepped with; verl's engines do so, too."""
    from torch.optim import Optimizer

    for optimizer in _reached(worker, _OPTIMIZERS):
        if isinstance(optimizer, Optimizer):
            optimizer.zero_grad(set_to_none=True)


def drop_gathered(worker: object) -> None:
    """Drops the parameters that FSDP2 gathered and kept; the next forward gathers them again."""
    from torch.distributed.fsdp import FSDPModule

    for model in _reached(worker, _MODELS):
        if isinstance(model, FSDPModule):
            for module in model.modules():  # type: ignore[attr-defined]  # mixed into a module
                if isinstance(module, FSDPModule):
                    module.reshard()


def _reached(worker: object, paths: tuple[str, ...]) -> Iterator[object]:
    """Yields what a worker has under dotted names, as far as it has it."""
    for path in paths:
        found = worker
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            yield found


def _tell_ranks(group: object, *, is_free: bool) -> None:
    import torch

    from residency import _device
    from residency._handoff import FAILED, agree

    device = _device.accelerator() or torch.device("cpu")
    agree(group, device, 0 if is_free else FAILED, seconds=_PATIENCE_SECONDS)


# ------------------------------------------------------------------------------- the one that is on

_lock = threading.Lock()
_installed: _Guard | None = None


def install_guard(need: int | str | None = None, *, collect: bool = True) -> None:
    """Gives device memory back after verl's updates of actor and critic, and after the reference.

    Takes the place of a guard that is there, so calling it again is harmless. May come before or
    after verl's workers are imported, but before Ray makes an actor of them, which keeps the
    methods that it finds. A version of verl without the class or the methods is left as it is, with
    one error in the log of ``residency`` that names the version.

    Args:
        need: Bytes, or a size such as ``"4GiB"``, that are to be free on the device after each;
            not more is given back than that takes. By default `RESIDENCY_VERL_NEED`, and without
            it all that pays is given back.
        collect: Whether garbage may be collected, if a search found that it pays.

    Raises:
        InvalidArgumentError: The size does not parse.
    """
    global _installed
    guard = _Guard(need, collect=collect)
    with _lock:
        if _installed is not None:
            _installed.stop()
        _installed = guard
        guard.start()


def ensure_guard() -> None:
    """Installs the guard as the environment says, unless one is there."""
    if _installed is None:
        install_guard()


def remove_guard() -> None:
    """Takes the guard back; verl's methods are as they were. Without one it does nothing."""
    global _installed
    with _lock:
        guard, _installed = _installed, None
        if guard is not None:
            guard.stop()


def guard_statistics() -> GuardStatistics:
    """Returns the figures of the installed guard; zeros if there is none."""
    guard = _installed
    return GuardStatistics() if guard is None else guard.statistics
