"""Trains, saves by torch.distributed.checkpoint, and resumes, with an evaluation first.

Its weights are W = 128 MiB, or a rank's half of 256. A comment ``# +`` says which lines of an
answer belong there, and ``# -`` which take the place of those up to the next one.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

# + from
parser = argparse.ArgumentParser()
parser.add_argument("form", choices=("recipe", "stateful"))
args = parser.parse_args()
folder = "checkpoint"
is_sharded = "WORLD_SIZE" in os.environ
num_layers = 16 if is_sharded else 8
if is_sharded:
    dist.init_process_group("nccl")


class App:
    """The state of an application, as torch's tutorial has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state: dict) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict(self.model, self.optimizer, **parts)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(num_layers))).cuda()
    if is_sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(16, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


model, optimizer = make()
# + state =
train(model, optimizer)
# - dcp.save
app = App(model, optimizer)
dcp.save(app.state_dict() if args.form == "recipe" else {"app": app}, checkpoint_id=folder)
del app
# -
del model, optimizer
state = None
model, optimizer = make()
# + state =
# - dcp.load
app = App(model, optimizer)
if args.form == "recipe":
    found = app.state_dict()
    dcp.load(found, checkpoint_id=folder)
    app.load_state_dict(found)
    del found
else:
    dcp.load({"app": app}, checkpoint_id=folder)
# -
with torch.no_grad():  # an input, and two outputs of a layer, are 2.4 W each
    model(torch.ones(40_000, 2048, device="cuda"))
train(model, optimizer)
