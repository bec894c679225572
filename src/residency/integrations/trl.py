"""Hands the device over to the vLLM engine of one of TRL's trainers, and takes it back.

In TRL's mode "colocate" with sleep the engine wakes for a weight sync and a generation, and sleeps
until the next; between, the device is the trainer's. The hand-off stands around the engine's own
``wake_up`` and ``sleep``, the two moments at which bytes change hands, wherever they are called.
Invariant, which ``tests/integrations/test_trl_engine.py`` tries to break: TRL computes the same and
calls its engine in the same order, as without it.

[Note: the need of the engine] Its setting ``gpu_memory_utilization`` only limits its memory in all.
The bytes of a wake-up are measured: the engine wakes once and sleeps again, and the device's own
free figure tells. Level 2, TRL's, has dropped the weights already, so nothing is lost.

[Note: blind flushes] TRL empties the allocator's cache before each sync. While the hand-off is on
it does not: the wake-up that follows frees the needed bytes by the figures, and proves it.

Source: trl 1.16.0, ``generation/vllm_generation.py`` and the trainers that call it.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from residency import _device
from residency._errors import HandOffError, InvalidArgumentError, RefusedError
from residency._handoff import Reclaimed, hand_off, reclaim
from residency._ranks import all_ranks
from residency._registries import WeakRegistry
from residency._units import format_bytes, parse_bytes
from residency.integrations._common._framework import (
    load_framework,
    missing_in,
    named_with_version,
)
from residency.integrations.transformers._callback import optimizer_inside

__all__ = ["EngineHandOff", "EngineStatistics", "hand_off_to_engine"]

_MODULE = "trl.generation.vllm_generation"
_FLUSH = "empty_cache"
_NEEDS = ("mode", "enable_sleep_mode", "accelerator", "sync_weights")
_NEWER = "pip install 'trl>=1.16'"
_log = logging.getLogger("residency")
_in_sync = threading.local()  # the hand-off whose weights this thread syncs
_installed: WeakRegistry[EngineHandOff] = WeakRegistry()
_flushes: list[Callable[[], None]] = []  # TRL's own function, while one of ours is in its place


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """The figures of the hand-offs to one engine.

    Attributes:
        need_bytes: The bytes that are free on the device before the engine wakes.
        num_hand_offs: How often it woke.
        freed_bytes: The bytes that went back to the device for it in all of them, by any means.
        parked_bytes: The part of these bytes that was the optimizer's state.
        seconds: How long that took, without the way back.
    """

    need_bytes: int
    num_hand_offs: int = 0
    freed_bytes: int = 0
    parked_bytes: int = 0
    seconds: float = 0.0


def hand_off_to_engine(
    trainer: Any, need: int | str | None = None, *, timeout: float = 60.0, collect: bool = True
) -> EngineHandOff:
    """Hands the device over to a trainer's vLLM engine whenever it wakes, until it sleeps.

    One line after the trainer is made, for ``GRPOTrainer`` and all that have a ``VLLMGeneration``.
    Before the engine wakes, as many bytes as it needs are made free by the cheapest means, and
    proven: the cache first, the optimizer's state last, which comes back when the engine sleeps.
    TRL's own ``empty_cache`` before each sync goes.

    Args:
        trainer: One with ``use_vllm=True``, in the mode ``"colocate"``, with
            ``vllm_enable_sleep_mode=True``.
        need: Bytes, or a size such as ``"20GiB"``, that a wake-up takes. None measures it: the
            engine wakes once and sleeps again.
        timeout: Seconds to wait, when the engine sleeps, for the bytes to be free.
        collect: Whether garbage may be collected, if a search found that it pays.

    Returns:
        The hand-off around the engine; its ``remove`` takes it away.

    Raises:
        InvalidArgumentError: The trainer has no such engine, or the size does not parse.
        RefusedError: The engine is another process of TRL's, or never sleeps, or this has been
            called for it, or this TRL lacks a method that it wraps. Nothing was changed.

    Memory:
        No device memory. Pinned host memory for the parked state, kept for the next time.
    """
    module = load_framework(_MODULE, install=_NEWER)
    generation = _generation_of(trainer)
    num_bytes = None if need is None else parse_bytes(need, name="need")
    if num_bytes is None:
        num_bytes = _measured(generation)
    return EngineHandOff(trainer, generation, num_bytes, module, timeout=timeout, collect=collect)


class EngineHandOff:
    """The functions around one engine, from `hand_off_to_engine` to `remove`.

    ``HandOffError`` comes out of the engine's ``wake_up`` if the bytes cannot be reached, before
    the engine takes any, and out of its ``sleep`` if they are not free again in time; the
    optimizer's state is whole then.
    """

    def __init__(
        self,
        trainer: Any,
        generation: Any,
        need: int,
        module: ModuleType,
        *,
        timeout: float,
        collect: bool,
    ) -> None:
        """Puts the functions around the engine; `hand_off_to_engine` has checked what is given."""
        self._trainer = weakref.ref(trainer)
        self._generation = generation
        self._settings: dict[str, Any] = {"timeout": timeout, "collect": collect}
        self._handed: AbstractContextManager[Reclaimed] | None = None
        self._statistics = EngineStatistics(need_bytes=need)
        self._own = [
            (generation, "sync_weights", self._around_sync(generation.sync_weights)),
            (generation.llm, "wake_up", self._around_wake_up(generation.llm.wake_up)),
            (generation.llm, "sleep", self._around_sleep(generation.llm.sleep)),
        ]
        for owner, name, function in self._own:
            vars(owner)[name] = function
        _installed.add(self)
        if vars(module).get(_FLUSH, _flush_unless_handed_over) is not _flush_unless_handed_over:
            _flushes[:] = [vars(module)[_FLUSH]]
            vars(module)[_FLUSH] = _flush_unless_handed_over
        _log.info("%s are made free before the engine wakes", format_bytes(need))

    def statistics(self) -> EngineStatistics:
        """Returns the figures so far."""
        return self._statistics

    def remove(self) -> None:
        """Takes the functions away, and brings parked state back; a second time it does nothing.

        Raises:
            HandOffError: The engine is awake, and the parked state does not fit beside it.
        """
        for owner, name, function in self._own:
            if vars(owner).get(name) is function:
                del vars(owner)[name]  # the class's method is there again
        self._own = []
        _installed.discard(self)
        module = load_framework(_MODULE, install=_NEWER)
        if not len(_installed) and vars(module).get(_FLUSH) is _flush_unless_handed_over:
            vars(module)[_FLUSH] = _flushes.pop()
        self._leave()

    def _around_sync(self, sync_weights: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(sync_weights)
        def synced(*args: Any, **kwargs: Any) -> Any:
            vars(_in_sync)["of"] = self
            try:
                return sync_weights(*args, **kwargs)
            finally:
                vars(_in_sync).clear()

        return synced

    def _around_wake_up(self, wake_up: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wake_up)
        def woken(*args: Any, **kwargs: Any) -> Any:
            if self._handed is None:  # TRL wakes weights and cache one after the other
                self._enter()
            try:
                return wake_up(*args, **kwargs)
            except BaseException as error:
                try:
                    self._leave()
                except HandOffError as problem:  # the engine keeps what woke before
                    error.add_note(str(problem))
                raise

        return woken

    def _around_sleep(self, sleep: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(sleep)
        def slept(*args: Any, **kwargs: Any) -> Any:
            result = sleep(*args, **kwargs)
            self._leave()
            return result

        return slept

    def _enter(self) -> None:
        trainer = self._trainer()
        optimizer = optimizer_inside(getattr(trainer, "optimizer", None))
        handed = hand_off(
            self._statistics.need_bytes,
            park=[optimizer] if isinstance(optimizer, Optimizer) else [],
            device=self._generation.accelerator.device,
            group=all_ranks(),
            **self._settings,
        )
        try:
            freed = handed.__enter__()
        except HandOffError as error:
            error.add_note(
                "The bytes are the vLLM engine's need when it wakes. Lower "
                "vllm_gpu_memory_utilization, or pass need= to hand_off_to_engine."
            )
            raise
        self._handed = handed
        done = self._statistics
        self._statistics = replace(
            done,
            num_hand_offs=done.num_hand_offs + 1,
            freed_bytes=done.freed_bytes + freed.total,
            parked_bytes=done.parked_bytes + freed.parked,
            seconds=done.seconds + freed.seconds,
        )
        _log.info("before the engine wakes: %s", freed)

    def _leave(self) -> None:
        handed, self._handed = self._handed, None
        if handed is not None:
            handed.__exit__(None, None, None)


def _flush_unless_handed_over() -> None:
    """Stands for TRL's ``empty_cache``. [Note: blind flushes]"""
    if vars(_in_sync).get("of") not in _installed:
        _flushes[0]()


def _generation_of(trainer: Any) -> Any:
    """Returns the ``VLLMGeneration`` of a trainer, whose engine sleeps between generations.

    Raises:
        InvalidArgumentError: It has none.
        RefusedError: Its engine cannot be handed anything, or is by another call.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None:
        raise InvalidArgumentError(
            f"{type(trainer).__name__} of {named_with_version('trl')} has no vllm_generation. Call "
            "hand_off_to_engine with a trainer that was made with use_vllm=True."
        )
    for name in _NEEDS:
        if getattr(generation, name, None) is None:
            raise missing_in("trl", f"VLLMGeneration.{name}", f"run: {_NEWER}")
    if generation.mode != "colocate":
        raise RefusedError(
            f"vllm_mode is {generation.mode!r}: the engine is a server, which "
            f"{named_with_version('trl')} never puts to sleep. Nothing was changed; set "
            'vllm_mode="colocate", or use residency.hand_off(peer=...) and take_over there.'
        )
    if not generation.enable_sleep_mode:
        raise RefusedError(
            "vllm_enable_sleep_mode is off, so the engine never gives its memory back. Nothing was "
            "changed; set vllm_enable_sleep_mode=True in the trainer's configuration."
        )
    for name in ("wake_up", "sleep"):
        if not callable(getattr(getattr(generation, "llm", None), name, None)):
            raise missing_in("trl", f"VLLMGeneration.llm.{name}", f"run: {_NEWER}")
    if any(each._generation is generation for each in _installed):
        raise RefusedError(
            "The device is handed over to this engine already. Nothing was changed; call "
            "hand_off_to_engine once, or remove() on its result."
        )
    return generation


def _measured(generation: Any) -> int:
    """Returns what a wake-up takes of the device. [Note: the need of the engine]

    Raises:
        RefusedError: The device does not tell its free bytes, or the engine is awake.
    """
    device = _device.resolve(generation.accelerator.device)
    if not getattr(generation, "_llm_weights_sleeping", True):
        raise RefusedError(
            "The engine is awake, so its need cannot be measured. Nothing was changed; "
            "call hand_off_to_engine before training, or pass need=."
        )
    if device is None or _device.device_room(device) is None:
        raise RefusedError(
            f"{device} does not tell its free bytes, so that nothing can be measured or proven. "
            "Nothing was changed; leave hand_off_to_engine out."
        )
    reclaim(device=device, collect=False)
    before = _free_bytes(device)
    generation.llm.wake_up()
    try:
        awake = _free_bytes(device)
    finally:
        generation.llm.sleep(level=2)
    return max(0, before - awake)


def _free_bytes(device: torch.device) -> int:
    _device.synchronize(device)  # what the engine frees waits for its streams
    room = _device.device_room(device)
    assert room is not None
    return room[0]
