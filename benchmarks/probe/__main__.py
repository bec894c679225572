"""The command: ``python -m benchmarks.probe [--small] [--simulated] [name ...]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.probe import machine, same_bits, training
from benchmarks.probe.probed import ProbedDevice
from residency import _device
from residency.testing import simulated_device_type

_EXIT_FAILED, _EXIT_NOTHING = 1, 2
PROBES: MappingProxyType[str, Callable[[ProbedDevice], None]] = MappingProxyType(
    {
        "machine": machine.machine,
        "starts_nothing": machine.starts_nothing,
        "pinned_memory": machine.pinned_memory,
        "link": machine.link,
        "threads": machine.threads,
        "steps": same_bits.steps,
        "scaled_steps": same_bits.scaled_steps,
        "snapshots": training.snapshots,
        "checkpoints": training.checkpoints,
        "figures": training.figures,
        "hand_offs": training.hand_offs,
        "captured_steps": training.captured_steps,
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the probes that are named, or all; returns 1 where a line says FAIL."""
    options = _options(arguments)
    if options.simulated:
        from residency import sim

        sim.enable(device="cuda")
    device = _device.accelerator()
    if device is None:
        print("There is no accelerator here; --simulated takes the simulated one.", file=sys.stderr)
        return _EXIT_NOTHING
    with tempfile.TemporaryDirectory(prefix="residency-probe-", dir=options.folder) as folder:
        bench = ProbedDevice(device, Path(folder), options.small)
        for name in options.names or PROBES:
            bench.run(name, PROBES[name])
    bench.info("lines that say FAIL", str(bench.num_failed))
    return _EXIT_FAILED if bench.num_failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probe",
        description="Tests this machine for the library's needs: lines of PASS, FAIL and INFO.",
        epilog="Exit status 0 when no line says FAIL, 1 when one does, 2 without an accelerator.",
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"of: {', '.join(PROBES)}")
    parser.add_argument("--small", action="store_true", help="sizes for a processor: seconds")
    parser.add_argument(
        "--simulated",
        action="store_true",
        default=simulated_device_type() == "cuda",
        help="on the simulated accelerator in CUDA's place",
    )
    parser.add_argument(
        "--folder", help="folder for the files; else the current folder", default="."
    )
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(PROBES)):
        parser.error(f"there is no {', '.join(unknown)}; the probes are {', '.join(PROBES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
