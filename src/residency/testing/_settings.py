"""What a test asks of its device, put together from the project's defaults and the test's markers,
and checked before anything happens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from residency._errors import InvalidArgumentError
from residency._units import parse_bytes

SCHEDULES = ("late", "overtake", "eager")  # as residency.sim has them, without importing torch
ALL = "all"

_VARIABLE = "RESIDENCY_TEST_DEVICE"
_AS_CUDA = "sim-as-cuda"
_SIM_OPTIONS = frozenset(
    {"capacity", "check_races", "clock", "context", "dry", "schedule", "share", "workspaces"}
)
_MEMORY_OPTIONS = frozenset({"growth", "limit"})


def tested_device_type() -> str:
    """Returns the type of the device that tests run on, by ``RESIDENCY_TEST_DEVICE``."""
    return simulated_device_type() or os.environ[_VARIABLE]


def simulated_device_type() -> str | None:
    """Returns the type that the simulated accelerator has, None if tests run on a real one."""
    return {"": "sim", "sim": "sim", _AS_CUDA: "cuda"}.get(os.environ.get(_VARIABLE, ""))


def name_device(name: str) -> bool:
    """Makes the simulated accelerator ``sim`` or ``cuda`` where the variable says nothing.

    Returns:
        Whether the variable was set for that, which processes of the tests inherit.

    Raises:
        InvalidArgumentError: It is neither.
    """
    if name not in ("sim", "cuda"):
        raise InvalidArgumentError(f"residency_device is {name!r}; expected sim or cuda.")
    is_set = name == "cuda" and not os.environ.get(_VARIABLE)
    if is_set:
        os.environ[_VARIABLE] = _AS_CUDA
    return is_set


def forget_name() -> None:
    """Takes back what ``name_device`` set."""
    os.environ.pop(_VARIABLE, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The settings that one test asks for.

    Attributes:
        sim_options: Arguments of ``residency.sim.enable``, those that were given.
        limit: The size that ``device_memory`` gave as the limit, as it was written; None without.
        growth: The size that ``device_memory`` allows the test to leave behind, None without.
    """

    sim_options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | str | None = None
    growth: int | str | None = None

    @property
    def has_budget(self) -> bool:
        """Whether ``device_memory`` asks for anything."""
        return self.limit is not None or self.growth is not None

    @property
    def limit_bytes(self) -> int | None:
        """The limit in bytes."""
        return None if self.limit is None else parse_bytes(self.limit, name="limit")

    @property
    def growth_bytes(self) -> int | None:
        """The growth in bytes."""
        return None if self.growth is None else parse_bytes(self.growth, name="growth")


def make_request(
    sim_options: Iterable[Mapping[str, Any]], memory_options: Iterable[Mapping[str, Any]]
) -> Request:
    """Puts options together, later ones over earlier ones.

    Raises:
        InvalidArgumentError: An option does not exist or is invalid, or two contradict.
    """
    sim = _merged("sim_device", sim_options, _SIM_OPTIONS)
    memory = _merged("device_memory", memory_options, _MEMORY_OPTIONS)
    request = Request(sim_options=sim, limit=memory.get("limit"), growth=memory.get("growth"))
    if request.limit_bytes is not None and "capacity" in sim:
        raise InvalidArgumentError(
            f"sim_device(capacity={sim['capacity']!r}) and device_memory(limit={request.limit!r}) "
            "both say how many bytes the device has; keep one of them."
        )
    _ = request.growth_bytes  # refused now if it is invalid
    for name in ("capacity", "context"):
        if sim.get(name) is not None:
            parse_bytes(sim[name], name=name)
    return request


def _merged(
    marker: str, options: Iterable[Mapping[str, Any]], known: frozenset[str]
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for given in options:
        if not isinstance(given, Mapping):
            raise InvalidArgumentError(
                f"The parameter of {marker} is {given!r}; expected a mapping of settings, such as "
                "{'schedule': 'late'}."
            )
        merged |= given
    unknown = sorted(set(merged) - known)
    if unknown:
        more = " A process has one device: residency_device = cuda, in pytest's configuration, has "
        more += "code that says 'cuda' find it."
        raise InvalidArgumentError(
            f"{marker} does not know {', '.join(unknown)}; it takes {', '.join(sorted(known))}."
            + more * ("device" in unknown)
        )
    return merged


def expand_schedules(given: str | Sequence[str]) -> list[str]:
    """Returns the schedules that a name, several names, or ``"all"`` stands for.

    Raises:
        InvalidArgumentError: One is unknown, or there is none.
    """
    names: list[str] = (
        list(SCHEDULES) if given == ALL else [given] if isinstance(given, str) else list(given)
    )
    if not names or not set(names) <= set(SCHEDULES):
        raise InvalidArgumentError(
            f"schedule is {given!r}; expected one or several of "
            f"{', '.join(map(repr, SCHEDULES))}, or 'all'."
        )
    return names
