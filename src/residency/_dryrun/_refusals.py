"""Advice on what a dry run cannot run: CUDA code that a script brings itself, a second device,
and what is on the network. The script's own error is shown as it is; this is the line below it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType

from residency._dryrun._methods import around
from residency._memory import ImportWatch

_INSTEAD = "Leave it out of the dry run by the script's flags"
_ATTENTION = f'{_INSTEAD}, such as attn_implementation="sdpa", whose memory a dry run knows.'
_QUANTIZED = "Leave --real out: a dry run that computes nothing knows what its kernels take."
_KERNELS = f"{_INSTEAD}, or call plain PyTorch in its place."
OF_CRASH = f"CUDA code that the script brings may have read the device's memory. {_KERNELS}"
# Packages with kernels of their own, by the name that is imported.
_PACKAGES = {
    "apex": _KERNELS,
    "bitsandbytes": _QUANTIZED,
    "causal_conv1d": _KERNELS,
    "cupy": _KERNELS,
    "deepspeed": _KERNELS,
    "flash_attn": _ATTENTION,
    "flash_attn_interface": _ATTENTION,
    "kernels": _KERNELS,
    "liger_kernel": _KERNELS,
    "mamba_ssm": _KERNELS,
    "numba": _KERNELS,
    "transformer_engine": _KERNELS,
    "triton": _KERNELS,
    "unsloth": _KERNELS,
    "vllm": _KERNELS,
    "xformers": _ATTENTION,
}
_DRIVER = re.compile(
    r"CUDA (error|driver)|NVIDIA driver|libcud|libnv|CUDA_HOME|nvcc|cuInit|PTX", re.I
)
_SECOND_DEVICE = re.compile(r"invalid device (ordinal|id|index)|cuda:[1-9]", re.I)
# Whose errors say that something could not be fetched.
_OF_NETWORK = frozenset({"urllib", "requests", "httpx", "huggingface_hub"})
_NOT_THERE = (
    "This is on the network, which a dry run does not reach. Put it on the disk, and give the "
    "script its path."
)
_WEIGHTS = (
    " For weights alone --random-weights does: the models of Transformers, diffusers, timm and "
    "torchvision are then made without them."
)
_NO_WEIGHTS = (
    " --random-weights does not make it. A model's configurations and tokenizers are a few MB: "
    "`hf download NAME --include '*.json' '*.txt' '*.model'` puts them there. If it is weights, "
    "build the model without."
)
_TOOL = "nvidia-smi"  # of the driver
_NVML = re.compile(r"NVML|libnvidia-ml|\bnvidia-smi\b")
_SPARSE = re.compile(r"of sparse tensors|Sparse(Csr)?(CUDA|PrivateUse1|Meta)|SparseTensorImpl")
_NO_KERNEL = re.compile(r"'_OpNamespace' '(\w+)' object has no attribute|Could not run '(\w+)::")


def advice(
    error: BaseException, trace: TracebackType | None, *, has_random_weights: bool = False
) -> str:
    """Returns what to do about an error that a dry run itself causes; nothing for others.

    Args:
        error: What was raised.
        trace: Where.
        has_random_weights: Whether models are made without their weights already.
    """
    for each in chain(error):
        root = (each.name or "").partition(".")[0] if isinstance(each, ImportError) else ""
        if root in _PACKAGES:
            return f"{root} has CUDA code, and cannot be imported here. {_PACKAGES[root]}"
    roots = list(_roots(trace))
    for root in reversed(roots):
        if root in _PACKAGES:
            return f"{root} runs CUDA code of its own, which a dry run cannot. {_PACKAGES[root]}"
    if "_share_cuda_" in _functions(trace):
        return (
            "A process cannot hand tensors of the device to another one in a dry run. Run one "
            "process, or one rank of a script that starts a process for each: --ranks 2."
        )
    if any(isinstance(e, FileNotFoundError) and e.filename == _TOOL for e in chain(error)):
        return f"A dry run has no {_TOOL}. {_INSTEAD}, or put an empty program of its name on PATH."
    if any(type(each).__module__.partition(".")[0] in _OF_NETWORK for each in chain(error)):
        return _NOT_THERE + (_NO_WEIGHTS if has_random_weights else _WEIGHTS)
    text = f"{type(error).__name__}: {error}"
    if _NVML.search(text):
        return (
            "A machine with a GPU has NVML and its programs, and a dry run has not. "
            f"{_INSTEAD}, or ask torch in its place: mem_get_info()."
        )
    if _SPARSE.search(text):
        return (
            "A dry run has the sparse gradients of embeddings, and of sparse tensors little else. "
            f"{_INSTEAD}, or take dense tensors: sparse=False."
        )
    if _SECOND_DEVICE.search(text):
        return (
            "A dry run has one device in a process. Try one rank of a script that starts a "
            "process for each: --ranks 2, or torchrun."
        )
    operator = _NO_KERNEL.search(text)
    if operator and operator[1] != "aten":
        name = operator[1] or operator[2]
        return f"The operators of {name!r} have no kernel here: they are CUDA code. {_KERNELS}"
    if _DRIVER.search(text):
        return f"This needs CUDA's own libraries, which a dry run has none of. {_KERNELS}"
    return ""


def refuse_sources() -> None:
    """Refuses to compile CUDA code while a script runs: it could not run, and takes minutes."""
    ImportWatch({"torch.utils.cpp_extension": _watch_builds}).start()


def _watch_builds(module: ModuleType) -> None:
    for name in ("load", "load_inline"):
        module.__dict__[name] = _refusing(vars(module)[name])


def _refusing(build: Callable[..., object]) -> Callable[..., object]:
    signature = inspect.signature(build)

    @around(build)
    def built(*args: object, **options: object) -> object:
        given = signature.bind(*args, **options).arguments
        sources = given.get("sources", ())
        files = [sources] if isinstance(sources, str) else sources
        is_cuda = any(str(file).endswith((".cu", ".cuh")) for file in files)
        if is_cuda or given.get("with_cuda") or given.get("cuda_sources"):
            raise NotImplementedError(
                f"{given['name']!r} is CUDA code, which a dry run does not compile. {_KERNELS}"
            )
        return build(*args, **options)

    return built


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that led to it, the last first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _functions(trace: TracebackType | None) -> Iterator[str]:
    """Yields the name of each function that was called."""
    while trace is not None:
        yield trace.tb_frame.f_code.co_name
        trace = trace.tb_next


def _roots(trace: TracebackType | None) -> Iterator[str]:
    """Yields the package of each call, outermost first."""
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        trace = trace.tb_next
