"""What LitGPT's authors published of their own runs, and how each was started."""

from __future__ import annotations

from dataclasses import dataclass

A100, A10G = "a100-40g", "a10g"
# The commit that the page of the A100 names; one of eight days later, after which it was merged,
# and in which RMSNorm computes in float32; and the one that published what adapters need.
NAMED, LATER, OF_ADAPTERS = "8641822b3249", "6178c7cc58ba", "0f021f3ad8cd"
CONFIGS = "5895df1004c3"


@dataclass(frozen=True)
class Run:
    """A run whose peak its authors published.

    Attributes:
        commit: The sources that it was made with.
        kind: The script in ``finetune``.
        model: The model, by LitGPT's name of it or of its folder of configurations.
        published: What it printed, in GB of 10^9 bytes; None where it ran out of memory.
        micro_batch: Samples of a batch, where a constant of the script says so.
        ranks: GPUs.
        precision: As LitGPT names it, where the command says so.
    """

    commit: str
    kind: str
    model: str
    published: float | None
    micro_batch: int = 0
    ranks: int = 1
    precision: str = "bf16-true"

    @property
    def device(self) -> str:
        """The GPU, as ``--device`` names it."""
        return A10G if self.commit == CONFIGS else A100

    @property
    def texts(self) -> tuple[str, ...]:
        """The folders with texts to try, by their names; none where a configuration names it.

        Sharded runs keep the gradients of all ranks from one micro batch to the next, so that the
        peak is not in the longest sample, which comes first, but depends on the lengths of those
        that follow. They are not published: all shorter, and all as long, are the bounds.
        """
        if self.commit == CONFIGS:
            return ("",)
        return ("alpaca", "alpaca_long") if self.ranks > 1 else ("alpaca",)

    @property
    def title(self) -> str:
        """What the report calls it."""
        words = [f"{self.model}, {self.kind}"]
        words += [f"micro batch {self.micro_batch}"] if self.micro_batch else []
        words += [self.precision] if self.precision != "bf16-true" else []
        words += [f"{self.ranks} GPUs"] if self.ranks > 1 else []
        return f"{', '.join(words)}, at {self.commit[:7]}"


def _lora(commit: str, model: str, micro_batch: int, published: float | None) -> Run:
    return Run(commit, "lora", model, published, micro_batch)


def _adapter(kind: str, model: str, published: float) -> Run:
    return Run(OF_ADAPTERS, kind, model, published, 1)


def _config(kind: str, model: str, published: float | None, ranks: int = 1) -> Run:
    return Run(CONFIGS, kind, model, published, ranks=ranks)


_PHI, _STABLE = "phi-1_5", "stablelm-base-alpha-3b"
_LLAMA, _LLAMA_13B = "Llama-2-7b-hf", "Llama-2-13b-hf"

# Tokens of the longest sample of Alpaca in the tokens of each model, which each run begins with:
# https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md
LONGEST = {_PHI: 1044, _STABLE: 1034, _LLAMA: 1304, _LLAMA_13B: 1304}

# The same page, and tutorials/finetune_lora.md for bf16-mixed: A100-SXM4-40GB, torch 2.1.0+cu121.
# Runs that bitsandbytes quantised are left out: its kernels are CUDA's alone. So are most of the
# sharded ones, whose peaks depend on the lengths of samples that are not published.
OF_TABLES = (
    _lora(NAMED, _PHI, 1, 4.82),
    _lora(NAMED, _PHI, 2, 6.76),
    _lora(NAMED, _PHI, 4, 10.68),
    _lora(NAMED, _STABLE, 1, 9.69),
    _lora(NAMED, _STABLE, 2, 12.10),
    _lora(NAMED, _STABLE, 4, 16.92),
    Run(NAMED, "lora", _STABLE, 26.92, 1, precision="bf16-mixed"),
    _lora(LATER, _LLAMA, 1, 21.30),
    _lora(LATER, _LLAMA, 2, 29.07),
    _lora(LATER, _LLAMA, 4, None),
    _lora(LATER, _LLAMA_13B, 1, 38.12),
    _lora(LATER, _LLAMA_13B, 2, None),
    Run(LATER, "lora", _LLAMA, None, 1, precision="bf16-mixed"),
    _adapter("adapter", _STABLE, 9.10),
    _adapter("adapter", _LLAMA, 19.98),
    _adapter("adapter_v2", _STABLE, 10.71),
    _adapter("adapter_v2", _LLAMA, 25.51),
    Run(NAMED, "lora", _PHI, 4.86, 1, ranks=2),
)
# https://github.com/Lightning-AI/litgpt/blob/main/config_hub/finetune/README.md, of 2024-04-26, on
# A10G. Rows of "4xA10G" whose configuration asks for one device are the rows of one.
OF_CONFIGS = (
    _config("lora", "falcon-7b", 16.69),
    _config("lora", "gemma-2b", 12.62),
    _config("full", "gemma-2b", 17.43, ranks=4),
    _config("lora", "gemma-7b", None),
    _config("lora", "llama-2-7b", 19.77),
    _config("full", "llama-2-7b", None, ranks=4),
    _config("lora", "llama-3-8b", 19.73),
    _config("full", "llama-3-8b", None, ranks=4),
    _config("lora", "mistral-7b", 20.66),
    _config("lora", "phi-2", 13.98),
    _config("full", "phi-2", 14.44, ranks=2),
    _config("lora", "stablelm-base-alpha-3b", 8.58),
    _config("full", "stablelm-base-alpha-3b", 21.23, ranks=2),
    _config("full", "tiny-llama", 14.10),
    _config("lora", "tiny-llama", 13.50),
)
