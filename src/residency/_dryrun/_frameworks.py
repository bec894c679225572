"""Changes of frameworks: models that are made from their configuration alone, and answers of full
length where what they say is not computed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from residency._dryrun._methods import Function, put_around
from residency._dryrun._native import leave_out_kernels
from residency._dryrun._random_weights import (
    ask_for_no_variant,
    make_weights,
    make_weights_of_diffusers,
)
from residency._dryrun._settings import RunSettings
from residency._memory import ImportWatch


def change(settings: RunSettings) -> None:
    """Makes the changes that the settings ask for, also in modules that are imported later."""
    watched: dict[str, Callable[[ModuleType], None]] = {}
    if settings.random_weights:
        watched["transformers.modeling_utils"] = functools.partial(
            make_weights, is_real=settings.is_real
        )
        watched["diffusers.models.modeling_utils"] = functools.partial(
            make_weights_of_diffusers, is_real=settings.is_real
        )
        watched["diffusers.pipelines.pipeline_utils"] = ask_for_no_variant
        watched["timm.models._builder"] = _keep_weights
        leave_out_downloads()
    if not settings.is_real:
        leave_out_kernels()
        for trainer in ("GRPOTrainer", "RLOOTrainer"):
            name = trainer.removesuffix("Trainer").lower()
            watched[f"trl.trainer.{name}_trainer"] = functools.partial(complete_answers, trainer)
    ImportWatch(watched).start()


def complete_answers(trainer: str, module: ModuleType) -> None:
    """Gives TRL's trainers answers of full length.

    They cut an answer at the token that ends it, which a mask of the device says, and truth values
    of a dry run are False: nothing would be left. The longest answers take the most memory.

    Args:
        trainer: The class.
        module: Where it is.
    """

    # It is the one method between the engine that generates and the answers; torch's hooks see
    # neither, and TRL has none.
    @put_around(getattr(module, trainer), "_generate_single_turn")
    def generated(generate: Function, self: Any, *args: object, **options: object) -> Any:
        found = generate(self, *args, **options)
        # Trainers before TRL 1.16 ask their tokenizer.
        ends = getattr(self, "eos_token_ids", None) or (self._tokenizer.eos_token_id,)
        token = next(number for number in itertools.count() if number not in ends)
        whole = [token] * self.max_completion_length

        def completed(answers: Any) -> Any:
            is_list = isinstance(answers, list) and all(isinstance(each, list) for each in answers)
            return [each or list(whole) for each in answers] if is_list else answers

        return tuple(map(completed, found)) if isinstance(found, tuple) else completed(found)


class _AnyWeights(dict[str, Any]):
    """The weights of a file that is not there: a model that they are loaded into keeps its own."""

    def __missing__(self, name: str) -> _AnyWeights:
        return self  # of a checkpoint that has the weights under a name


def leave_out_downloads() -> None:
    """Makes `torch.hub` download no weights: a model keeps those that it was made with."""

    @put_around(torch.hub, "load_state_dict_from_url")
    def downloaded(download: object, *args: object, **options: object) -> _AnyWeights:
        return _AnyWeights()

    @put_around(torch.nn.Module, "load_state_dict")
    def loaded(
        load: Function, module: ModuleType, state_dict: Any, *args: object, **options: object
    ) -> Any:
        if isinstance(state_dict, _AnyWeights):
            state_dict = module.state_dict()
        return load(module, state_dict, *args, **options)


def _keep_weights(module: ModuleType) -> None:
    """Makes timm load no weights: a model keeps those that it was made with."""
    put_around(module, "load_pretrained")(lambda load, *args, **options: None)
