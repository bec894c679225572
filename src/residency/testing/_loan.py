"""A device for the time of one test: empty and at rest before it, as it was found after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from residency import _device, sim
from residency._errors import BuildError, InvalidArgumentError, RefusedError
from residency._units import format_bytes
from residency.testing._rest import finish_work, give_back, queued_work_error


class Lender:
    """A lender of the device to one test after another, with what it must know between them.

    The tensors of a failed test live on in its traceback, which pytest keeps until the next test.
    Where they stand in the way of the settings from before it, those come back with the next test.
    """

    def __init__(self, show_build: Callable[[], AbstractContextManager[None]]) -> None:
        """Starts with nothing to remember.

        Args:
            show_build: Makes a block in which stderr reaches the terminal.
        """
        self._show_build = show_build
        self._build_error: BuildError | None = None
        self._owed_settings: dict[str, Any] | None = None
        self._has_lane = False

    @contextmanager
    def lend_simulated(self, options: Mapping[str, object]) -> Iterator[torch.device]:
        """Enables the simulated accelerator with these options of ``sim.enable`` for a block.

        Raises:
            BuildError: It cannot be built here. A compiler is asked only once.
            InvalidArgumentError: An option is invalid, or tensors from outside the block need
                more than it gives.
            RefusedError: Tensors that the block left behind need more than the settings from
                before it give.
            QueuedWorkError: Work failed that was queued before the block, or towards its end.
        """
        self.come_to_rest()
        settings = sim.settings() if sim.is_enabled() else {}
        device = self._enable(options)
        try:
            with _at_rest_after():
                yield device
        finally:
            self._owed_settings = settings
            self._restore()

    @contextmanager
    def lend_real(self, device_type: str, limit_bytes: int | None) -> Iterator[torch.device]:
        """Takes the real accelerator for a block, and limits what torch may allocate on it.

        Raises:
            RefusedError: There is none of this type here, or it cannot be limited so.
            QueuedWorkError: Work failed that was queued before the block, or towards its end.
        """
        found = _device.accelerator()
        if found is None or found.type != device_type:
            raise RefusedError(
                f"RESIDENCY_TEST_DEVICE is {device_type!r}, and torch finds "
                f"{'no accelerator' if found is None else repr(found.type)} in this process. "
                "Unset it to test on the simulated accelerator."
            )
        self.come_to_rest()
        total_bytes = _device.memory_info(found)[1]
        if limit_bytes is not None:
            _limit(found, limit_bytes, total_bytes)
        try:
            with _at_rest_after():
                yield found
        finally:
            _device.limit_memory(total_bytes, found)

    def come_to_rest(self) -> None:
        """Makes the device as a test should find it, and pays the settings that are owed.

        Raises:
            QueuedWorkError: Work failed that no call had waited for.
            RefusedError: Tensors need more than the owed settings give.
        """
        failures = finish_work()
        if give_back() > 0 and _has_failure():
            for name in ("last_exc", "last_type", "last_value", "last_traceback"):
                sys.__dict__.pop(name, None)  # pytest does so itself, a moment later
            give_back()
        if self._owed_settings is not None:
            self._restore()
        if failures:
            raise queued_work_error("before this test", failures)

    @property
    def owes_settings(self) -> bool:
        """Whether settings from before an earlier test are still to come back."""
        return self._owed_settings is not None

    def bring(self, options: Mapping[str, object]) -> None:
        """Enables the simulated accelerator for good, with these options of ``sim.enable``.

        Where it cannot be built, the tests that take it say so.

        Raises:
            InvalidArgumentError: An option is invalid.
            SimulatorError: A real device is in its place.
        """
        with suppress(BuildError):
            self._enable(options)

    def _restore(self) -> None:
        try:
            sim.enable(**self._owed_settings or {})
        except InvalidArgumentError as error:
            if _has_failure():
                return  # still owed
            self._owed_settings = None
            raise RefusedError(
                f"A test left tensors behind, so that the settings from before it cannot come "
                f"back: {error}"
            ) from None
        self._owed_settings = None

    def _enable(self, options: Mapping[str, Any]) -> torch.device:
        if self._build_error is not None:
            raise self._build_error
        try:
            if sim.is_enabled():
                device = sim.enable(**options)
            else:
                with self._show_build():
                    device = sim.enable(**options)
        except BuildError as error:
            self._build_error = error
            raise
        if not self._has_lane:
            # From the second stream on kernels are queued, too: a test must not depend on whether
            # one before it has made a stream.
            torch.Stream(device=device)
            self._has_lane = True
        return device


@contextmanager
def _at_rest_after() -> Iterator[None]:
    stream = torch.accelerator.current_stream()
    try:
        yield
    finally:
        torch.accelerator.set_stream(stream)
        failures = finish_work()
        give_back()
        if failures:
            raise queued_work_error("towards the end of this test", failures)


def _has_failure() -> bool:
    """Returns whether pytest keeps the last test's traceback, which keeps its tensors alive."""
    return getattr(sys, "last_traceback", None) is not None


def _limit(device: torch.device, limit_bytes: int, total_bytes: int) -> None:
    if limit_bytes > total_bytes:
        raise RefusedError(
            f"device_memory(limit) is {format_bytes(limit_bytes)}, and the device has "
            f"{format_bytes(total_bytes)}. Run the test on a larger one, or on the simulated one."
        )
    if not _device.limit_memory(limit_bytes, device):
        raise RefusedError(
            f"device_memory(limit) cannot be kept: torch limits the memory of CUDA devices only, "
            f"and this is {device.type!r}. Run the test on the simulated accelerator."
        )
