"""Kernels that a script writes in Triton take nothing, and what is around them counts."""

import json

import pytest

pytest.importorskip("triton", reason="Triton comes with builds of torch for CUDA")

MIB = 2**20
KERNEL = """
import json, torch, triton, triton.language as tl

@triton.jit
def double(source, target, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, 2 * tl.load(source + at, mask=at < size), mask=at < size)
"""
LAUNCHED = """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source):
        target = torch.empty_like(source)
        double[lambda meta: (triton.cdiv(source.numel(), meta["BLOCK"]),)](
            source, target, source.numel(), BLOCK=1024
        )
        return target
    @staticmethod
    def backward(ctx, gradient):
        return Doubled.forward(ctx, gradient)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(MIB))
    def forward(self, factor):
        return Doubled.apply(self.weight) * factor

model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
factor = torch.ones(1, device="cuda")
for _ in range(2):
    model(factor).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TUNED = """
from triton.runtime import driver
configs = [triton.Config({"BLOCK": size}, num_warps=4) for size in (128, 256)]
tuned = triton.autotune(configs, key=["size"], restore_value=["target"])(double)
at_times = triton.heuristics({"BLOCK": lambda args: 64})(double)
source = torch.ones(MIB, device="cuda")
target = torch.empty_like(source)
before = torch.cuda.memory_allocated()
peaks = []
for size in (MIB, MIB, MIB // 2):
    torch.cuda.reset_peak_memory_stats()
    tuned[(1,)](source, target, size)
    peaks.append(torch.cuda.max_memory_allocated() - before)
at_times[(1,)](source, target, MIB)
assert triton.testing.do_bench(lambda: at_times[(1,)](source, target, MIB)) > 0
assert torch.cuda.memory_allocated() == before
properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
assert properties["multiprocessor_count"] == 132 and driver.active.get_current_target().arch == 90
json.dump(peaks, open("seen.json", "w"))
"""


def test_a_launch_takes_nothing_but_what_is_made_for_it(dry_run) -> None:
    outcome = dry_run(f"{KERNEL}MIB = {MIB}\n{LAUNCHED}")
    assert outcome.has_run, outcome.errors
    assert outcome.answer["steps"] == 2
    assert outcome.phase("forward")["at_peak"]["activations"] // MIB == 8
    assert outcome.phase("backward")["at_peak"]["gradients"] // MIB == 4


def test_a_kernel_is_tuned_with_the_buffer_that_triton_takes(dry_run, tmp_path) -> None:
    outcome = dry_run(f"{KERNEL}MIB = {MIB}\n{TUNED}", options=("--device", "h100"))
    assert outcome.has_run, outcome.errors
    tuning = (256 + 4) * MIB  # and a copy of what the kernel writes, to be restored
    assert json.loads((tmp_path / "seen.json").read_text()) == [tuning, 0, tuning]
