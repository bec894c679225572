"""One rank of four: what FSDP, HSDP and DDP keep, gather and reduce, beside its formulas."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WIDTH, NUM_LAYERS, RANKS, BATCH = 512, 6, 4, 8
LAYER = WIDTH * WIDTH * 4  # bytes of a layer in float32
MODEL = NUM_LAYERS * LAYER
WRITTEN = ("objects", "attended")  # by the script

SHARDED = f"""
import gc, json, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload, FullyShardedDataParallel, MixedPrecision, fully_shard)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
import residency
dist.init_process_group("cpu:gloo,cuda:nccl")
torch.cuda.set_device(0)

def train(name, wrap):
    with residency.phase(name):
        layers = [nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({NUM_LAYERS})]
        model = wrap(nn.Sequential(*layers).cuda())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            model(torch.randn({BATCH}, {WIDTH}, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    del layers, model, optimizer
    # Autograd's thread may still hold the last pass, and so the model; a further pass ends that.
    torch.ones(1, device="cuda", requires_grad=True).backward()
    gc.collect()

def sharded(mesh):
    def wrap(model):
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return wrap

train("fsdp", sharded(init_device_mesh("cuda", ({RANKS},))))
pairs = init_device_mesh("cuda", (2, {RANKS} // 2), mesh_dim_names=("copies", "shards"))
train("hsdp", sharded(pairs))
def flat(**options):
    policy = ModuleWrapPolicy({{nn.Linear}})
    return lambda model: FullyShardedDataParallel(
        model, device_id=0, auto_wrap_policy=policy, use_orig_params=True, **options)
train("flat", flat())
train("offloaded", flat(cpu_offload=CPUOffload(offload_params=True)))
train("low sums", flat(mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)))
train("ddp", lambda model: DistributedDataParallel(model, broadcast_buffers=False))

heads = [torch.randn(2, 8, 64, 16, device="cuda", dtype=d)
         for d in (torch.float32, torch.bfloat16)]
attended = []
for each in heads:  # in tensor parallel: each rank has some of the heads
    share = distribute_tensor(each, init_device_mesh("cuda", ({RANKS},)), [Shard(1)])
    share.requires_grad_()
    output = nn.functional.scaled_dot_product_attention(share, share, share, is_causal=True)
    output.sum().backward()
    attended.append([list(output.to_local().shape), list(share.grad.shape)])
json.dump(attended, open("attended.json", "w"))

seen = {{}}
for name, backend in (("cpu", "gloo"), ("device", "nccl")):
    group = dist.new_group(backend=backend)
    mine = {{"rank": 0, "plan": "x" * 100_000}}
    gathered, to_one, sent, mine_of_all = [None] * {RANKS}, [None] * {RANKS}, ["of a peer"], [None]
    dist.all_gather_object(gathered, mine, group=group)
    dist.gather_object(mine, to_one, dst=0, group=group)
    dist.broadcast_object_list(sent, src=1, group=group)
    dist.scatter_object_list(mine_of_all, list(range({RANKS})), src=0, group=group)
    dist.barrier(group=group)
    whole = gathered == to_one == [mine] * {RANKS}
    seen[name] = [whole, sent, mine_of_all]
dist.monitored_barrier(dist.new_group(backend="gloo"))
json.dump(seen, open("objects.json", "w"))
"""


@pytest.fixture(scope="module")
def of_ranks(dry_run_once) -> dict[str, Any]:
    options = ("--capacity", "4GiB", "--ranks", str(RANKS), "--steps", "0")
    outcome, folder = dry_run_once(SHARDED, options=options)
    assert outcome.status == 0, outcome.errors
    phases = {phase["name"]: phase["at_peak"] for phase in outcome.answer["phases"]}
    read = {name: json.loads((folder / f"{name}.json").read_text()) for name in WRITTEN}
    return {"phases": phases, **read}


@pytest.mark.parametrize(
    ("name", "share"), [("fsdp", RANKS), ("hsdp", RANKS // 2), ("flat", RANKS), ("ddp", 1)]
)
def test_a_rank_keeps_its_share(of_ranks: dict[str, Any], name: str, share: int) -> None:
    step = of_ranks["phases"][f"{name}/optimizer step"]
    assert step["parameters"] == MODEL // share
    assert step["optimizer state"] == 2 * MODEL // share
    buckets = MODEL if name == "ddp" else 0  # DDP's copies of the gradients, which stay
    assert step["gradients"] == MODEL // share + buckets


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_a_pass_gathers_layers_and_not_the_model(of_ranks: dict[str, Any], name: str) -> None:
    forward = of_ranks["phases"][f"{name}/forward"]
    # The layer, the buffer that it came in, and the one before's, which torch keeps for a while.
    assert forward["gathered parameters"] == 3 * LAYER
    backward = of_ranks["phases"][f"{name}/backward"]
    # The layer and its buffer; or the layer of now and the next one's buffer, asked for early.
    assert backward["gathered parameters"] == 2 * LAYER
    # Whole gradients of a layer and buffers of the size of one, and shards of all layers so far.
    assert backward["gradients"] >= 2 * LAYER
    for phase in (forward, backward):  # inputs, outputs and their gradients: nothing of a layer
        assert phase["activations"] < LAYER // 4


def test_the_first_fsdp_gathers_a_layer_and_the_next_one(of_ranks: dict[str, Any]) -> None:
    backward = of_ranks["phases"]["flat/backward"]
    assert backward["gathered parameters"] == 2 * LAYER
    assert backward["gradients"] >= 2 * LAYER
    # Of a layer's gradient autograd makes a flat one.
    assert backward["activations"] < LAYER + LAYER // 4


def test_what_the_first_fsdp_offloads_is_gathered_by_way_of_the_device(
    of_ranks: dict[str, Any],
) -> None:
    forward = of_ranks["phases"]["offloaded/forward"]
    assert forward["parameters"] == 0
    assert forward["gathered parameters"] == LAYER + LAYER // RANKS
    assert forward["activations"] < LAYER // RANKS


def test_a_gradient_that_the_first_fsdp_sums_in_another_type_is_one_before(
    of_ranks: dict[str, Any],
) -> None:
    backward = of_ranks["phases"]["low sums/backward"]
    assert backward["activations"] < LAYER + LAYER // 4
    assert backward["gradients"] >= LAYER + LAYER // 2  # as it was made, and to be summed


def test_ddp_gathers_nothing(of_ranks: dict[str, Any]) -> None:
    ddp = [peak for name, peak in of_ranks["phases"].items() if name.startswith("ddp")]
    assert all(peak["gathered parameters"] == 0 for peak in ddp)
    # Nothing of its buckets is left among the rest.
    assert of_ranks["phases"]["ddp/forward"]["gradients"] == MODEL


@pytest.mark.parametrize("group", ["cpu", "device"])
def test_objects_are_those_of_this_rank(of_ranks: dict[str, Any], group: str) -> None:
    assert of_ranks["objects"][group] == [True, ["of a peer"], [0]]


def test_each_rank_attends_with_its_share_of_the_heads_by_either_kernel(
    of_ranks: dict[str, Any],
) -> None:
    assert of_ranks["attended"] == [[[2, 8 // RANKS, 64, 16], [2, 8, 64, 16]]] * 2


SPAWNING = """
import json, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank, size):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    model = torch.nn.Linear(8, 8).to(rank)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(8, 8, device=rank)).sum().backward()
    optimizer.step()
    json.dump([rank, dist.get_world_size(), torch.accelerator.device_count(),
               len(torch.cuda.get_rng_state_all())], open("ranks.json", "a"))
    dist.destroy_process_group()
if __name__ == "__main__":
    size = torch.cuda.device_count()
    if "--spawn" in sys.argv:
        mp.spawn(main, args=(size,), nprocs=size)
    else:
        main(0, size)
"""


@pytest.mark.parametrize("spawns", [True, False])
def test_a_script_finds_the_devices_of_all_ranks_and_runs_the_first(
    dry_run, tmp_path: Path, spawns: bool
) -> None:
    options = ("--capacity", "4GiB", *(("--ranks", "4") if spawns else ()))
    words = ["script.py", "--spawn"] if spawns else []
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "script.py"]
    (tmp_path / "script.py").write_text(SPAWNING)
    outcome = dry_run(Path((words or launcher)[0]), *(words or launcher)[1:], options=options)
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["steps"] == 1
    assert json.loads((tmp_path / "ranks.json").read_text()) == [0, 4, 4, 4]


FAILING = """
import sys, torch
import torch.multiprocessing as mp

def main(rank):
    weight = torch.nn.Linear(8, 8).cuda().weight
    weight.t().view(64)

if __name__ == "__main__":
    if "--spawn" in sys.argv:
        mp.spawn(main, nprocs=1)
    else:
        process = mp.get_context("spawn").Process(target=main, args=(0,))
        process.start()
        process.join()
        sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("words", [["--spawn"], []], ids=["torchs", "pythons"])
def test_the_error_of_a_process_that_a_script_starts_is_named(
    dry_run: Callable[..., Any], words: list[str]
) -> None:
    outcome = dry_run(FAILING, *words)
    assert outcome.status == 3
    assert "view size is not compatible" in outcome.answer["error"], outcome.errors
    assert "script.py:7" in outcome.answer["error"]
