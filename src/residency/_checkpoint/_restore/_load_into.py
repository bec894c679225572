"""Loads a checkpoint of any known format into a module that exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from residency._checkpoint._capture._own_pairs import ModuleState
from residency._checkpoint._capture._wrappers import plain_module
from residency._checkpoint._disk._manifest import MANIFEST
from residency._checkpoint._disk._naming import damage_named
from residency._checkpoint._disk._open_save import StoredSave, open_save
from residency._checkpoint._document._nodes import MODULE, kind_of
from residency._checkpoint._restore._document import DocumentPlan
from residency._checkpoint._restore._fill import staging_bytes_of
from residency._checkpoint._restore._modules import SavedModule, plan_module
from residency._checkpoint._restore._plan import Differences, RestorePlan
from residency._checkpoint._restore._restore import carry_out, settled
from residency._checkpoint._restore._values import SavedValue
from residency._checkpoint._sources import open_source
from residency._checkpoint._sources._own import find_save, saved_for_rank
from residency._checkpoint._sources._source import Source, TensorName
from residency._errors import RefusedError, listed
from residency._modes import inference_mode_off
from residency._ranks import rank_and_world_size

_MOST_LISTED = 5  # names


@inference_mode_off()
def load_into(
    module: nn.Module,
    path: str | Path,
    *,
    name: str | None = None,
    strict: bool = True,
    staging: int | str = "64MiB",
) -> Differences:
    """Fills a module's parameters and persistent buffers from a checkpoint, in place.

    Parameters keep their identity, ties, hooks, shards and ``requires_grad``. Every difference is
    found before a byte moves. Names are the keys of the module's ``state_dict()``, with its hooks.
    If parts of it load in a way of their own (hooks, ``_load_from_state_dict``, lazy parameters,
    buffers of another size), its ``load_state_dict`` is called once the tensors are in place.

    Args:
        module: The module, on a device or the host, sharded or not.
        path: A save of this library under any name, a directory of such saves, whose newest is
            taken, a directory of ``torch.distributed.checkpoint``, a safetensors file or directory,
            or a file of ``torch.save``.
        name: The name of the module's weights in it, such as ``"ema"`` or ``"state_dict.model"``.
            Without a name, the weights are at the top, or below the one name under which they fit.
        strict: Whether missing and unexpected names and other shapes and dtypes are refused; else
            they are left out, with a warning.
        staging: The bytes of the ring through which a device is filled.

    Returns:
        The names that were left out.

    Raises:
        InvalidArgumentError: ``staging`` is no size.
        RefusedError: The checkpoint does not fit, has several sets of weights that fit, or cannot
            be read safely. Nothing was changed.
        CorruptSaveError: The files are damaged. Some tensors may have been filled.
        CheckpointError: A file cannot be read.

    Memory:
        At most the ring on the device and on the host, page-locked. Tensors that the module makes
        anew for its state dict are on the host once more, and on its device.
    """
    staging_bytes = staging_bytes_of(staging)
    path = Path(path)
    if (folder := find_save(path)) is not None:
        with damage_named(folder, file=MANIFEST):
            return load_save(
                module, open_save(folder), name=name, strict=strict, staging_bytes=staging_bytes
            )
    with damage_named(path), open_source(path) as source:
        plan = RestorePlan(source, staging_bytes)
        return _load_by_names(module, plan, name, strict)


def load_save(
    module: nn.Module,
    save: StoredSave,
    *,
    name: str | None = None,
    strict: bool,
    staging_bytes: int,
) -> Differences:
    """Fills a module from a save of this library; see ``load_into``."""
    rank, world_size = rank_and_world_size()
    saved = saved_for_rank(save, rank=rank, world_size=world_size)
    plan = RestorePlan(saved, staging_bytes)
    if not any(kind_of(node) == MODULE for node in saved.values.values()):
        # Of state dicts, as torch's distributed checkpoints save them.
        return _load_by_names(module, plan, name, strict)
    name = _module_in(saved, module, name)
    document = DocumentPlan(plan, {}, eager=False)
    document.visit(name, saved.values[name], module)
    found = settled(plan, f"{saved.path.name}, {name}", strict=strict)
    carry_out(plan)
    return found


def _load_by_names(
    module: nn.Module, plan: RestorePlan, name: str | None, strict: bool
) -> Differences:
    """Fills a module from tensors that have its names, or its names behind one prefix; what else
    its own state dict has comes from the tree that the file has of both.
    """
    names, what = list(plan.source.tensors), str(plan.source.path)
    prefix = find_prefix(module, names, what) if name is None else f"{name}." * bool(name)
    if name and not any(each.startswith(prefix) for each in names):
        raise RefusedError(
            f"{what} has no tensors below {name!r}; its first are {listed(names, _MOST_LISTED)}. "
            "Nothing was changed."
        )
    saved = SavedModule(
        {name[len(prefix) :]: name for name in names if name.startswith(prefix)},
        values=_plain_values(module, plan.source, prefix),
    )
    plan_module(plan, module, saved, prefix="")
    found = settled(plan, what, strict=strict)
    carry_out(plan)
    return found


def _plain_values(module: nn.Module, source: Source, prefix: str) -> dict[str, SavedValue]:
    """Returns what the module's state dict has beside tensors, as a source has it."""
    tree = None if source.kind == "residency" else source.values  # whose nodes are no values
    for part in prefix.split(".")[:-1]:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    if not isinstance(tree, Mapping):
        return {}
    entries = ModuleState(plain_module(module)).entries.items()
    names = [name for name, entry in entries if not isinstance(entry.value, Tensor)]
    return {
        name: SavedValue(name, None, value=tree[name])
        for name in names
        if name in tree and not _has_tensors(tree[name])
    }


def _has_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, TensorName)


def find_prefix(module: nn.Module, names: Sequence[str], what: str) -> str:
    """Returns what stands before the module's names in a checkpoint: nothing, or a path such as
    ``"model."`` under which most of them are.

    Raises:
        RefusedError: As many are under several paths, and none without one.
    """
    mine = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    mine |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    mine |= ModuleState(plain_module(module)).entries.keys()  # as its own state dict has them
    lengths = {name.count(".") for name in mine}
    counts: dict[str, int] = {"": sum(name in mine for name in names)}
    for name in names:
        # Only cuts that leave a name as deep as one of the module's can fit.
        cuts = _last_dots(name, max(lengths, default=-1) + 1)
        for depth in lengths:
            if depth < len(cuts) and name[cuts[depth] + 1 :] in mine:
                prefix = name[: cuts[depth] + 1]
                counts[prefix] = counts.get(prefix, 0) + 1
    best = max(counts.values())
    found = [prefix for prefix, number in counts.items() if number == best]
    if not best or "" in found:
        return ""
    if len(found) > 1:
        paths = listed([prefix[:-1] for prefix in found], _MOST_LISTED)
        raise RefusedError(
            f"{what} has tensors of this {type(module).__name__}'s names under {paths}. "
            "Nothing was changed; give load_into the one that you mean, by its argument name."
        )
    return found[0]


def _last_dots(name: str, most: int) -> list[int]:
    """Returns where the last dots of a name are, the last one first."""
    found: list[int] = []
    end = len(name)
    while len(found) < most and (end := name.rfind(".", 0, end)) >= 0:
        found.append(end)
    return found


def _module_in(saved: Source, module: nn.Module, name: str | None) -> str:
    """Returns the name under which a save has this module.

    Raises:
        RefusedError: There is none, or several of which none has this one's names.
    """
    nodes: Mapping[str, Any] = {
        name: node for name, node in saved.values.items() if kind_of(node) == MODULE
    }
    if name is None and len(nodes) == 1:
        return next(iter(nodes))
    mine = {each for each, _ in module.named_parameters(remove_duplicate=False)}
    fitting = [each for each, node in nodes.items() if mine and mine <= set(node["keys"])]
    if name is None and len(fitting) == 1:
        return fitting[0]
    if name in nodes:
        return str(name)
    there = listed(list(nodes), _MOST_LISTED)
    found = f"{len(fitting)} have all parameters of this {type(module).__name__}"
    raise RefusedError(
        f"{saved.path} has the modules {there}; among them "
        + (found if name is None else f"none is {name!r}")
        + ". Nothing was changed; give load_into the name of the one that you mean."
    )
