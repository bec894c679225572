"""What a dry run cannot run is named with the script's line, and with what to do."""

import pytest

from residency._dryrun._places import place_of
from residency._dryrun._refusals import advice

WORKSPACE = 8_519_680  # of cuBLAS, for each thread and stream


def raised(source: str, name: str = "script") -> BaseException:
    """Runs a text as a module of a name, and returns its error."""
    try:
        exec(compile(source, f"/home/me/{name}.py", "exec"), {"__name__": name})
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ModuleNotFoundError('No module named x', name='flash_attn')", "sdpa"),
        ("raise ModuleNotFoundError('No module named x', name='xformers.ops')", "xformers"),
        (
            "try: raise ModuleNotFoundError('No module named x', name='xformers.ops')\n"
            "except ImportError: raise AssertionError('xFormers is required for training')",
            "xformers",
        ),
        ("raise RuntimeError('CUDA error: invalid device ordinal')", "--ranks"),
        ("raise AssertionError('Invalid device id')", "--ranks"),
        ("import torch; torch.ops.extension.fused(1)", "'extension'"),
        (
            "raise OSError('libcudart.so.12: cannot open shared object file')",
            "CUDA's own libraries",
        ),
        ("raise ModuleNotFoundError('No module named x', name='boto3')", ""),
        ("raise RuntimeError('NVML Shared Library Not Found')", "a GPU has NVML"),
        (
            "import subprocess\n"
            "raise subprocess.CalledProcessError(127, 'nvidia-smi --query-gpu=name')",
            "a GPU has NVML",
        ),
        (
            "raise NotImplementedError('The simulated accelerator does not model aten::addmm of "
            "sparse tensors.')",
            "sparse=False",
        ),
        (
            "import torch.storage\nclass Storage(torch.UntypedStorage):\n"
            "    def _share_cuda_(self): raise RuntimeError('CUDA is not available')\n"
            "Storage()._share_cuda_()",
            "to another one",
        ),
        ("raise ValueError('of its own')", ""),
        ("raise ConnectionRefusedError('of a server of its own')", ""),
        ("import subprocess\nsubprocess.run(['nvidia-smi'], env={'PATH': '/nowhere'})", "on PATH"),
        (
            "import urllib.error\nraise urllib.error.URLError('Name or service not known')",
            "--random-weights",
        ),
        (
            "class LocalEntryNotFoundError(FileNotFoundError): pass\n"
            "LocalEntryNotFoundError.__module__ = 'huggingface_hub.errors'\n"
            "try: raise LocalEntryNotFoundError('x')\n"
            "except FileNotFoundError as error: raise OSError('We could not connect') from error",
            "--random-weights",
        ),
    ],
)
def test_an_error_of_the_dry_run_says_what_to_do(source: str, said: str) -> None:
    error = raised(source)
    found = advice(error, error.__traceback__)
    assert said in found
    assert bool(found) == bool(said)


def test_weights_that_are_left_out_already_are_not_advised_to_be() -> None:
    error = raised("import urllib.error\nraise urllib.error.URLError('not known')")
    found = advice(error, error.__traceback__, has_random_weights=True)
    assert "--random-weights does not make it" in found
    assert "hf download NAME --include '*.json'" in found


@pytest.mark.parametrize("package", ["triton", "bitsandbytes", "xformers", "flash_attn"])
def test_an_error_inside_a_package_with_kernels_names_the_package(package: str) -> None:
    error = raised("raise RuntimeError('0 active drivers')", package)
    assert package in advice(error, error.__traceback__)


def test_a_traceback_s_place_is_the_innermost_line_of_the_script() -> None:
    error = raised("def f():\n    import json\n    json.loads('{')\n\n\nf()")
    assert place_of(error.__traceback__).endswith("home/me/script.py:3")


FAILING = """
import torch
import transformers.tokenization_utils_base
from torch.utils.checkpoint import checkpoint
from torch.utils.cpp_extension import load_inline
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)
    def forward(self, x):
        return checkpoint(self.norm, self.layer(x), use_reentrant=False)
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters())
fast = torch.compile(net)
for _ in range(2):
    fast(torch.ones(4, 64, device="cuda")).square().sum().backward()
optimizer.step()
load_inline("mine", cpp_sources="", cuda_sources="__global__ void f() {}")
"""


def test_the_answer_has_one_line_for_each_and_the_traceback_comes_first(dry_run, tmp_path) -> None:
    (tmp_path / "transformers").mkdir()  # one that a dry run does not know
    for name in ("__init__.py", "tokenization_utils_base.py"):
        (tmp_path / "transformers" / name).touch()
    outcome = dry_run(FAILING, options=("--capacity", "2GiB", "--steps", "0"))
    assert outcome.status == 3
    assert outcome.answer["has_compiled"]
    assert outcome.errors.count("torch.compile compiled nothing") == 1
    assert "compiles nothing" not in outcome.errors
    (warning,) = outcome.answer["warnings"]
    assert warning.startswith(
        "residency leaves transformers.tokenization_utils_base as it is: KeyError"
    )
    assert outcome.errors.count(warning) == 1
    assert "'mine' is CUDA code" in outcome.answer["error"]
    assert "script.py:18" in outcome.answer["error"]
    assert "by the script's flags" in outcome.answer["error"]
    # The workspaces of cuBLAS are not what a pass made, before the first step as after it.
    assert outcome.answer["steps"] == 1
    held = outcome.phase("backward")["at_peak"]
    assert held["other"] >= 2 * WORKSPACE
    assert held["activations"] < 1 << 20


LIBRARY = """
import torch
@torch.compile
def doubled(x):
    return 2 * x
"""


@pytest.mark.parametrize("calls", [False, True])
def test_what_a_library_compiles_on_import_counts_where_it_is_called(
    dry_run, tmp_path, calls: bool
) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "library.py").write_text(LIBRARY)
    uses = "assert library.doubled(torch.ones(3)).sum() == 6"
    call = uses if calls else "raise ValueError('torch._inductor.compile_fx' in sys.modules)"
    outcome = dry_run(
        f"import sys, torch\nsys.path.append('site-packages')\nimport library\n{call}\n"
    )
    assert outcome.answer["has_compiled"] == calls, outcome.errors
    # What a script does not reach for an error of its own, no argument would let it reach.
    assert ("nothing was put on the device" in outcome.errors) == calls
    assert outcome.answer["is_complete"] == calls
    assert calls or outcome.answer["error"].startswith("ValueError: False")  # nothing was compiled


def test_a_crash_of_foreign_code_is_named_with_its_line(dry_run) -> None:
    outcome = dry_run("import ctypes, torch\nx = torch.ones(3, device='cuda')\nctypes.string_at(8)")
    assert outcome.status == 3
    assert outcome.answer["error"].startswith("Segmentation fault (script.py:3)")


OUT_OF_MEMORY = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 4096), nn.Linear(4096, 64)

    def forward(self, x):
        return self.narrow(torch.sin(self.wide(x)))

def attempt(function):
    try:
        function()
    except torch.cuda.OutOfMemoryError:
        pass

block = Block().cuda()
kept = torch.empty(1, device="cuda")

attempt(lambda: torch.ones(1 << 30, device="cuda"))
attempt(lambda: block(torch.ones(1 << 18, 64, device="cuda")))
x = torch.ones(1 << 14, 4096, device="cuda", requires_grad=True)
weight = torch.ones(4096, 4096, device="cuda", requires_grad=True)
loss = (x @ weight).sum()
torch.cuda.empty_cache()
free, _ = torch.cuda.mem_get_info()
filler = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
attempt(lambda: loss.backward())
"""


def test_an_out_of_memory_error_has_its_phase_its_line_and_its_operation(dry_run) -> None:
    outcome = dry_run(OUT_OF_MEMORY, options=("--capacity", "2GiB"))
    found = [
        (each["phase"], each["operation"], int(each["line"].rpartition(":")[2]))
        for each in outcome.answer["out_of_memory"]
    ]
    lines = ["", *OUT_OF_MEMORY.splitlines()]
    assert [(phase, operation) for phase, operation, _ in found] == [
        ("set up", "torch.ones"),
        ("forward", "Linear.forward"),
        ("backward", "MmBackward0"),
    ]
    assert "1 << 30" in lines[found[0][2]]
    assert "self.wide(x)" in lines[found[1][2]]
    assert "loss.backward()" in lines[found[2][2]]
