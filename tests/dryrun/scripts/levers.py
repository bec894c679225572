"""Trains eight layers, and does one more thing that takes memory, by the first argument.

Its weights are W = 128 MiB, its gradients as much, its state twice as much. A comment ``# +`` says
which lines of an answer belong there, and ``# -`` which take the place of those up to the next one.
"""

import argparse
import copy
import sys
import threading

import torch
from torch import nn

# + import, from
step, folder, file = 2, "saves", "saved.pt"
parser = argparse.ArgumentParser()
parser.add_argument("does")
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulation", type=int, default=1)
if "--gradient-checkpointing" in sys.argv:  # a script that recomputes, as far as anybody can see
    parser.add_argument("--gradient-checkpointing", action="store_true")
args = parser.parse_args()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.Linear(args.width, args.width, bias=False) for _ in range(8)]
    blocks = [nn.Sequential(layer, nn.GELU()) for layer in layers]
    model = nn.Sequential(*blocks).cuda()
    # + for block
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    # + residency.offload_optimizer
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(args.accumulation):
        model(torch.ones(args.batch_size, args.width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():  # an input, and two outputs of a layer, are 2.4 W each
        model(torch.ones(40_000, args.width, device="cuda"))


model, optimizer = make()
train(model, optimizer)
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
if args.does == "copies":
    # - checkpointer = , checkpointer.save
    copied = {name: value.clone() for name, value in state["model"].items()}
    moments = copy.deepcopy(state["optimizer"])
    saving = threading.Thread(target=torch.save, args=([copied, moments], file))
    saving.start()
    saving.join()
    # -
elif args.does == "pieces":
    torch.cuda.empty_cache()
    kept = []
    for size in range(100, 160, 10):  # none has room beside what was put in the place of the last
        torch.empty(size << 20, dtype=torch.uint8, device="cuda")
        kept.append(torch.empty(24 << 20, dtype=torch.uint8, device="cuda"))
    del kept
elif args.does == "evaluates":
    # - with residency.parked
    if True:
        # -
        evaluate(model)
elif args.does.startswith("resumes"):
    # - checkpointer = , checkpointer.save
    torch.save(state, file)
    # -
    del model, optimizer, state
    model, optimizer = make()
    # - checkpointer.restore
    saved = torch.load(file, map_location="cuda")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if args.does == "resumes-and-evaluates":
        del saved  # else it is held until the end, as most scripts do
    # -
    if args.does == "resumes-and-evaluates":
        evaluate(model)
train(model, optimizer)
