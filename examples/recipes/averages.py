"""Averaged weights and a reference model wait on the host, and the steps have their room.

python examples/recipes/averages.py
"""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import residency

if not torch.accelerator.is_available():
    residency.sim.enable("256MiB")  # a simulated device; compiled once, for about a minute
device = torch.accelerator.current_accelerator()


def mib(num_bytes):
    return f"{num_bytes / 2**20:.2f} MiB"


def block(tensor):
    """Returns the bytes of a tensor, as the allocator counts them."""
    return -(-tensor.nbytes // 512) * 512


def stay(module):
    """Leaves a model on the device, as stock code does."""


def train(leave, enter):
    """Takes four steps; returns the average and the policy, on the host."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(1536, 1536), nn.Tanh(), nn.Linear(1536, 1536)).to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    leave(reference)
    average = AveragedModel(policy, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    leave(average)
    optimizer = torch.optim.AdamW(policy.parameters(), foreach=False)
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(4):
        rows = torch.randn(16, 1536, device=device)

        enter(reference)
        with torch.no_grad():
            expected = reference(rows)
        leave(reference)

        (policy(rows) + 0.1 - expected).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()  # makes room for the average

        enter(average)
        average.update_parameters(policy)
        leave(average)
    return [tensor.detach().cpu() for tensor in (*average.parameters(), *policy.parameters())]


def main():
    peak = torch.accelerator.max_memory_allocated
    expected = train(stay, stay)
    stock = peak()
    print(f"average and reference stay on the device:     peak {mib(stock)}")
    found = train(residency.park, residency.unpark)
    print(f"average and reference wait on the host:       peak {mib(peak())}")
    assert stock - peak() == sum(block(tensor) for tensor in found)  # of two models
    assert all(map(torch.equal, found, expected))
    print(f"average and policy have the same bits: {len(found)} tensors")


if __name__ == "__main__":
    main()
