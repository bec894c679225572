"""One rank of test_ranks.py: runs every case and writes what became of each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from frozen_lab import are_same, batch, frozen, net, passes, trained
from worker_cases import Cases

import residency
from residency import RefusedError, sim

NUM_RANKS, PHASE, FOLDER = int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
two = Cases()
DEVICE = sim.enable("1GiB", schedule="late", check_races=True)


def _train(model: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    found = []
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        found += passes(model, DEVICE, count=1)
        optimizer.step()
    return [t.detach().cpu() for t in (*found, *model.parameters())]


@two
def a_wrapped_model_that_streams_has_the_bits_of_a_resident_one() -> None:
    for use_reentrant in (None, False):
        torch.manual_seed(0)
        plain = net(use_reentrant=use_reentrant).to(DEVICE)
        expected = _train(DistributedDataParallel(plain))
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(net(use_reentrant=use_reentrant).to(DEVICE))
        with residency.stream_frozen(wrapped.module) as stream:
            assert are_same(_train(wrapped), expected)
            assert all(p.is_cpu for p in frozen(stream, wrapped.module))


@two
def a_streamed_model_is_wrapped_if_the_wrapper_ignores_what_streams() -> None:
    torch.manual_seed(0)
    expected = _train(DistributedDataParallel(net().to(DEVICE)))
    torch.manual_seed(0)
    model = net()
    stream = residency.stream_frozen(model)
    with pytest.raises(ValueError, match="same type of device"):
        DistributedDataParallel(model)
    names = [name for name, p in model.named_parameters() if p.is_cpu]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    assert are_same(_train(DistributedDataParallel(model)), expected)
    stream.stop()


@two
def shards_of_fsdp_are_refused_by_name() -> None:
    model = net().to(DEVICE)
    mesh = init_device_mesh("sim", (NUM_RANKS,))
    fully_shard(model.blocks[1], mesh=mesh)
    with pytest.raises(RefusedError, match=r"blocks\.1 of class FSDPBlock is wrapped by FSDP"):
        residency.stream_frozen(model)
    model(batch(DEVICE)).sum().backward()


def main(own_rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(FOLDER / f"store-{PHASE}"), NUM_RANKS)
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=own_rank, world_size=NUM_RANKS)
    two.run(FOLDER / f"{PHASE}{own_rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
