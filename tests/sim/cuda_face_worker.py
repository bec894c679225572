"""Runs every case of tests/sim/test_cuda_face.py in one process, in which the simulator is CUDA.

A process cannot go back from that, so it is one of its own; it writes what became of each case.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from worker_cases import Cases

import residency
from residency import sim

case = Cases()
MIB = 1 << 20


@case
def the_device_is_there_before_it_is_used() -> None:
    """Runs first: torch.cuda starts up when it is first used, as it does on a GPU."""
    assert not torch.cuda.is_initialized()
    torch.manual_seed(7)  # kept for the device until then
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert not torch.cuda.is_initialized()
    drawn = torch.rand(5, device="cuda")
    assert torch.cuda.is_initialized()
    torch.cuda.manual_seed(7)
    assert torch.equal(drawn, torch.rand(5, device="cuda"))


@case
def a_fork_cannot_use_a_device_that_was_used() -> None:
    torch.ones(1, device="cuda")
    child = os.fork()
    if child == 0:
        try:
            torch.manual_seed(0)  # does not touch the device
            refused = torch.cuda._is_in_bad_fork() and not torch.cuda.is_initialized()
            with pytest.raises(RuntimeError, match="'spawn' start method"):
                torch.cuda.init()
            os._exit(0 if refused else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@case
def torch_says_cuda() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    tensor = torch.ones(3).cuda()
    assert tensor.is_cuda
    assert tensor.device == torch.device("cuda", 0)
    assert tensor.untyped_storage().is_cuda
    assert torch.cuda.current_device() == 0
    assert "imulated" in torch.cuda.get_device_name()
    assert torch.cuda.get_device_properties("cuda").total_memory == 1 << 30
    assert torch.cuda.get_device_capability() >= (8, 0)
    assert torch.cuda.is_bf16_supported()
    assert torch.version.cuda is not None
    assert torch.backends.cuda.is_built()
    assert torch.get_device_module() is torch.cuda
    with torch.cuda.device(0), torch.cuda.device_of(tensor):
        torch.cuda.set_device("cuda:0")
    with pytest.raises(RuntimeError, match="one simulated accelerator, cuda:0; found"):
        torch.ones(1, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"on the same device.*cuda:0 and cpu"):
        tensor + torch.ones(3)
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        tensor.numpy()


@case
def memory_figures() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 * MIB
    del tensor
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 4 * MIB
    assert torch.cuda.memory_reserved() >= 4 * MIB
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before == 4 * MIB
    free, total = torch.cuda.mem_get_info()
    assert total == 1 << 30
    assert free == total - torch.cuda.memory_reserved() - sim.settings()["context"]
    assert "Allocated memory" in torch.cuda.memory_summary()
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.ipc_collect()
    pinned = torch.empty(1000, pin_memory=True)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= pinned.nbytes
    address = torch.cuda.caching_allocator_alloc(2 * MIB)
    assert torch.cuda.memory_allocated() - before == 2 * MIB
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == before


@case
def out_of_memory() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to all"):
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")


@case
def what_is_not_the_device_s_is_refused() -> None:
    for figures in (torch.cuda.memory_allocated, torch.cuda.memory_stats):
        with pytest.raises(RuntimeError, match="Invalid device argument 1"):
            figures(1)
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.cuda.mem_get_info(1)
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch.cuda.caching_allocator_delete(12345)
    torch.cuda.caching_allocator_delete(0)
    assert torch.cuda.memory_stats()["num_oom_rejections"] == 0


@case
def products_are_deterministic_only_where_a_setting_says_so() -> None:
    a = torch.ones(2, 2, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(RuntimeError, match="CUBLAS_WORKSPACE_CONFIG"):
                a @ a
            torch.use_deterministic_algorithms(True, warn_only=True)
            with pytest.warns(UserWarning, match="CUBLAS_WORKSPACE_CONFIG"):
                a @ a
            torch.use_deterministic_algorithms(True)
            patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            assert (a @ a).sum().item() == 8.0
        finally:
            torch.use_deterministic_algorithms(False)


@case
def an_index_out_of_bounds_loses_the_device() -> None:
    for schedule in ("late", "eager"):
        sim.enable("1GiB", check_races=True, schedule=schedule)
        x = torch.zeros(3, device="cuda")
        x[torch.tensor([5], device="cuda")]  # the program goes on
        calls = (
            torch.cuda.synchronize,
            lambda x=x: x.add_(1.0),
            lambda x=x: x.sum().item(),
            lambda: torch.ones(3).to("cuda"),
            torch.cuda.synchronize,
        )
        for call in calls:
            with pytest.raises(torch.AcceleratorError, match=r"device-side assert(.|\n)*index 5"):
                call()
        sim.enable("1GiB", check_races=True)
        assert torch.ones(3, device="cuda").sum().item() == 3.0


@case
def what_the_host_can_check_does_not_lose_the_device() -> None:
    for wrong in (
        lambda: torch.zeros(2, 3, device="cuda") @ torch.zeros(2, 3, device="cuda"),
        lambda: torch.zeros(3, device="cuda").sum(dim=4),
        lambda: torch.zeros(3, device="cuda")[7],
        lambda: torch.zeros(3, device="cuda").index_select(2, torch.tensor([0], device="cuda")),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()
        torch.cuda.synchronize()


@case
def distributed_tensors_draw_random_numbers() -> None:
    torch.distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        with torch.device("meta"):
            model = nn.Linear(64, 64)
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        model.to_empty(device="cuda")
        nn.init.normal_(model.weight)
        assert 0.9 < model.weight.to_local().std().item() < 1.1
    finally:
        torch.distributed.destroy_process_group()


@case
def random_states() -> None:
    torch.cuda.manual_seed(4)
    torch.randn(9, device="cuda")
    assert torch.cuda.get_rng_state().view(torch.int64).tolist() == [4, 4]
    state = torch.cuda.get_rng_state()
    drawn = torch.randn(9, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.randn(9, device="cuda"))
    states = torch.cuda.get_rng_state_all()
    with torch.random.fork_rng(devices=[0]):
        drawn = torch.randn(9, device="cuda")
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(drawn, torch.randn(9, device="cuda"))
    generator = torch.Generator("cuda").manual_seed(3)
    drawn = torch.randn(9, device="cuda", generator=generator)
    torch.cuda.manual_seed_all(3)
    assert torch.equal(drawn, torch.randn(9, device="cuda"))
    assert torch.cuda.initial_seed() == 3


@case
def storages_are_made_resized_and_loaded() -> None:
    tensor = torch.arange(6.0, device="cuda")
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert storage.size() == 0
    storage.resize_(24)
    tensor.copy_(torch.arange(6.0))
    assert torch.UntypedStorage(16, device="cuda").device.type == "cuda"
    assert storage.cpu().device.type == "cpu"
    assert storage.cpu().cuda().is_cuda
    assert tensor.resize_(3, 50).shape == (3, 50)
    assert tensor.flatten()[:6].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(70, device="cuda"), 1, out=out)
    assert out.sum().item() == 140


@case
def streams_and_events_are_torchs() -> None:
    stream = torch.cuda.Stream(priority=-1)
    assert isinstance(stream, torch.Stream)
    assert stream != torch.cuda.default_stream()
    assert torch.cuda.default_stream().cuda_stream == 0
    assert repr(stream).startswith("<torch.cuda.Stream device=cuda:0")
    event = stream.record_event()
    assert isinstance(event, torch.cuda.Event)
    assert "uninitialized" in repr(torch.cuda.Event())
    event.synchronize()
    assert event.query()
    with stream:
        assert torch.cuda.current_stream() == stream
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        first.elapsed_time(second)
    with pytest.raises(ValueError, match="enable_timing"):
        event.elapsed_time(event)
    with torch.cuda.nvtx.range("marked"):
        torch.cuda.nvtx.mark("here")


@case
def late_work_and_the_race_checker() -> None:
    side = torch.cuda.Stream()
    source, target = torch.ones(1000, device="cuda"), torch.zeros(1000).pin_memory()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    assert target.sum() == 0  # late
    with pytest.raises(residency.sim.RaceError, match="copy_"):
        source.add_(1)
    side.synchronize()
    assert target.sum() == 1000
    torch.cuda.synchronize()


def outcome(module: nn.Module, value: torch.Tensor, device: str) -> list[torch.Tensor]:
    """Returns the module's result and all gradients, on the host."""
    module = copy.deepcopy(module).to(device)
    moved = value.to(device).detach().requires_grad_()
    result = module(moved)
    result = result[0] if isinstance(result, tuple) else result
    result.square().sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [tensor.detach().cpu() for tensor in (result, moved.grad, *gradients)]


@case
def convolutions_are_the_hosts() -> None:
    torch.manual_seed(0)
    grouped = nn.Conv2d(3, 6, 3, padding=1, groups=3)
    modules = {
        nn.Sequential(grouped, nn.BatchNorm2d(6), nn.MaxPool2d(2)): torch.randn(2, 3, 9, 9),
        nn.ConvTranspose1d(3, 4, 3, stride=2): torch.randn(2, 3, 9),
    }
    for module, value in modules.items():
        pairs = zip(outcome(module, value, "cuda"), outcome(module, value, "cpu"), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


@case
def data_parallel_on_one_device_is_the_module() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    parallel, x = nn.DataParallel(module), torch.randn(6, 4)
    expected = module(x.cuda())
    for given in (x, x.cuda()):
        found = parallel(given)
        assert torch.equal(found, expected)
        found.sum().backward()
    replicas = nn.parallel.replicate(module, [0])
    outputs = nn.parallel.parallel_apply(replicas, [(x.cuda(),)], devices=[0])
    assert torch.equal(nn.parallel.gather(outputs, 0), expected)


@case
def tensors_are_scattered_gathered_and_broadcast_on_one_device() -> None:
    from torch.nn.parallel import comm

    x = torch.arange(12.0).view(4, 3)
    (scattered,) = comm.scatter(x, [0], streams=[torch.cuda.Stream()])
    torch.cuda.synchronize()
    assert scattered.is_cuda
    assert torch.equal(scattered.cpu(), x)
    assert torch.equal(comm.gather([scattered, scattered], dim=1).cpu(), torch.cat([x, x], 1))
    assert torch.equal(comm.gather([scattered], destination="cpu"), x)
    outputs = [torch.empty(1, 3, device="cuda"), torch.empty(3, 3, device="cuda")]
    comm.scatter(scattered, out=outputs)
    assert torch.equal(comm.gather(outputs, out=torch.empty(4, 3, device="cuda")).cpu(), x)
    assert torch.equal(comm.broadcast(x.cuda(), [0])[0].cpu(), x)
    comm.broadcast(x.cuda(), out=[scattered])
    ((same,),) = comm.broadcast_coalesced([scattered], [0])
    assert same is scattered


@case
def softmax_of_half_in_float32_is_that_of_the_wide_input() -> None:
    for function in (torch.softmax, torch.log_softmax):
        x = torch.randn(3, 7).half()
        ours = x.cuda().requires_grad_()
        wide = x.float().requires_grad_()
        for value in (ours, wide):
            result = function(value, -1, dtype=torch.float32)
            assert result.dtype == torch.float32
            (result * torch.arange(7.0, device=value.device)).sum().backward()
        assert wide.grad is not None
        assert ours.grad is not None
        assert torch.equal(ours.grad.cpu(), wide.grad.half())
        out = torch.empty(0, device="cuda")
        function(x.cuda(), -1, dtype=torch.float32, out=out)
        assert torch.equal(out.cpu(), function(x.float(), -1))


@case
def recurrent_layers_are_the_hosts_but_for_rounding() -> None:
    """CUDA's cells add a bias where the host's products do: each sum is rounded elsewhere."""
    torch.manual_seed(0)
    value = torch.randn(5, 2, 3)
    for module in (nn.LSTM(3, 4, 2), nn.GRU(3, 4, bidirectional=True), nn.LSTM(3, 4, bias=False)):
        ours, hosts = outcome(module, value, "cuda"), outcome(module, value, "cpu")
        torch.testing.assert_close(ours, hosts, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            assert torch.equal(module.to("cuda")(value.cuda())[0].cpu(), ours[0])


@case
def the_ctc_loss_takes_lengths_on_either_side() -> None:
    logits = torch.randn(20, 2, 9).log_softmax(2)
    targets = torch.randint(1, 9, (2, 6))
    lengths = torch.full((2,), 20), torch.full((2,), 6)
    expected = functional.ctc_loss(logits, targets, *lengths)
    for device in ("cpu", "cuda"):
        moved = [length.to(device) for length in lengths]
        loss = functional.ctc_loss(logits.cuda(), targets.cuda(), *moved)
        assert torch.equal(loss.cpu(), expected)


@case
def one_rank_of_nccl_trains_as_none() -> None:
    torch.distributed.init_process_group(
        "nccl", store=HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    assert torch.distributed.get_backend() == "nccl"
    assert torch.cuda.nccl.version() >= (2, 0)
    assert len(torch.cuda.nccl.version()) == 3
    batch = torch.randn(6, 5, device="cuda")
    results = []
    for wrap in (lambda model: model, fully_shard, DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).cuda())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.distributed.barrier()
        values = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
        results.append([value.detach().cpu() for value in values])
    gathered = [None]
    torch.distributed.all_gather_object(gathered, {"rank": 0})
    assert gathered == [{"rank": 0}]
    torch.distributed.destroy_process_group()
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


@case
def compiled_models_run_eagerly_with_a_word() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).cuda()
    x = torch.ones(2, 3, device="cuda")
    with warnings.catch_warnings(record=True) as caught:  # torch's own deprecations are among them
        warnings.simplefilter("always")
        assert torch.equal(torch.compile(model)(x), model(x))
        double = torch.compile(lambda x: 2 * x, dynamic=True)
        assert double(torch.ones(1, device="cuda")).item() == 2
    assert sum("run eagerly" in str(warning.message) for warning in caught) == 1


@case
def the_face_stays() -> None:
    with pytest.raises(sim.SimulatorError, match="is 'cuda' in this process"):
        sim.enable(device="sim")
    assert sim.enable("1GiB", check_races=True) == torch.device("cuda", 0)


@case
def the_allocators_limits_and_pools_are_those_of_torch_cuda() -> None:
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.cuda.OutOfMemoryError, match="allowed"):
        torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction(1.0)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        apart = torch.empty(1 << 20, device="cuda")
    assert torch.empty(8, device="cuda").data_ptr() != apart.data_ptr()
    del apart, pool
    torch.nn.functional.linear(torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda"))
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == 0


@case
def what_is_not_modelled_says_so() -> None:
    with pytest.raises(sim.SimulatorError, match="does not model"):
        torch.cuda.set_sync_debug_mode("warn")
    with pytest.raises(sim.SimulatorError, match="does not model tensors that processes share"):
        torch.ones(1, device="cuda").untyped_storage()._share_cuda_()


@case
def dry_mode_steps_a_model_of_billions_of_parameters() -> None:
    torch.cuda.synchronize()
    gc.collect()
    sim.enable("160GiB", dry=True)
    width = 8192
    with torch.device("cuda"):
        model = nn.Sequential()
        for _ in range(8):
            model.extend([nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)])
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters > 4_000_000_000
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randn(16, width, device="cuda")).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.cuda.max_memory_allocated() >= 16 * num_parameters  # weights, gradients, 2 states


@case
def objects_that_ranks_exchange_are_whole_in_dry_mode() -> None:
    assert sim.settings()["dry"]
    torch.distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    given = {"plan": ["shard", 3], "sizes": torch.arange(3)}
    everyones, at_the_root, from_the_root = [None], [None], [given]
    torch.distributed.all_gather_object(everyones, given)
    torch.distributed.gather_object(given, at_the_root)
    torch.distributed.broadcast_object_list(from_the_root)
    for (found,) in (everyones, at_the_root, from_the_root):
        assert found["plan"] == ["shard", 3]
        assert found["sizes"].tolist() == [0, 1, 2]
    sizes = torch.tensor([5, 7], device="cuda")
    torch.distributed.all_reduce(sizes)
    scattered = torch.empty(2, dtype=torch.long, device="cuda")
    torch.distributed.reduce_scatter(scattered, [sizes])
    assert scattered.tolist() == [5, 7]
    torch.distributed.destroy_process_group()


def main(folder: Path) -> None:
    sim.enable("1GiB", check_races=True, device="cuda")
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
