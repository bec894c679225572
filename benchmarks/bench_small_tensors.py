"""Times saves and restores of many small tensors beside `torch.save` and `torch.load`.

A ``ParameterList`` of 1024 floats each and an AdamW, offloaded in the one case, so that of each
parameter four tensors are saved. On the simulated accelerator the schedule is ``eager`` and what
counts is the processor's time of all threads, garbage collections included: the disk has no say.
The two take turns, after one turn that does not count; the median of some rounds is shown.

`torch.load` comes with `load_state_dict` of the module and of the optimizer. Each restore is into
objects that have not stepped, as a run that begins again has them.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import residency

COUNTS = (10, 100, 1_000, 4_000)
WIDTH = 1024
_MOST_ROUNDS = 25
_ROUND_TENSORS = 20_000  # about as many in all rounds together


class Training:
    """A module of many parameters and its optimizer."""

    def __init__(
        self, count: int, device: torch.device, *, is_offloaded: bool, is_born: bool
    ) -> None:
        self.model = nn.ParameterList(
            nn.Parameter(torch.ones(WIDTH, device=device)) for _ in range(count)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if is_offloaded:
            residency.offload_optimizer(self.optimizer)
        if is_born:
            for parameter in self.model:
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}


def main() -> None:
    """Prints the time per parameter of each case, and the ratios."""
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = residency.sim.enable("4GiB", schedule="eager")
    print(
        f"parameters of {WIDTH} float32 on {device.type}, AdamW: four tensors saved of each; "
        "processor time, medians"
    )
    print(f"{'':11}{'SAVE, us per parameter':>36}{'RESTORE, us per parameter':>42}")
    names = f"{'torch.save':>14}{'residency':>12}{'ratio':>8}"
    print(f"{'parameters':11}{names}{'torch.load':>20}{'residency':>12}{'ratio':>8}   rounds")
    for count in COUNTS:
        with tempfile.TemporaryDirectory(prefix="residency-bench-") as folder:
            print(_row(count, device, Path(folder)), flush=True)


def _row(count: int, device: torch.device, folder: Path) -> str:
    plain = Training(count, device, is_offloaded=False, is_born=True)
    offloaded = Training(count, device, is_offloaded=True, is_born=True)
    num_rounds = max(5, min(_MOST_ROUNDS, _ROUND_TENSORS // count))
    times: dict[str, list[float]] = {}
    with residency.Checkpointer(folder / "ours", keep=2) as checkpointer:
        for index in range(num_rounds + 1):
            step = index + 1
            fresh = [
                Training(count, device, is_offloaded=each, is_born=False) for each in (False, True)
            ]
            calls: dict[str, Callable[[], object]] = {
                "torch.save": lambda: _torch_save(plain, folder / "state.pt"),
                "save": lambda step=step: checkpointer.save(step, offloaded.state).wait(),
                "torch.load": lambda fresh=fresh: _torch_load(fresh[0], folder / "state.pt"),
                "restore": lambda fresh=fresh: checkpointer.restore(fresh[1].state),
            }
            for name, call in calls.items():
                seconds = _processor_seconds(call)
                if index:
                    times.setdefault(name, []).append(seconds)
    us = {name: statistics.median(found) / count * 1e6 for name, found in times.items()}
    pairs = (("torch.save", "save", 14), ("torch.load", "restore", 20))
    cells = "".join(
        f"{us[stock]:{width}.0f}{us[ours]:12.0f}{us[ours] / us[stock]:7.2f}x"
        for stock, ours, width in pairs
    )
    return f"{count:<11}{cells}{num_rounds:9}"


def _torch_save(training: Training, path: Path) -> None:
    torch.save({name: each.state_dict() for name, each in training.state.items()}, path)


def _torch_load(training: Training, path: Path) -> None:
    saved = torch.load(path, weights_only=True)
    for name, each in training.state.items():
        each.load_state_dict(saved[name])


def _processor_seconds(call: Callable[[], object]) -> float:
    gc.collect()  # what others left behind is not of this call
    begin = time.process_time()
    call()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
