"""Whatever torch asks CUDA for beside its dispatcher: the simulator has it, or it is named here.

On a build with CUDA such a function would reach the real runtime and end a dry run where a card
goes on; on another it is missing. Builds with CUDA are not at hand everywhere, so that their names
are kept in ``data/names_of_cuda.txt``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from workers import finish, start

pytestmark = pytest.mark.sim

_KEPT = Path(__file__).parents[1] / "data" / "names_of_cuda.txt"
_GRAPHS = "torch calls it from trees of CUDA graphs, of compiled functions, which run eagerly here"
_GEMMS = "a search among kernels of products, off by default; a card's answers are its own"
_ALLOCATORS = "an allocator in the place of CUDA's, of which the figures would be another's"
_NCCL = "torch.cuda.nccl between devices of one process; torch.distributed is modelled"
_INSIDE = "torch's tests and its own C++ alone ask for it"
_TYPES = "a type, of which `torch.cuda` has the simulated one or which nothing makes here"
_SIZES = "cuBLAS's workspace keeps the size that CUBLAS_WORKSPACE_CONFIG gives it"
_STUBS = "torch has functions of that name without it, or says that the library is missing"
LEFT_OUT = {
    "_CUDAGreenContext": "parts of a card's processors, which own no memory",
    "_CUDAPluggableAllocator": _ALLOCATORS,
    "_CUuuid": _TYPES,
    "_CudaDeviceProperties": _TYPES,
    "_StaticCudaLauncher": _GRAPHS,
    "_construct_CUDA_Tensor_From_Storage_And_Metadata": _GRAPHS,
    "_cuda_beginAllocateCurrentStreamToPool": _GRAPHS,
    "_cuda_checkPoolLiveAllocations": _GRAPHS,
    "_cuda_cudaHostAllocator": "an address of C++, which no Python of torch's takes",
    "_cuda_customAllocator": _ALLOCATORS,
    "_cuda_getAllocator": _ALLOCATORS,
    "_cuda_getCheckpointState": _GRAPHS,
    "_cuda_getCompiledVersion": _INSIDE,
    "_cuda_getCublasLtWorkspaceSize": _SIZES,
    "_cuda_getCublasWorkspaceSize": _SIZES,
    "_cuda_getHipblasltVersion": _INSIDE,
    "_cuda_get_conv_benchmark_empty_cache": _GRAPHS,
    "_cuda_isHistoryEnabled": _GRAPHS,
    "_cuda_lock_mutex": "the allocator's lock, which no function of torch's takes from Python",
    "_cuda_record_untuned_enable": _GEMMS,
    "_cuda_record_untuned_is_enabled": _GEMMS,
    "_cuda_resetCublasLtWorkspaceSize": _SIZES,
    "_cuda_resetCublasWorkspaceSize": _SIZES,
    "_cuda_setCheckpointPoolState": _GRAPHS,
    "_cuda_setCublasLtWorkspaceSize": _SIZES,
    "_cuda_setCublasWorkspaceSize": _SIZES,
    "_cuda_tunableop_enable": _GEMMS,
    "_cuda_tunableop_get_filename": _GEMMS,
    "_cuda_tunableop_get_max_tuning_duration": _GEMMS,
    "_cuda_tunableop_get_max_tuning_iterations": _GEMMS,
    "_cuda_tunableop_get_results": _GEMMS,
    "_cuda_tunableop_get_rotating_buffer_size": _GEMMS,
    "_cuda_tunableop_get_validators": _GEMMS,
    "_cuda_tunableop_is_enabled": _GEMMS,
    "_cuda_tunableop_read_file": _GEMMS,
    "_cuda_tunableop_set_filename": _GEMMS,
    "_cuda_tunableop_set_max_tuning_duration": _GEMMS,
    "_cuda_tunableop_set_max_tuning_iterations": _GEMMS,
    "_cuda_tunableop_set_numerical_check_tolerances": _GEMMS,
    "_cuda_tunableop_set_rotating_buffer_size": _GEMMS,
    "_cuda_tunableop_tuning_enable": _GEMMS,
    "_cuda_tunableop_tuning_is_enabled": _GEMMS,
    "_cuda_unlock_mutex": "as `_cuda_lock_mutex`",
    "_cudart": _STUBS,
    "_cudnn": _STUBS,
    "_cudnn_set_conv_benchmark_empty_cache": _GRAPHS,
    "_cusparselt": _STUBS,
    "_free_And_Remove_DeleterFn": _GRAPHS,
    "_has_Standard_Deleter": _GRAPHS,
    "_nccl_all_gather": _NCCL,
    "_nccl_all_reduce": _NCCL,
    "_nccl_broadcast": _NCCL,
    "_nccl_init_rank": _NCCL,
    "_nccl_reduce": _NCCL,
    "_nccl_reduce_scatter": _NCCL,
    "_nccl_unique_id": _NCCL,
    "_nvtx": _STUBS,
    "_rocm_is_backward_pass": _INSIDE,
    "_set_storage_access_error_msg": _GRAPHS,
    "_set_storage_data_ptr_access_error_msg": _GRAPHS,
    "_tensors_data_ptrs_at_indices_equal": _GRAPHS,
}
_LIST = """
import json, torch
from residency import sim
before = dict(vars(torch._C))
sim.enable("1GiB", device="cuda")
now = vars(torch._C)
print(json.dumps([name for name in now if now[name] is not before.get(name)]))
"""
_FUSED = """
import torch
from residency import sim
sim.enable("1GiB", device="cuda", dry={dry})
@torch.jit.script
def gated(a, b):
    return torch.nn.functional.gelu(a * b + b) * torch.sigmoid(a)
x = torch.ones(8, 8, device="cuda", requires_grad=True)
for _ in range(4):
    gated(x, x).sum().backward()
code = "template <typename T> T both(T x, T y) {{ return x; }}"
kernel = torch.cuda.jiterator._create_jit_fn(code)
torch.backends.cuda.preferred_linalg_library("cusolver")
torch.backends.cuda.preferred_blas_library("cublaslt")
try:
    wide = torch.ones(3, 1, 2, device="cuda").transpose(0, 2)
    made = kernel(wide, torch.ones(4, 1, device="cuda", dtype=torch.int64))
    print(made.shape, made.stride(), made.dtype, made.requires_grad)
except sim.SimulatorError as error:
    print(error)
"""


def test_what_a_build_with_cuda_has_is_there_or_named_with_a_reason(built: None) -> None:
    (written,) = finish(start("-c", _LIST))
    given = set(json.loads(written.splitlines()[-1]))
    kept = {line for line in _KEPT.read_text().splitlines() if not line.startswith("#")}
    assert sorted(kept - given - LEFT_OUT.keys()) == []
    assert sorted(LEFT_OUT.keys() & given) == [], "the simulator has it"
    assert sorted(LEFT_OUT.keys() - kept) == [], "no build has it"


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_the_kept_names_are_all_that_this_build_has() -> None:
    kept = set(_KEPT.read_text().splitlines())
    assert [n for n in dir(torch._C) if n.startswith("_cuda_") and n not in kept] == []


def test_scripted_functions_and_jitted_kernels_run_dry(built: None, tmp_path: Path) -> None:
    (written,) = finish(start(_script(tmp_path, dry=True)))
    # As an addition of the two lays it out: dimensions in the order of the first one's strides.
    expected = torch.add(torch.ones(3, 1, 2).transpose(0, 2), torch.ones(4, 1, dtype=torch.int64))
    assert written.splitlines()[-1] == f"{expected.shape} {expected.stride()} torch.float32 False"


def test_a_jitted_kernel_is_refused_by_name_where_values_are_computed(
    built: None, tmp_path: Path
) -> None:
    (written,) = finish(start(_script(tmp_path, dry=False)))
    assert "no compiler for both, a kernel of torch.cuda.jiterator" in written.splitlines()[-1]


def _script(folder: Path, dry: bool) -> Path:
    path = folder / "fused.py"  # TorchScript reads the source of what it compiles
    path.write_text(_FUSED.format(dry=dry), encoding="utf-8")
    return path
