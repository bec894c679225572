"""Changes of frameworks: models that are made from their configuration alone, and answers of full
length where what they say is not computed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from residency._dryrun._settings import RunSettings
from residency._memory import ImportWatch


def change(settings: RunSettings, note_made: Callable[[object], None]) -> None:
    """Makes the changes that the settings ask for, also in modules that are imported later.

    Args:
        settings: How the run is made.
        note_made: Is called with what stands in the place of another object.
    """
    watched: dict[str, Callable[[ModuleType], None]] = {}
    if settings.random_weights:
        make = functools.partial(_make_weights, note_made)
        watched["transformers.modeling_utils"] = make
        watched["transformers.models.auto.auto_factory"] = _refuse_hub
        watched["timm.models._builder"] = _keep_weights
        leave_out_downloads()
    if not settings.is_real:
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
    trainers: Any = vars(module)[trainer]
    generate = trainers._generate_single_turn

    @functools.wraps(generate)
    def generated(self: Any, *args: object, **options: object) -> Any:
        found = generate(self, *args, **options)
        # Trainers before TRL 1.16 ask their tokenizer.
        ends = getattr(self, "eos_token_ids", None) or (self._tokenizer.eos_token_id,)
        token = next(number for number in itertools.count() if number not in ends)
        whole = [token] * self.max_completion_length

        def completed(answers: Any) -> Any:
            is_list = isinstance(answers, list) and all(isinstance(each, list) for each in answers)
            return [each or list(whole) for each in answers] if is_list else answers

        return tuple(map(completed, found)) if isinstance(found, tuple) else completed(found)

    trainers._generate_single_turn = generated


class _AnyWeights(dict[str, Any]):
    """The weights of a file that is not there: a model that they are loaded into keeps its own."""

    def __missing__(self, name: str) -> _AnyWeights:
        return self  # of a checkpoint that has the weights under a name


def leave_out_downloads() -> None:
    """Makes `torch.hub` download no weights: a model keeps those that it was made with."""
    hub: Any = torch.hub
    modules: Any = torch.nn.Module
    download, load = hub.load_state_dict_from_url, modules.load_state_dict

    @functools.wraps(download)
    def downloaded(*args: object, **options: object) -> _AnyWeights:
        return _AnyWeights()

    @functools.wraps(load)
    def loaded(module: Any, state_dict: Any, *args: object, **options: object) -> Any:
        if isinstance(state_dict, _AnyWeights):
            state_dict = module.state_dict()
        return load(module, state_dict, *args, **options)

    hub.load_state_dict_from_url, modules.load_state_dict = downloaded, loaded


def _keep_weights(module: ModuleType) -> None:
    """Makes timm load no weights: a model keeps those that it was made with."""
    load: Any = vars(module)["load_pretrained"]
    module.__dict__["load_pretrained"] = functools.wraps(load)(lambda *args, **options: None)


def _check_is_folder(name: object) -> None:
    if not isinstance(name, str | os.PathLike) or not os.path.isdir(name):
        raise FileNotFoundError(
            f"--random-weights needs a folder with the model's config.json; {name!r} is "
            "none here. Make one, and give the script its path for the model's name."
        )


def _refuse_hub(module: ModuleType) -> None:
    """Keeps model classes of transformers from asking the hub what a name means."""

    def asked_of_a_folder(ask: Any) -> Any:
        @functools.wraps(ask)
        def asked(name: object, *args: object, **options: object) -> Any:
            _check_is_folder(name)
            return ask(name, *args, **options)

        return asked

    for first in ("resolve_revision", "cached_file"):  # of transformers 5, and of 4
        if first in vars(module):
            module.__dict__[first] = asked_of_a_folder(vars(module)[first])


def _make_weights(note_made: Callable[[object], None], module: ModuleType) -> None:
    models: Any = vars(module)["PreTrainedModel"]
    load = models.from_pretrained.__func__
    # Some versions leave the map out where a model is on one device: they go by this test.
    has_map = "len(set(device_map.values())) > 1" not in inspect.getsource(load)

    @functools.wraps(load)
    def from_pretrained(
        cls: Any, name: object, *args: object, config: Any = None, **options: Any
    ) -> torch.nn.Module:
        dtype = options.pop("dtype", options.pop("torch_dtype", None))
        device_map = options.pop("device_map", None)
        place = _one_place(device_map)
        if options.get("quantization_config") is not None:
            raise NotImplementedError(
                "--random-weights makes no quantised weights. Leave quantization_config out, or "
                "give the script a folder with the weights and leave the option out."
            )
        if config is None:
            _check_is_folder(name)
            config, options = cls.config_class.from_pretrained(
                name, return_unused_kwargs=True, **options
            )
        kept = {key: options[key] for key in ("attn_implementation",) if key in options}
        if dtype not in (None, "auto"):
            kept["dtype"] = dtype
        if name is not None:
            config.name_or_path = str(name)
        # On the device at once, as weights from a file come.
        with torch.device(place):
            model: Any = cls._from_config(config, **kept)
        if device_map is not None and has_map:
            model.hf_device_map = device_map if isinstance(device_map, dict) else {"": place}
        note_made(model)
        return model.eval()  # type: ignore[no-any-return]  # of a class that is not imported here

    made: Any = from_pretrained
    models.from_pretrained = classmethod(made)


def _one_place(device_map: object) -> Any:
    """Returns the device that a map of a model's modules names."""
    places = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    if len(set(map(str, places))) > 1:
        raise NotImplementedError(
            f"--random-weights puts a model on one device; device_map={device_map!r} has several. "
            "Give one, such as {'': 0}."
        )
    if places[0] in ("auto", "balanced", "balanced_low_0", "sequential"):
        return 0
    if places[0] == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return "cpu" if places[0] is None else places[0]
