"""What FSDP2 keeps on the device is named by the model that it shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import residency


@pytest.mark.sim
def test_a_shard_goes_by_the_name_of_the_parameter_that_it_is(device: torch.device) -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False)).to(device)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        paths = {holder.path.partition(" ")[2]: holder.kind for holder in residency.holders()}
        assert paths == {
            "local 'model'.0.weight._local_tensor": "parameter",
            "local 'model'.0.weight.grad._local_tensor": "gradient",
            "local 'optimizer'.state['0.weight']['momentum_buffer']._local_tensor": (
                "optimizer state"
            ),
        }
    finally:
        dist.destroy_process_group()
