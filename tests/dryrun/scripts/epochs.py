"""Trains with data loaders for many epochs, evaluates and saves after each, and resumes at last."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, EPOCHS = 512, int(sys.argv[1])


def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    total = 0.0
    with torch.no_grad():
        for (batch,) in loader:
            total += model(batch.cuda()).square().mean().item()
    model.train()
    return total / len(loader)


model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
train = DataLoader(TensorDataset(torch.randn(6400, WIDTH)), batch_size=64, shuffle=True)
valid = DataLoader(TensorDataset(torch.randn(640, WIDTH)), batch_size=64)
for epoch in range(EPOCHS):
    for (batch,) in train:
        optimizer.zero_grad()
        model(batch.cuda(non_blocking=True)).square().mean().backward()
        optimizer.step()
    print(epoch, evaluate(model, valid))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
saved = torch.load("last.pt", map_location="cuda")
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
print("steps", saved["optimizer"]["state"][0]["step"].item())
for (batch,) in train:
    model(batch.cuda()).square().mean().backward()
    optimizer.step()
print("resumed")
