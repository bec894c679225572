"""The lines that a user adds to a script, or to its command, for the changes that a run was made
with.

They are read off the run's settings, all at once: of two changes that one call of residency makes
that call is printed once. Names that a script chooses itself stand as most scripts have them
(``model``, ``optimizer``, ``folder``); ``...`` stands for what the script has there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from residency._dryrun._settings import RunSettings
from residency._units import MIB

Found = Mapping[str, Any]  # what a run's child found
_DOORS = "residency.integrations"
_VIEWS = "gradient_as_bucket_view=True"
_AROUND = "# around each evaluation or generation"


def lines_of(settings: RunSettings, found: Found) -> tuple[str, ...]:
    """Returns the lines, those of the command first.

    Args:
        settings: Those of a run with changes.
        found: What it found.
    """
    libraries = found["libraries"]
    if "transformers.trainer" in libraries:
        made = _of_transformers(settings, found)
    elif "lightning" in libraries or "pytorch_lightning" in libraries:
        made = _of_lightning(settings, libraries)
    else:
        made = _of_loop(settings, found)
    return (*_of_command(settings, found), *made, *_of_blocks(settings, found))


def _package(libraries: Collection[str]) -> str:
    return "lightning.pytorch" if "lightning" in libraries else "pytorch_lightning"


def _of_command(settings: RunSettings, found: Found) -> Iterator[str]:
    for name, value in settings.environment.items():
        yield f"export {name}={value}"
    words = list(settings.words.values())
    for name, given in settings.arguments.items():
        flag = found["arguments"][name]["flag"]
        words += [flag] if given is True else [f"{flag} {given}"]
    if words:
        yield " ".join(words)


def _resident(settings: RunSettings) -> list[str]:
    """Returns the argument of an offload, as it is written in a call, or none."""
    num = (settings.offload or 0) // MIB
    return [f'resident="{num}MiB"'] if num else []


def _of_transformers(settings: RunSettings, found: Found) -> Iterator[str]:
    fields = ", ".join(f"{name}={value}" for name, value in settings.trainer_arguments.items())
    if fields:
        yield f"{found['trainer']['arguments']}(..., {fields})"
    trainer = found["trainer"].get("class", "Trainer")
    has_mixin = settings.saves_on_host or settings.loads_on_host
    if has_mixin or settings.offload is not None or settings.calls_back:
        mixin = ", ResidencyTrainerMixin" * has_mixin
        yield f"from {_DOORS}.transformers import ResidencyCallback{mixin}"
        if has_mixin:
            yield f"class MyTrainer(ResidencyTrainerMixin, {trainer}): ..."
        how = "offload=False" if settings.offload is None else "".join(_resident(settings))
        call = f"callbacks=[ResidencyCallback({how})]"
        place = f"  # in place of each {trainer}(...)" * has_mixin
        yield f"{'MyTrainer' if has_mixin else trainer}(..., {call}){place}"
    if settings.parks_state:
        yield "import residency"
        yield f"with residency.parked(trainer.optimizer.optimizer):  {_AROUND}"


def _of_lightning(settings: RunSettings, libraries: Collection[str]) -> Iterator[str]:
    given = {}
    if settings.offload is not None or settings.parks_state:
        sizes = [f"offload=dict({each})" for each in _resident(settings)]
        offload = ["offload=False"] if settings.offload is None else sizes
        parks = ["park_in_validation=True"] * settings.parks_state
        given["callbacks"] = f"ResidencyCallback({', '.join(offload + parks)})"
    if settings.saves_on_host or settings.loads_on_host:
        given["plugins"] = "ResidencyCheckpointIO()"
    if given:
        names = ", ".join(call.partition("(")[0] for call in given.values())
        yield f"from {_DOORS}.lightning import {names}"
        calls = ", ".join(f"{key}=[{call}]" for key, call in given.items())
        yield f"Trainer(..., {calls})  # each of them"
    if settings.views_buckets:
        yield f"from {_package(libraries)}.strategies import DDPStrategy"
        yield f"Trainer(..., strategy=DDPStrategy({_VIEWS}))  # each of them"


def _of_loop(settings: RunSettings, found: Found) -> Iterator[str]:
    """Yields the lines of a script that has a loop of its own."""
    is_saved = settings.saves_on_host or (settings.defers_state and settings.loads_on_host)
    if settings.offload is not None or settings.parks_state or is_saved:
        yield "import residency"
    if settings.views_buckets and "accelerate" in found["libraries"]:
        yield "from accelerate import DistributedDataParallelKwargs"
        yield f"Accelerator(..., kwargs_handlers=[DistributedDataParallelKwargs({_VIEWS})])"
    elif settings.views_buckets:
        yield f"DistributedDataParallel(..., {_VIEWS})"
    if settings.offload is not None:
        when = (
            "once accelerate has prepared it" if "accelerate" in found["libraries"] else "at once"
        )
        given = ", ".join(["optimizer", *_resident(settings)])
        yield f"residency.offload_optimizer({given})  # {when}"
    if settings.parks_state:
        yield f"with residency.parked(optimizer):  {_AROUND}"
    if is_saved:
        yield "checkpointer = residency.Checkpointer(folder)"
        yield (
            'checkpointer.save(step, {"model": model, "optimizer": optimizer})  '
            "# of the live objects"
        )
    if settings.defers_state and settings.loads_on_host:
        yield 'checkpointer.restore({"model": model, "optimizer": optimizer})'
    elif settings.loads_on_host and "peft" in found["libraries"]:
        yield 'model.load_adapter(folder, name, torch_device="cpu")'
    elif settings.loads_on_host:
        yield 'torch.load(file, map_location="cpu")'
    if settings.defers_template:
        yield f"from {_DOORS}.dcp import TrainState"
        yield "state = TrainState(model, optimizer)  # without get_state_dict and set_state_dict"
        yield 'dcp.save({"app": state}, checkpoint_id=folder)'
        yield 'dcp.load({"app": state}, checkpoint_id=folder)'


def _of_blocks(settings: RunSettings, found: Found) -> Iterator[str]:
    if not settings.checkpointing:
        return
    if found["recomputed"] == "transformers":
        yield "model.gradient_checkpointing_enable()  # once it is made, and loaded"
        if "peft" in found["libraries"]:
            yield "model.enable_input_require_grads()"
        return
    yield "import functools"
    yield "from torch.utils.checkpoint import checkpoint"
    for name in found["recomputed"]:
        yield f"for block in {_attribute(name)}:  # once the model is made"
        call = "functools.partial(checkpoint, block.forward, use_reentrant=False)"
        yield f"    block.forward = {call}"


def _attribute(name: str) -> str:
    """Returns how a script names a part of its model."""
    parts = name.split(".") if name else []
    if all(part.isidentifier() for part in parts):
        return ".".join(["model", *parts])
    return f"model.get_submodule({name!r})"
