"""Trains an MLP without a data loader, and writes down what torch says of its peaks."""

import json
import sys

import torch
from torch import nn

WIDTH, BATCH = int(sys.argv[1]), int(sys.argv[2])

model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1000):
    inputs = torch.randn(BATCH, WIDTH, device="cuda")
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("peaks.json", "w") as file:
        peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        json.dump({"step": step, "peaks": peaks, "loss": loss.item()}, file)
