"""The options of a case; with the defaults all cases take some three minutes on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from residency._errors import InvalidArgumentError
from residency._units import MIB


@dataclass(frozen=True)
class ModelShape:
    """The shape of the Qwen3-architecture model that the cases train on single bytes."""

    num_layers: int = 8
    hidden_size: int = 384
    intermediate_size: int = 1152
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    head_dim: int = 64
    vocabulary_size: int = 256  # one token per byte value


MIDDLING = ModelShape(
    num_layers=6,
    hidden_size=256,
    intermediate_size=768,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@dataclass(frozen=True)
class Settings:
    """The options of a case; on one kind of device equal settings give equal losses.

    Attributes:
        num_steps: Training steps of each run, at least 2: the first one still has no optimizer
            state in its forward and backward, and a capacity taken from it would say nothing.
        seed: Seeds the initial weights and the order of the batches.
        num_rows: Sequences in one batch.
        num_columns: Bytes in one sequence.
        bucket_bytes: Size of the unit in which optimizer state moves.
        num_slots: Device buffers of one bucket each.
        model: The shape of the model.
    """

    num_steps: int = 20
    seed: int = 0
    num_rows: int = 4
    num_columns: int = 128
    bucket_bytes: int = 8 * MIB
    num_slots: int = 3
    model: ModelShape = field(default_factory=ModelShape)

    def __post_init__(self) -> None:
        """Refuses counts that mean nothing."""
        least = {"num_steps": 2, "num_rows": 1, "num_columns": 1, "bucket_bytes": 1, "num_slots": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value < smallest:
                raise InvalidArgumentError(f"{name} is {value}; expected at least {smallest}.")
        if not 0 <= self.seed < 2**63:
            raise InvalidArgumentError(f"seed is {self.seed}; expected 0 or more, below 2**63.")


def settings_from(fields: Mapping[str, Any]) -> Settings:
    """Returns the settings of which ``dataclasses.asdict`` made these fields."""
    return Settings(**{**fields, "model": ModelShape(**fields["model"])})
