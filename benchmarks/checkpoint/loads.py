"""The ways to load a checkpoint into tensors that are there: residency, its peers, raw floors.

Each takes the folder that ``make_files`` filled and a state, and returns the files that it reads
and a function that loads them into the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.checkpoint import floors
from benchmarks.checkpoint.state import State

_STEP = 10


class Load(NamedTuple):
    path: Path
    load: Callable[[], object]


Loader = Callable[[Path, State], Load]


def make_files(folder: Path, state: State) -> None:
    """Writes the state once in each format, durable."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    import residency
    from benchmarks.checkpoint.saves import sync_path, torch_checkpointing_save

    with residency.Checkpointer(folder / "ours") as saver:
        saver.save(_STEP, state.named())
    flat = state.flat()
    torch.save(flat, folder / "state.pt")
    save_file(flat, folder / "state.safetensors")
    dcp.save(flat, checkpoint_id=folder / "dcp")
    try:
        with torch_checkpointing_save(state) as begin:
            begin(folder / "torch_checkpointing").done()
    except ImportError:
        pass  # the driver says that this peer is left out
    sync_path(folder)


def _ours(folder: Path, state: State) -> Load:
    import residency

    def load() -> None:
        with residency.Checkpointer(folder / "ours") as saver:
            saver.restore(state.named(), rng=False)

    return Load(folder / "ours", load)


def _copy(source: dict[str, Tensor], state: State) -> None:
    with torch.no_grad():
        for name, target in state.flat().items():
            target.copy_(source[name])


def _torch_load(folder: Path, state: State, *, mmap: bool) -> Load:
    path = folder / "state.pt"
    return Load(path, lambda: _copy(torch.load(path, weights_only=True, mmap=mmap), state))


def _load_file(folder: Path, state: State) -> Load:
    from safetensors.torch import load_file

    path = folder / "state.safetensors"
    return Load(path, lambda: _copy(load_file(path), state))


def _safe_open(folder: Path, state: State) -> Load:
    from safetensors import safe_open

    path = folder / "state.safetensors"

    def load() -> None:
        with safe_open(path, framework="pt") as opened, torch.no_grad():
            for name, target in state.flat().items():
                target.copy_(opened.get_tensor(name))

    return Load(path, load)


def _load_into(folder: Path, state: State, *, ours: bool) -> Load:
    import residency

    path = folder / "ours" / f"step-{_STEP:08}" if ours else folder / "state.safetensors"
    return Load(path, lambda: residency.load_into(state.model, path, strict=ours))


def _dcp_load(folder: Path, state: State) -> Load:
    import torch.distributed.checkpoint as dcp

    return Load(folder / "dcp", lambda: dcp.load(state.flat(), checkpoint_id=folder / "dcp"))


def _dcp_hf(folder: Path, state: State) -> Load:
    """Stock DCP reads the very files that residency wrote."""
    import torch.distributed.checkpoint as dcp

    path = folder / "ours" / f"step-{_STEP:08}"

    def load() -> None:
        dcp.load(state.flat(), storage_reader=dcp.HuggingFaceStorageReader(str(path)))

    return Load(path, load)


def _torch_checkpointing(folder: Path, state: State) -> Load:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    path = folder / "torch_checkpointing"
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    return Load(path, lambda: manager.load(str(path), into={"state": state.flat()}))


def _floor(folder: Path, state: State, *, threads: int) -> Load:
    path = folder / "ours"
    files = sorted(path.glob(f"step-{_STEP:08}/*.safetensors"))
    targets = list(state.flat().values())
    return Load(path, lambda: floors.read_files(files, targets, threads=threads))


OURS = "residency restore"
FLOORS = ("floor preadv x1", "floor preadv x2")
LOADERS: dict[str, Loader] = {
    OURS: _ours,
    "torch.load -> copy_": partial(_torch_load, mmap=False),
    "torch.load mmap -> copy_": partial(_torch_load, mmap=True),
    "safetensors load_file": _load_file,
    "safetensors safe_open": _safe_open,
    "dcp.load": _dcp_load,
    "dcp.load, HF reader, ours": _dcp_hf,
    "torch_checkpointing": _torch_checkpointing,
    FLOORS[0]: partial(_floor, threads=1),
    FLOORS[1]: partial(_floor, threads=2),
}
# These load the model alone, a third of the bytes: their seconds are not those of the others.
MODEL_LOADERS: dict[str, Loader] = {
    "load_into, our save": partial(_load_into, ours=True),
    "load_into, safetensors": partial(_load_into, ours=False),
}


def files_of(path: Path) -> Iterable[Path]:
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
