"""Trains a model on each of two GPUs, by a loop of its own, accelerate or Lightning.

A comment ``# +`` says which lines of an answer belong there, and ``# -`` which take the place of
those up to the next one.
"""

import sys

import torch
from torch import nn

# + from
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)))
batches = torch.utils.data.DataLoader(torch.ones(640, 1024), batch_size=64)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


if sys.argv[1] == "loop":
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("nccl")
    given_trainer = {"module": model.cuda(), "device_ids": [0]}
    # - DistributedDataParallel
    trainer = DistributedDataParallel(**given_trainer)
    # -
    model = trainer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        loss_of(batch.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
elif sys.argv[1] == "accelerate":
    from accelerate import Accelerator

    given_trainer = {}
    # - Accelerator
    trainer = Accelerator(**given_trainer)
    # -
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = trainer.prepare(model, optimizer, batches)
    for batch in batches:
        trainer.backward(loss_of(batch))
        optimizer.step()
        optimizer.zero_grad()
else:
    from lightning import LightningModule, Trainer

    class Whole(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return loss_of(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    given_trainer = {"accelerator": "gpu", "devices": 2, "strategy": "ddp", "max_epochs": 1}
    # - Trainer
    trainer = Trainer(**given_trainer)
    # -
    trainer.fit(Whole(), batches)
