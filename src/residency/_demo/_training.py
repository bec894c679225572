"""One training run of a Qwen3-architecture model, measured phase by phase, until it ends or runs
out of memory.

Owns no device state after it returns: the outcome holds host tensors and numbers only, so that the
next run finds the device empty.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from residency import _device
from residency._demo._corpus import Corpus, heldout_batch, training_batch
from residency._demo._settings import ModelShape, Settings
from residency._errors import RefusedError
from residency._units import parse_bytes

_VOCABULARY_SIZE = 256  # one token per byte value
_HELD_OUT_ROWS = 16
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?([KMGT]?i?B|bytes)")

OptimizerMaker = Callable[[torch.nn.Module], torch.optim.Optimizer]
Advance = Callable[[str, int], None]


@dataclass
class TrainingOutcome:
    """The numbers that a run gave, and copies on the host.

    Attributes:
        losses: Training loss of every step that gave one.
        heldout_loss: Loss on the held-out text after the last step, or None.
        peaks: The most device bytes allocated at once, by phase.
        step_growth_bytes: The most that an optimizer step had allocated beyond what it began with.
        failed_phase: The phase that ran out of memory, or None.
        failed_step: The step it happened in, from 1, or None.
        asked_bytes: The bytes of the request that failed, when the error says so.
        parameters: Final parameters by name.
        state_dict: Final ``state_dict()`` of the optimizer.
        seconds: Wall time.
    """

    losses: list[float] = field(default_factory=list)
    heldout_loss: float | None = None
    peaks: dict[str, int] = field(default_factory=dict)
    step_growth_bytes: int = 0
    failed_phase: str | None = None
    failed_step: int | None = None
    asked_bytes: int | None = None
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    state_dict: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def peak_bytes(self) -> int:
        """Returns the most device bytes allocated at once in any phase."""
        return max(self.peaks.values(), default=0)


class _Meter:
    """A meter of the device's peak in each phase."""

    def __init__(self, outcome: TrainingOutcome) -> None:
        self._outcome = outcome
        self.phase = "load"
        self.step: int | None = None
        self._begin_bytes = 0

    def enter(self, phase: str, step: int | None = None) -> None:
        self.phase, self.step = phase, step
        _device.reset_peak()
        self._begin_bytes = _device.memory_allocated()

    def leave(self) -> None:
        peak_bytes = _device.max_memory_allocated()
        peaks = self._outcome.peaks
        peaks[self.phase] = max(peaks.get(self.phase, 0), peak_bytes)
        if self.phase == "optimizer step":
            growth_bytes = peak_bytes - self._begin_bytes
            self._outcome.step_growth_bytes = max(self._outcome.step_growth_bytes, growth_bytes)


def make_model(shape: ModelShape, *, seed: int, num_columns: int) -> torch.nn.Module:
    """Returns a Qwen3-architecture causal language model on the host, its weights drawn from the
    seed.

    Raises:
        RefusedError: ``transformers`` is not installed.
    """
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise RefusedError(
            f"The demo trains a Qwen3 model from transformers, which cannot be imported ({error}). "
            "Install it with: pip install 'residency[demo]'"
        ) from error
    config = Qwen3Config(
        vocab_size=_VOCABULARY_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=num_columns,
        use_cache=False,
        # The fused attention kernels have backward passes that are not deterministic.
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]  # any configuration takes it
    )
    torch.manual_seed(seed)
    model: torch.nn.Module = Qwen3ForCausalLM(config)
    return model


def train(
    device: torch.device,
    settings: Settings,
    corpus: Corpus,
    make_optimizer: OptimizerMaker,
    advance: Advance,
) -> TrainingOutcome:
    """Trains from the seed for the number of steps, and returns what happened.

    Running out of memory is an outcome here, not an error.

    Args:
        device: Where the model trains.
        settings: Steps, seed and shapes.
        corpus: The text.
        make_optimizer: Called once with the model on the device.
        advance: Called with each phase and its step (0 before the first) as it begins.

    Raises:
        RefusedError: The parameters alone do not fit.
    """
    outcome = TrainingOutcome()
    meter = _Meter(outcome)
    start = time.perf_counter()
    try:
        _train(device, settings, corpus, make_optimizer, advance, outcome, meter)
    except torch.OutOfMemoryError as error:
        outcome.failed_phase, outcome.failed_step = meter.phase, meter.step
        outcome.asked_bytes = asked_bytes(str(error))
        # The frames of the traceback hold the model and the activations.
        error.__traceback__ = None
    meter.leave()
    if outcome.failed_phase == "load":
        raise RefusedError(
            "The parameters of the model alone do not fit the device's capacity, so no optimizer "
            "setting can help. Choose a smaller model or a larger capacity."
        )
    outcome.seconds = time.perf_counter() - start
    return outcome


def _train(
    device: torch.device,
    settings: Settings,
    corpus: Corpus,
    make_optimizer: OptimizerMaker,
    advance: Advance,
    outcome: TrainingOutcome,
    meter: _Meter,
) -> None:
    def enter(phase: str, step: int | None = None) -> None:
        meter.leave()
        meter.enter(phase, step)
        advance(phase, step or 0)

    meter.enter("load")
    columns = settings.num_columns
    model = make_model(settings.model, seed=settings.seed, num_columns=columns).to(device)
    optimizer = make_optimizer(model)
    for step in range(1, settings.num_steps + 1):
        batch = training_batch(
            corpus, seed=settings.seed, step=step, rows=settings.num_rows, columns=columns
        ).to(device)
        enter("forward", step)
        loss = model(input_ids=batch, labels=batch).loss
        enter("backward", step)
        loss.backward()
        outcome.losses.append(loss.item())
        del loss
        enter("optimizer step", step)
        optimizer.step()
        _device.synchronize()
        meter.leave()
        optimizer.zero_grad(set_to_none=True)
    enter("eval")
    batch = heldout_batch(corpus, rows=_HELD_OUT_ROWS, columns=columns).to(device)
    with torch.no_grad():
        outcome.heldout_loss = model(input_ids=batch, labels=batch).loss.item()
    outcome.parameters = {name: value.detach().cpu() for name, value in model.named_parameters()}
    outcome.state_dict = to_host(optimizer.state_dict())


def to_host(tree: object) -> Any:
    """Returns a tree with copies on the host in the place of its tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: to_host(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(to_host(value) for value in tree)
    return tree


def asked_bytes(message: str) -> int | None:
    """Returns the bytes that an out-of-memory error was asked for, if its message says so."""
    match = _ASKED.search(message)
    if match is None:
        return None
    unit = "B" if match[2] == "bytes" else match[2]
    # torch rounds to two decimals, so the product need not be whole.
    return round(float(match[1]) * parse_bytes(f"1{unit}"))
