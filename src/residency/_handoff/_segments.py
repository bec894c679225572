"""The one place that turns expandable segments on or off around a hand-off.

An allocator whose segments grow leaves few bytes stuck, and some who share a device cannot live
with it: memory that other processes map by handle, and libraries that unmap a pool of their own.
Engines therefore turn it off around the hand-off and on again after it. Memory that is
allocated meanwhile keeps its kind of segment.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from residency import _device
from residency._errors import RefusedError
from residency._memory import has_growing_segments
from residency._registries import Turns

_NAME = "expandable_segments"
# Modules that manage device memory of their own and are inert, or fail, when segments grow.
_OPPOSED = {
    "torch_memory_saver": "torch_memory_saver frees nothing then (its issue #24)",
    "vllm.device_allocator.cumem": "vLLM's sleeping allocator frees nothing then (its #11743)",
}


_toggle = Turns()  # the setting is the process's, not the device's


def is_expandable(device: torch.device) -> bool:
    """Returns whether the allocator's segments grow: by its settings, else by what it has.

    Torch tells the settings that it was given last, and keeps this one where they do not name it.
    An older one tells nothing: then what a library may have changed since the process began shows
    in what the allocator has.
    """
    named = _parse(_device.allocator_settings()).get(_NAME)
    if named is None or not _device.tells_settings():
        seen = has_growing_segments(device)
        return named == "True" if seen is None else seen
    return named == "True"


@contextmanager
def expandable_segments(device: torch.device, wanted: bool | None) -> Iterator[None]:
    """Lets new segments of the allocator grow, or not, for a while; None leaves it as it is.

    Args:
        device: The accelerator whose allocator it is.
        wanted: Whether they are to grow.

    Raises:
        RefusedError: As `require_settable`, or the allocator does not take it.
    """
    if wanted is None:
        yield
        return
    require_settable(device, wanted)
    turn = _toggle.take(_NAME)
    if turn is None:
        raise RefusedError(
            "Another hand-off has changed `expandable_segments` until it ends; wait for its end."
        )
    settings = _parse(_device.allocator_settings())
    # What was not named before keeps what it is given now.
    settings_before = _compose(settings | {_NAME: str(is_expandable(device))})
    # With the turn, should an interrupt come before it is called.
    restore = weakref.finalize(turn, _device.set_allocator_settings, settings_before)
    restore.atexit = False
    try:
        _device.set_allocator_settings(_compose(settings | {_NAME: str(wanted)}))
    except Exception:
        restore.detach()  # the allocator takes none
        raise
    try:
        yield
    finally:
        restore()
        turn.is_over = True


def require_settable(device: torch.device, wanted: bool | None) -> None:
    """Checks that the setting may be changed.

    Raises:
        RefusedError: The allocator is not torch's own, or a library that is loaded cannot work
            with segments that grow.
    """
    if wanted is None:
        return
    if (
        device.type == "cuda"
        and torch.get_device_module(device).get_allocator_backend() != "native"
    ):
        raise RefusedError(
            "The allocator is not torch's own caching allocator, which alone has segments that "
            "grow. Nothing was changed; leave `expandable_segments` out."
        )
    for module, reason in _OPPOSED.items() if wanted else ():
        if module in sys.modules:
            raise RefusedError(
                f"Segments cannot be made to grow while {module} is loaded: {reason}. "
                "Nothing was changed; leave `expandable_segments` out."
            )


def _parse(settings: str) -> dict[str, str]:
    """Returns an allocator's settings by name; values may be lists in brackets, with commas."""
    found: dict[str, str] = {}
    name, depth, word = "", 0, ""
    for char in settings + ",":
        depth += (char == "[") - (char == "]")
        if char == ":" and not depth and not name:
            name, word = word.strip(), ""
        elif char == "," and not depth:
            if name:
                found[name] = word.strip()
            name, word = "", ""
        else:
            word += char
    return found


def _compose(settings: dict[str, str]) -> str:
    return ",".join(f"{name}:{value}" for name, value in settings.items())
