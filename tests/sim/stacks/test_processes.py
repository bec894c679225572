"""Processes beside one that uses the device: workers that load data, forked children, spawned ones,
and processes that end at once.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from residency import sim

pytestmark = [
    pytest.mark.sim,
    # Python 3.12 warns of any fork beside threads; torch's own workers are forks.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.mark.parametrize(("num_workers", "start"), [(0, None), (2, "fork"), (1, "spawn")], ids=str)
def test_batches_come_pinned_and_copy_without_blocking(
    device: torch.device, num_workers: int, start: str | None
) -> None:
    numbers = torch.arange(64.0).view(16, 4)
    loader = DataLoader(
        TensorDataset(numbers),
        batch_size=4,
        pin_memory=True,
        num_workers=num_workers,
        multiprocessing_context=start,
    )
    torch.ones(1, device=device)  # the parent of the workers uses the device
    found = []
    for (batch,) in loader:
        assert batch.is_pinned()
        found.append(batch.to(device, non_blocking=True).mul_(2.0))
    assert torch.equal(torch.cat(found).cpu(), numbers * 2.0)


# ------------------------------------------------------------------------------------------- fork

FORKS = """
import os, sys
import torch
from residency import sim

def answer_of(action, leave=os._exit):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(action())
        except Exception as error:
            answer = type(error).__name__ + ": " + str(error)
        os.write(writer, answer.encode())
        leave(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return answer

device = sim.enable("1GiB", check_races=True)
# A child of a process that has not used the device yet may use it, as on CUDA.
assert answer_of(lambda: torch.ones(3, device=device).sum().item()) == "3.0"
assert torch.sim.is_initialized() and not torch.sim._is_in_bad_fork()

held = torch.arange(4.0, device=device, requires_grad=True)
pinned = torch.ones(4).pin_memory()
stream, event = torch.Stream(device=device), torch.Event(device)
event.record()
uses = {
    "make": lambda: torch.ones(3, device=device),
    "compute": lambda: held * 2,
    "write": lambda: held.detach().add_(1.0),
    "read": lambda: held[0].item(),
    "copy": lambda: held.cpu(),
    "copy to": lambda: held.detach().copy_(torch.ones(4)),
    "pin": lambda: torch.ones(4).pin_memory(),
    "stream": lambda: torch.Stream(device=device),
    "record": lambda: event.record(),
    "wait": lambda: event.synchronize(),
    "synchronize": lambda: torch.accelerator.synchronize(),
    "figures": lambda: torch.accelerator.get_memory_info(),
    "init": lambda: torch.sim.init(),
    "settings": lambda: sim.enable("2GiB"),
}
for name, use in uses.items():
    answer = answer_of(use)
    assert "Cannot re-initialize" in answer and "in forked subprocess" in answer, (name, answer)
    assert "'spawn'" in answer and "Exception raised from" not in answer, (name, answer)
harmless = {
    "ask": (lambda: (torch.sim._is_in_bad_fork(), torch.sim.is_initialized()), "(True, False)"),
    "seed": (lambda: torch.manual_seed(1).initial_seed(), "1"),
    "host": (lambda: (pinned + 1).sum().item(), "8.0"),
    "figures": (lambda: torch.accelerator.memory_allocated(), "0"),
    "free": (lambda: (globals().pop("held"), torch.accelerator.empty_cache())[1], "None"),
    "fork": (lambda: answer_of(lambda: torch.sim._is_in_bad_fork()), "True"),
}
for name, (use, expected) in harmless.items():
    answer = answer_of(use)
    assert answer == expected, (name, answer)
assert answer_of(lambda: "", leave=sys.exit) == ""  # the end of the interpreter frees its tensors
assert held.tolist() == [0.0, 1.0, 2.0, 3.0]
print("done")
"""


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.whole
def test_a_forked_child_is_refused_the_device_and_harms_nothing() -> None:
    assert _run("-W", "ignore::DeprecationWarning", "-c", FORKS) == "done\n"


SPAWN = """
import torch
import torch.multiprocessing as multiprocessing
from residency import sim

def train(answers):
    device = sim.enable("64MiB", schedule="overtake")
    weight = torch.ones(3, device=device, requires_grad=True)
    weight.square().sum().backward()
    answers.put((weight.grad.tolist(), torch.accelerator.get_memory_info()[1]))

if __name__ == "__main__":
    device = sim.enable("1GiB")
    held = torch.ones(3, device=device)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=train, args=(answers,))
    child.start()
    print(answers.get())
    child.join()
    assert child.exitcode == 0
"""


@pytest.mark.whole
def test_a_spawned_child_enables_a_device_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWN)
    assert _run(str(script)) == f"([2.0, 2.0, 2.0], {64 << 20})\n"


# -------------------------------------------------------------------------------------------- end

# Autograd's thread may come for the interpreter's lock while the interpreter ends: without the cure
# in python.cpp four of ten such processes abort. (Forked ones never do, so each is a whole one.)
ENDS = """
import torch
from residency import sim

sim.enable("1GiB")
weight = torch.ones(8, 8, device="sim", requires_grad=True)
(weight @ weight).sum().backward()
"""


@pytest.mark.parametrize(
    "count", [2, *(pytest.param(count, marks=pytest.mark.whole) for count in (4, 60))]
)
def test_processes_that_end_right_after_backward_end_quietly(
    count: int, patient_ends: None
) -> None:
    sim.enable()  # builds the extension if need be
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda _: _run("-c", ENDS), range(count)))
    assert outputs == [""] * count
