"""``residency doctor``: describes this machine, for a report of a bug."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import residency
from residency import sim
from residency._errors import ResidencyError
from residency._system import num_processors
from residency._units import MIB, format_bytes

_PACKAGES = ("accelerate", "diffusers", "lightning", "peft", "transformers", "trl", "vllm")
_SETTINGS = re.compile(r"RESIDENCY_|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|CUDA_(VISIBLE|LAUNCH)|CUBLAS_")
_COPIED_BYTES = 128 * MIB
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def add_parser(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Adds the verb to the command line, with the options that all verbs have in common."""
    parser = verbs.add_parser(
        "doctor",
        parents=[common],
        help="describe this machine in ten lines, for a report of a bug",
        description=(
            "Prints versions, the device, the measured rate of its link, host memory and its "
            "limits, whether the simulated accelerator is compiled or can be, and the settings "
            "that are set. It takes 128 MiB of the device while it measures."
        ),
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Prints the lines and returns the exit status."""
    for name, find in _LINES.items():
        try:
            text = find()
        # A machine on which something is broken is the one that a report describes.
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"{name:<12} {text}")
    return 0


def _versions() -> str:
    import torch

    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return (
        f"residency {residency.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {system}"
    )


def _device_line() -> str:
    import torch

    from residency import _device

    device = _device.accelerator()
    if device is None:
        return "none; dry runs and residency.sim need none"
    names = torch.get_device_module(device)
    name = names.get_device_name(device) if hasattr(names, "get_device_name") else device.type
    room = _device.device_room(device)
    memory = "" if room is None else ", {} free of {}".format(*map(format_bytes, room))
    return f"{torch.accelerator.device_count()} x {name}{memory}"


def _link() -> str:
    from residency import _device
    from residency._transfer import link_rates

    device = _device.accelerator()
    if device is None:
        return "no device"
    rates = link_rates(device, _COPIED_BYTES)
    to_device, from_device = (format_bytes(round(each)) for each in rates)
    simulated = ", both simulated" if _device.is_simulated() else ""
    return f"{to_device}/s to the device, {from_device}/s from it{simulated}"


def _host() -> str:
    from residency._transfer import available_host_bytes

    available = available_host_bytes()
    memory = "unknown" if available is None else format_bytes(available)
    return f"{memory} can be had, {num_processors()} processors"


def _page_locked() -> str:
    from residency._transfer import locked_limit

    return f"{locked_limit()} by ulimit -l; CUDA's own page-locking is mostly not counted there"


def _huge_pages() -> str:
    text = _HUGE_PAGES.read_text() if _HUGE_PAGES.exists() else "[this system has none]"
    return f"transparent: {text[text.index('[') + 1 : text.index(']')]}"


def _compiler() -> str:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        return f"no {command[0]}; the library alone needs none"
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    return run.stdout.partition("\n")[0]


def _simulator() -> str:
    try:
        is_built = sim.is_built()
    except ResidencyError as error:
        return str(error)
    if is_built:
        return "compiled for this torch and Python"
    return "is compiled at its first use, in one to three minutes"


def _packages() -> str:
    found = {each: _installed(each) for each in _PACKAGES}
    return ", ".join(f"{name} {found[name]}" for name in found if found[name]) or "none"


def _settings() -> str:
    found = [f"{name}={value}" for name, value in os.environ.items() if _SETTINGS.match(name)]
    return " ".join(sorted(found)) or "none"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


_LINES: dict[str, Callable[[], str]] = {
    "versions": _versions,
    "device": _device_line,
    "link": _link,
    "host memory": _host,
    "page-locked": _page_locked,
    "huge pages": _huge_pages,
    "compiler": _compiler,
    "simulator": _simulator,
    "packages": _packages,
    "settings": _settings,
}
