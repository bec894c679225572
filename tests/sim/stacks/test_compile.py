"""``torch.compile`` on the device: runs eagerly, says so once, and leaves other devices alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.sim

SCRIPT = """
import torch
from residency import sim

device = sim.enable("1GiB", check_races=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
model.to(device)
batch = torch.linspace(-1, 1, 24).view(3, 8).to(device)

def gradients(function):
    model.zero_grad()
    function(batch).sum().backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]

plain = gradients(model)
for options in ({}, {"mode": "reduce-overhead"}, {"backend": "aot_eager"}, {"fullgraph": True}):
    torch._dynamo.reset()
    found = gradients(torch.compile(model, **options))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), options

@torch.compile
def make(count):
    return torch.ones(count, device="sim") + 1

assert make(3).tolist() == [2.0, 2.0, 2.0]  # no tensor goes in

graphs = []
def own(graph, inputs):
    graphs.append(graph)
    return graph.forward

torch._dynamo.reset()
assert all(torch.equal(a, b) for a, b in zip(gradients(torch.compile(model, backend=own)), plain))
assert len(graphs) == 1  # a compiler of the program's own is called

from torch._dynamo.utils import counters

counters.clear()
assert torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.zeros(3)).sum() == 3.0
assert counters["aot_autograd"]["ok"] == 1  # the CPU's functions are compiled
print("done")
"""


@pytest.mark.whole
def test_compiled_functions_run_eagerly_and_one_warning_says_so() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr.count("compiles nothing for the simulated accelerator") == 1, done.stderr
    assert done.stderr.count("Warning") == 1, done.stderr
