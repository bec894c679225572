"""The GPUs that the simulator can stand for: what torch says of each, and where that is written."""

from __future__ import annotations

from dataclasses import dataclass

from residency._errors import InvalidArgumentError
from residency._units import MIB, parse_bytes

# "On H100, each primary context costs ~534 MiB" (github.com/meta-pytorch/torchcomms/pull/777).
CONTEXT_BYTES = 534 * MIB
_CONTEXT_SOURCE = "meta-pytorch/torchcomms/pull/777"
# Warps that a multiprocessor holds: CUDA C++ Programming Guide, table "Technical Specifications per
# Compute Capability".
_WARPS = {(7, 5): 32, (8, 0): 64, (8, 6): 48, (8, 9): 48, (9, 0): 64, (12, 0): 48}
_THREADS_OF_A_WARP = 32
_MEASURED = (9, 0)  # the architecture whose kernels a card has shown, an H100's


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A model of GPU, as torch sees one that nothing else uses.

    Attributes:
        title: The name that ``torch.cuda.get_device_name`` gives.
        capacity: Bytes, as torch's errors say "total capacity": less than the vendor's figure.
        capability: Of the compute architecture, as ``(8, 9)``.
        num_multiprocessors: As the vendor's data sheet says.
        capacity_source: The source of the capacity: a page of github.com with an error of such a
            card.
        context: Bytes that a process has besides torch's allocator: the context, and kernels and
            handles of libraries that it has loaded.
        context_source: The source of the context, of the same kind. In errors of torch it is the
            memory that "this process has in use" less "allocated by PyTorch" and "reserved by
            PyTorch but unallocated", each in hundredths of a GiB.
        peaks: The peaks of this card that predictions were compared with, by who made them.
    """

    title: str
    capacity: int
    capability: tuple[int, int]
    num_multiprocessors: int
    capacity_source: str
    context: int = CONTEXT_BYTES
    context_source: str = _CONTEXT_SOURCE
    peaks: str = ""

    @property
    def threads_per_multiprocessor(self) -> int:
        """Threads that a multiprocessor holds at most, by the capability."""
        return _WARPS[self.capability] * _THREADS_OF_A_WARP

    @property
    def rests_on(self) -> str:
        """The measurements, or the sources alone, that a dry run's figures for it come from."""
        kernels = "memory of kernels measured on an H100 (torch 2.11)"
        if self.capability != _MEASURED:
            kernels = (
                "memory of kernels by the rules in torch's sources for its architecture, and "
                "cuDNN's workspaces by an H100's"
            )
        peaks = "compared with " + (self.peaks or "no peak of this card")
        context = "an H100's" if self.context_source == _CONTEXT_SOURCE else "a published one"
        return f"{kernels}; {peaks}; context: {context}"


def _gpu(
    title: str,
    gib: float,
    capability: tuple[int, int],
    multiprocessors: int,
    source: str,
    context: tuple[int, str] = (CONTEXT_BYTES // MIB, _CONTEXT_SOURCE),
    peaks: str = "",
) -> Gpu:
    return Gpu(
        title=title,
        capacity=int(gib * parse_bytes("1GiB")) // MIB * MIB,
        capability=capability,
        num_multiprocessors=multiprocessors,
        capacity_source=source,
        context=context[0] * MIB,
        context_source=context[1],
        peaks=peaks,
    )


_PRIME_RL = "PrimeIntellect-ai/prime-rl/blob/main/benchmarks/results/BENCHMARKS.md"
_T4 = "Zheng-Chong/CatVTON/issues/133"  # 240 MiB of a second process; the first one has less
_A10G = "meta-pytorch/torchtune/pull/229"
_L4 = "ArcInstitute/evo2/issues/190"
_L40S = "stepfun-ai/Step-Video-T2V/issues/8"
_RTX3090 = "invoke-ai/InvokeAI/issues/9413"  # of a process that has computed nothing yet
_RTX4090 = "3DTopia/Phidias-Diffusion/issues/8"
_RTX5090 = "Wan-Video/Wan2.1/issues/465"
_A100_40G = "TianheWu/CoSeR/issues/10"
_A100_80G = "HiDream-ai/VAREdit/issues/6"
# Peaks that predictions were compared with: docs/reference/dry-run-figures.md has each.
_OF_A10G = "3 peaks of LitGPT's"
_OF_L40S = "10 peaks of PEFT's"
_OF_A100 = "9 peaks of LitGPT's and 4 of LLMs-from-scratch's"
_OF_H100 = "2 peaks of torchtitan's"
_OF_H200 = "18 peaks measured on it (torch 2.11)"
# Capacities differ by some hundredths of a GiB between drivers: 23.52 to 23.65 for an RTX 4090.
# Of an H200's context nothing is published that we know: it has an H100's architecture.
GPUS: dict[str, Gpu] = {
    "t4": _gpu("Tesla T4", 14.56, (7, 5), 40, _T4, (240, _T4)),
    "l4": _gpu("NVIDIA L4", 22.03, (8, 9), 58, _L4, (236, _L4)),
    "a10g": _gpu("NVIDIA A10G", 22.19, (8, 6), 80, _A10G, (282, _A10G), _OF_A10G),
    "l40s": _gpu("NVIDIA L40S", 44.42, (8, 9), 142, _L40S, (420, _L40S), _OF_L40S),
    "rtx3090": _gpu(
        "NVIDIA GeForce RTX 3090", 23.70, (8, 6), 82, "GaoLii/DSP/issues/10", (256, _RTX3090)
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090", 23.64, (8, 9), 128, "ali-vilab/VGen/issues/104", (504, _RTX4090)
    ),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", 31.37, (12, 0), 170, _RTX5090, (595, _RTX5090)),
    "a100-40g": _gpu(
        "NVIDIA A100-SXM4-40GB", 39.50, (8, 0), 108, _A100_40G, (501, _A100_40G), _OF_A100
    ),
    "a100-80g": _gpu(
        "NVIDIA A100-SXM4-80GB", 79.25, (8, 0), 108, _A100_80G, (409, _A100_80G), _OF_A100
    ),
    "h100-80g": _gpu("NVIDIA H100 80GB HBM3", 79.18, (9, 0), 132, _PRIME_RL, peaks=_OF_H100),
    "h200": _gpu("NVIDIA H200", 139.80, (9, 0), 132, _PRIME_RL, peaks=_OF_H200),
}
_ALIASES = {"h100": "h100-80g", "a100": "a100-40g", "4090": "rtx4090", "3090": "rtx3090"}
_ALIASES |= {"5090": "rtx5090"}

# Where none is named: an A100's kernels, which is what the simulator has modelled from the first.
# Its capability lets libraries take their plain paths (bfloat16 and TF32, no FP8).
UNNAMED = Gpu(
    title="Simulated CUDA device (residency)",
    capacity=0,
    capability=(8, 0),
    num_multiprocessors=108,
    capacity_source="",
)


def gpu_named(model: str, *, name: str = "gpu") -> tuple[str, Gpu]:
    """Returns a GPU and its name in the table; case, ``-``, ``_`` and spaces do not matter.

    Args:
        model: Which one.
        name: The caller's word for it; the error names it.

    Raises:
        InvalidArgumentError: No such GPU is known; the message lists the known ones.
    """

    def plain(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    wanted = plain(str(model)).removeprefix("nvidia").removeprefix("geforce")
    for known, entry in _ALIASES.items():
        if wanted == plain(known):
            return entry, GPUS[entry]
    for known, gpu in GPUS.items():
        if wanted in (plain(known), plain(known).removesuffix("g") + "gb"):
            return known, gpu
    raise InvalidArgumentError(
        f"{name} is {model!r}, which is not in the table; expected one of {', '.join(GPUS)}. "
        "For another card give its capacity."
    )
