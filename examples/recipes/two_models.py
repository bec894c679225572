"""Two models with optimizers take turns on a card that has room for one of them.

python examples/recipes/two_models.py
"""

import gc
import re

import torch
from torch import nn

import residency

if not torch.accelerator.is_available():
    residency.sim.enable("208MiB")  # a simulated device; compiled once, for about a minute
device = torch.accelerator.current_accelerator()
memory = torch.accelerator.memory_allocated


def mib(num_bytes):
    return f"{num_bytes / 2**20:.2f} MiB"


def make(seed):
    """Returns a model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 2048)).to(device)
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def train(model, optimizer, turn):
    """Takes two steps."""
    torch.manual_seed(turn)
    for _ in range(2):
        model(torch.randn(16, 2048, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def leave(*owners):
    for owner in owners:
        residency.park(owner)


def enter(*owners):
    for owner in owners:
        residency.unpark(owner)


def take_turns():
    """Trains a writer and a judge in turns; returns both, on the host."""
    writer, judge = make(seed=1), None
    for turn in range(3):
        enter(*writer)
        train(*writer, turn)
        print(f"turn {turn}: the writer has the device, {mib(memory())} held", end="")
        leave(*writer)
        judge = judge or make(seed=2)
        enter(*judge)
        train(*judge, turn)
        print(f"; then the judge, {mib(memory())}")
        leave(*judge)
    return [bits(*writer), bits(*judge)]


def stay_together():
    """Trains both in turns as stock code does, with both on the device."""
    writer, judge = make(seed=1), make(seed=2)
    for turn in range(3):
        train(*writer, turn)
        train(*judge, turn)


def alone(seed):
    """Trains one of them alone."""
    model, optimizer = make(seed)
    for turn in range(3):
        train(model, optimizer, turn)
    return bits(model, optimizer)


def bits(model, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu() for tensor in (*model.parameters(), *states)]


def main():
    try:
        stay_together()
        print("stock: both fit on this device")
    except torch.OutOfMemoryError as error:
        asked, free = re.findall(r"(?:allocate|which) ([\d.]+ \wiB)", str(error))
        print(f"stock: out of memory with both, {asked} asked for and {free} free")
    gc.collect()
    found = take_turns()
    for name, of_one, seed in zip(("writer", "judge"), found, (1, 2), strict=True):
        assert all(map(torch.equal, of_one, alone(seed)))
        print(f"the {name} has the bits of a run alone: {len(of_one)} tensors")


if __name__ == "__main__":
    main()
