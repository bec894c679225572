"""Previews in the middle of training: the optimizer's state waits on the host meanwhile.

python examples/recipes/previews.py
"""

import re

import torch
from torch import nn

import residency

if not torch.accelerator.is_available():
    residency.sim.enable("352MiB")  # a simulated device; compiled once, for about a minute
device = torch.accelerator.current_accelerator()
memory = torch.accelerator.memory_allocated
held = []  # at the beginning of each preview


def mib(num_bytes):
    return f"{num_bytes / 2**20:.2f} MiB"


def preview(model):
    """Draws noise and runs the model over it, with a large canvas, as a sampler does."""
    held.append(memory())
    with torch.no_grad():
        canvas = torch.zeros(240 << 20, dtype=torch.uint8, device=device)
        model(torch.randn(16, 2048, device=device))
        return canvas[0]


def train(between):
    """Takes six steps; returns the parameters and the optimizer's state, on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Dropout(0.1), nn.Linear(2048, 2048)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(6):
        model(torch.randn(16, 2048, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            between(model, optimizer, step)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu() for tensor in (*model.parameters(), *states)]


def no_preview(model, optimizer, step):
    pass


def stock_preview(model, optimizer, step):
    preview(model)


def parked_preview(model, optimizer, step):
    before = memory()
    with residency.parked(optimizer, fork_rng=True):
        preview(model)
    after = memory()
    print(f"step {step}: held {mib(before)}, in the preview {mib(held[-1])}, after {mib(after)}")
    assert held[-1] < before == after


def main():
    expected = train(no_preview)
    try:
        train(stock_preview)
        print("stock: the preview fits on this device")
    except torch.OutOfMemoryError as error:
        asked, free = re.findall(r"(?:allocate|which) ([\d.]+ \wiB)", str(error))
        print(f"stock: out of memory, {asked} for a preview and {free} free")
    found = train(parked_preview)
    assert all(map(torch.equal, found, expected))
    print(f"the same bits as without previews: {len(found)} tensors of {len(expected)}")


if __name__ == "__main__":
    main()
