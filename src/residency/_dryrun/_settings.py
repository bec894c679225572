"""The settings that the parent of a dry run hands its child, through the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

VARIABLE = "RESIDENCY_DRY_RUN"
_OFFLINE = "HF_HUB_OFFLINE"  # of the Hugging Face Hub's library, read as it is imported
_TRACKER = "WANDB_MODE"  # of Weights & Biases, which sends from a process of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a dry run's child.

    Attributes:
        folder: Where each process of the child leaves what it found.
        capacity: Bytes of the device.
        gpu: The GPU's name in the simulator's table; None for a device of that capacity.
        others: Bytes that other programs take of the device.
        steps: After how many optimizer steps the script is brought to its end; 0 for never.
        ranks: Of how many processes this one is the first.
        is_real: Whether kernels compute bytes.
        random_weights: Whether pretrained models are made without their weights.
        offload: The bytes of ``resident=`` of a `residency.offload_optimizer` that the script gets;
            None for none.
        loads_on_host: Whether files are read to the host, and copied from there into what is on
            the device.
        defers_state: Whether a loaded optimizer's state waits on the host for its first step.
        defers_template: Whether a state that ``torch.distributed.checkpoint`` loads into is made on
            the host and waits there, too.
        calls_back: Whether a Trainer of Transformers gets a ``ResidencyCallback``.
        views_buckets: Whether gradients are views of the buckets of DistributedDataParallel.
        saves_on_host: Whether copies of a model's tensors, for a save, are made on the host.
        parks_state: Whether optimizers' state is on the host while the script evaluates or
            generates.
        checkpointing: Whether models recompute their activations.
        trainer_arguments: Fields of ``TrainingArguments`` that get these values, whatever the
            script says.
        arguments: What the script's parser returns under these names, whatever its command says.
        words: Other words of the command, by their place in it; the parent puts them there.
        shows_errors: Whether an error is shown that the script ends with when enough was seen.
        simulator: The folder with the simulator's package, for an interpreter that has none.
        environment: Variables that the child gets besides.
    """

    folder: str
    capacity: int
    gpu: str | None = None
    others: int = 0
    steps: int = 2
    ranks: int = 1
    is_real: bool = False
    random_weights: bool = False
    offload: int | None = None
    loads_on_host: bool = False
    defers_state: bool = False
    defers_template: bool = False
    calls_back: bool = False
    views_buckets: bool = False
    saves_on_host: bool = False
    parks_state: bool = False
    checkpointing: bool = False
    trainer_arguments: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, int | bool] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)
    shows_errors: bool = False
    simulator: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_changed(self) -> bool:
        """Whether a script runs with what a search for settings has changed in it, but for numbers
        and switches of its own.
        """
        return self.offload is not None or any(
            (
                self.loads_on_host,
                self.defers_state,
                self.defers_template,
                self.calls_back,
                self.views_buckets,
                self.saves_on_host,
                self.parks_state,
                self.checkpointing,
            )
        )

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that carry the settings."""
        variables = {VARIABLE: json.dumps(asdict(self)), **self.environment}
        variables.setdefault(_TRACKER, os.environ.get(_TRACKER, "offline"))
        if self.random_weights:  # names are those of the cache: no retry takes a minute
            variables |= {_OFFLINE: os.environ.get(_OFFLINE, "1")}
        if self.ranks > 1:
            size = str(self.ranks)
            variables |= {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": size}
            variables |= {"LOCAL_WORLD_SIZE": size}
        return variables

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RunSettings:
        """Reads the settings back."""
        return cls(**json.loads(environment[VARIABLE]))
