"""Models of Transformers and diffusers without their weights: ``from_pretrained`` reads a file of
their sizes.

The file takes no room: its tensors are holes. All else is the library's own way, so that a device
map, a quantisation and what loading takes on the device are those of a model with weights.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from residency._dryrun._methods import around
from residency._dryrun._saves import write_holes
from residency._errors import RefusedError

# What `from_pretrained` itself takes of its options; a configuration is made with the others.
_OF_LOAD = frozenset({
    *("attn_implementation", "device_map", "dtype", "experts_implementation", "max_memory"),
    *("low_cpu_mem_usage", "offload_folder", "quantization_config", "torch_dtype", "tp_plan"),
    *("distributed_config", "offload_state_dict", "key_mapping", "output_loading_info"),
})  # fmt: skip
_OF_FILES = ("subfolder", "use_safetensors", "variant")
_OF_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
_KIND = "bitsandbytes"  # the one that quantises what it loads


def make_weights(module: ModuleType, *, is_real: bool) -> None:
    """Makes models of Transformers load weights that are not there.

    Args:
        module: ``transformers.modeling_utils``.
        is_real: Whether kernels compute: the weights are then random numbers.
    """
    models: Any = vars(module)["PreTrainedModel"]
    load = models.from_pretrained.__func__

    @around(load)
    def from_pretrained(
        cls: Any, name: Any, *args: object, config: Any = None, **options: Any
    ) -> object:
        if name is None or options.get("state_dict") is not None:  # there are no weights to read
            return load(cls, name, *args, config=config, **options)
        if config is None or isinstance(config, str | os.PathLike):
            of_load = {key: options.pop(key) for key in _OF_LOAD & options.keys()}
            config, options = cls.config_class.from_pretrained(
                name if config is None else config, return_unused_kwargs=True, **options
            )
            options |= of_load
        config = _quantised_here(config, options)
        for key in _OF_FILES:
            options.pop(key, None)
        with _folder(cls, name, config, is_real) as folder:
            made = load(cls, folder, *args, config=config, **options)
        for each in made if isinstance(made, tuple) else (made,):  # with what loading says
            if isinstance(each, torch.nn.Module):
                named: Any = each
                named.name_or_path = named.config.name_or_path = str(name)
        return made

    wrapped: Any = from_pretrained
    models.from_pretrained = classmethod(wrapped)


def make_weights_of_diffusers(module: ModuleType, *, is_real: bool) -> None:
    """Makes models of diffusers, and so those of its pipelines, load weights that are not there.

    Args:
        module: ``diffusers.models.modeling_utils``.
        is_real: Whether kernels compute: the weights are then random numbers.
    """
    models: Any = vars(module)["ModelMixin"]
    load = models.from_pretrained.__func__

    @around(load)
    def from_pretrained(cls: Any, name: Any, **options: Any) -> object:
        where = {key: options.pop(key) for key in (*_OF_HUB, *_OF_FILES) if key in options}
        config = dict(cls.load_config(name, **{**where, "variant": None}))
        kind = config.pop("quantization_config", None)
        if kind is not None:
            _refuse_others(kind)
            options.setdefault("quantization_config", kind)
        dtype = options.get("dtype") or options.get("torch_dtype")
        file = vars(module)["SAFETENSORS_WEIGHTS_NAME"]
        with _weights(lambda: cls.from_config(config), dtype, file, is_real) as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            made = load(cls, folder, **options)
        (made[0] if isinstance(made, tuple) else made).register_to_config(_name_or_path=str(name))
        return made

    wrapped: Any = from_pretrained
    models.from_pretrained = classmethod(wrapped)


def ask_for_no_variant(module: ModuleType) -> None:
    """Makes pipelines of diffusers ask for no ``variant``, which is one of weights' files.

    Args:
        module: ``diffusers.pipelines.pipeline_utils``.
    """
    pipelines: Any = vars(module)["DiffusionPipeline"]
    load = pipelines.from_pretrained.__func__

    @around(load)
    def from_pretrained(cls: Any, name: Any, **options: Any) -> object:
        return load(cls, name, **{**options, "variant": None})

    wrapped: Any = from_pretrained
    pipelines.from_pretrained = classmethod(wrapped)


def _quantised_here(config: Any, options: dict[str, Any]) -> Any:
    """Returns the configuration of weights that are quantised as they are loaded."""
    kind: Any = getattr(config, "quantization_config", None)
    if kind is None:
        return config
    _refuse_others(kind)
    config = type(config).from_dict(config.to_dict())
    del config.quantization_config
    options.setdefault("quantization_config", kind)
    return config


def _refuse_others(kind: Any) -> None:
    """Refuses weights that are quantised in a way of their own.

    Raises:
        RefusedError: They are.
    """
    method = (kind if isinstance(kind, dict) else kind.to_dict()).get("quant_method")
    if _KIND not in str(method):
        raise RefusedError(
            f"--random-weights makes no weights that are quantised by {method}. "
            "Give the script a folder with the weights and leave the option out."
        )


@contextmanager
def _folder(cls: Any, name: Any, config: Any, is_real: bool) -> Iterator[str]:
    """Makes a folder of a model of Transformers whose weights are holes, for the time of a load."""
    said = getattr(config, "dtype", None)  # also as its name
    dtype = getattr(torch, said, None) if isinstance(said, str) else said
    with _weights(
        lambda: cls(type(config).from_dict(config.to_dict())), dtype, "model.safetensors", is_real
    ) as folder:
        config.to_json_file(Path(folder, "config.json"))
        _link(name, "generation_config.json", folder)
        yield folder


@contextmanager
def _weights(
    make: Callable[[], torch.nn.Module], dtype: object, name: str, is_real: bool
) -> Iterator[str]:
    """Makes a folder with a file of a model's weights, for the time of a load."""
    with torch.device("meta"):
        tensors = make().state_dict(keep_vars=True)  # a tied one is one object there
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    for key, each in tensors.items():  # of a tied one, the first name
        bare = each.detach()
        kept.setdefault(id(each), (key, bare.to(dtype) if bare.is_floating_point() else bare))
    folder = tempfile.mkdtemp(prefix="residency-weights-")
    try:
        file = Path(folder, name)
        if is_real:
            _write_random(dict(kept.values()), file)
        else:
            write_holes(dict(kept.values()), file, {"format": "pt"})
        yield folder
    finally:
        shutil.rmtree(folder)


def _write_random(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    made = {
        key: torch.empty(each.shape, dtype=each.dtype, device="cpu")
        for key, each in tensors.items()
    }
    for each in made.values():
        if each.is_floating_point():
            each.normal_(std=0.02, generator=generator)
        else:
            each.zero_()
    save_file(made, file, {"format": "pt"})


def _link(name: Any, file: str, folder: str) -> None:
    from transformers.utils.hub import cached_file

    found = cached_file(
        name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    if found is not None:
        os.symlink(os.path.abspath(found), Path(folder, file))
