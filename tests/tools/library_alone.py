"""Uses the library where no simulator is installed: ``make release-check`` runs it, and a test."""

from __future__ import annotations

import importlib
import tempfile

import torch

import residency
from residency import sim

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
was = {name: tensor.clone() for name, tensor in model.state_dict().items()}
state = {"model": model, "optimizer": optimizer}
with tempfile.TemporaryDirectory() as folder, residency.Checkpointer(folder) as checkpointer:
    checkpointer.save(1, state).wait()
    torch.nn.init.zeros_(model.weight)
    assert checkpointer.restore(state) == 1
assert all(torch.equal(was[name], tensor) for name, tensor in model.state_dict().items())
assert not hasattr(sim, "nothing")
try:
    sim.enable()
except sim.BuildError as error:
    print(error)
try:
    importlib.import_module("residency.sim.compat")
except ModuleNotFoundError as error:
    print(error)
