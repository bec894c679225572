"""The ways to save a state: residency, its peers with their usual and best settings, raw floors.

Each is a context manager that takes a state and yields a function from a path to a ``Begun`` save.
What each needs to be asked for once (an arena, a process, a stager) is made before the yield.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.checkpoint.state import State


def _nothing() -> None:
    pass


class Begun(NamedTuple):
    """Is a save on its way.

    Attributes:
        staged: Returns when the caller may change the state.
        done: Returns when the save is as durable as it gets.
        is_done: Says so, without a wait.
    """

    staged: Callable[[], Any] = _nothing
    done: Callable[[], Any] = _nothing
    is_done: Callable[[], bool] = lambda: True


Begin = Callable[[Path], Begun]
Saver = Callable[[State], AbstractContextManager[Begin]]


def sync_path(path: Path) -> None:
    """Brings a file or a directory with what is in it to the disk."""
    for each in [*path.rglob("*"), path] if path.is_dir() else [path]:
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def residency_save(state: State, *, prepared: bool = True, verify: str = "gate") -> Iterator[Begin]:
    import residency

    # A new directory per path, as each peer has it; one checkpointer, as a run has it.
    with (
        tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder,
        residency.Checkpointer(folder, keep=1, verify=verify) as saver,
    ):
        if prepared:
            saver.prepare(state.named())

        def begin(path: Path) -> Begun:
            save = saver.save(int(path.name.split("-")[-1]), state.named())
            return Begun(_nothing, save.wait, save.is_done)

        yield begin


@contextmanager
def torch_save(state: State, *, fsync: bool) -> Iterator[Begin]:
    def begin(path: Path) -> Begun:
        torch.save(state.flat(), path)
        if fsync:
            sync_path(path)
        return Begun()

    yield begin


@contextmanager
def safetensors_save(state: State, *, fsync: bool) -> Iterator[Begin]:
    from safetensors.torch import save_file

    def begin(path: Path) -> Begun:
        save_file(state.flat(), path)
        if fsync:
            sync_path(path)
        return Begun()

    yield begin


@contextmanager
def dcp_save(state: State) -> Iterator[Begin]:
    import torch.distributed.checkpoint as dcp

    def begin(path: Path) -> Begun:
        dcp.save(state.flat(), checkpoint_id=path)
        return Begun()

    yield begin


@contextmanager
def dcp_async(state: State, *, process: bool, stager: bool) -> Iterator[Begin]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    is_cuda = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=is_cuda,
        use_shared_memory=process,
        use_async_staging=True,
        use_non_blocking_copy=is_cuda,
    )
    reused = DefaultStager(options) if stager else None
    if process:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def begin(path: Path) -> Begun:
        response = dcp.async_save(
            state.flat(), checkpoint_id=path, async_checkpointer_type=kind, async_stager=reused
        )
        if isinstance(response, dcp.state_dict_saver.AsyncSaveResponse):
            upload = response.upload_completion
            return Begun(response.staging_completion.result, upload.result, upload.done)
        return Begun(_nothing, response.result, response.done)

    yield begin
    if reused is not None:
        reused.close()


@contextmanager
def torch_checkpointing_save(state: State) -> Iterator[Begin]:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    manager = CheckpointManager.Config(
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
    ).build()
    manager.prewarm_staging({"state": state.flat()})

    def begin(path: Path) -> Begun:
        written = manager.save(str(path), {"state": state.flat()})
        assert written is not None
        assert manager._staging_future is not None
        return Begun(manager._staging_future.result, written.result, written.done)

    yield begin
    manager.close()


@contextmanager
def lightning_save(state: State) -> Iterator[Begin]:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    plugin = AsyncCheckpointIO(TorchCheckpointIO())

    def begin(path: Path) -> Begun:
        plugin.save_checkpoint({"state_dict": state.flat()}, path)
        executor = plugin._executor
        assert executor is not None
        marker = executor.submit(_nothing)  # behind the save, in the same thread
        return Begun(_nothing, marker.result, marker.done)

    yield begin
    plugin.teardown()


@contextmanager
def floor_save(
    state: State, *, threads: int, direct: bool = True, crc32: bool = False
) -> Iterator[Begin]:
    """Copies all bytes into an arena that is there, and writes it: what no save can do without."""
    from benchmarks.checkpoint.floors import Arena

    arena = Arena(tensor.nbytes for tensor in state.flat().values())

    def begin(path: Path) -> Begun:
        arena.copy(state.flat().values())

        def write() -> None:
            arena.write(path, threads=threads, direct=direct, crc32=crc32)

        return Begun(_nothing, write)

    yield begin


OURS = "residency"
FLOORS = ("floor O_DIRECT x1", "floor O_DIRECT x2", "floor O_DIRECT x4")
SAVERS: dict[str, Saver] = {
    OURS: residency_save,
    "residency, no prepare": partial(residency_save, prepared=False),
    "residency, verify=read": partial(residency_save, verify="read"),
    "torch.save": partial(torch_save, fsync=False),
    "torch.save + fsync": partial(torch_save, fsync=True),
    "safetensors": partial(safetensors_save, fsync=False),
    "safetensors + fsync": partial(safetensors_save, fsync=True),
    "dcp.save": dcp_save,
    "dcp.async thread": partial(dcp_async, process=False, stager=False),
    "dcp.async thread, stager": partial(dcp_async, process=False, stager=True),
    "dcp.async process": partial(dcp_async, process=True, stager=False),
    "dcp.async process, stager": partial(dcp_async, process=True, stager=True),
    "torch_checkpointing": torch_checkpointing_save,
    "Lightning async": lightning_save,
    "floor buffered + fsync": partial(floor_save, threads=1, direct=False),
    FLOORS[0]: partial(floor_save, threads=1),
    FLOORS[1]: partial(floor_save, threads=2),
    FLOORS[2]: partial(floor_save, threads=4),
    "floor x2, crc32": partial(floor_save, threads=2, crc32=True),
}


def time_save(begin: Begin, path: Path) -> dict[str, float]:
    """Carries out one save and returns its seconds, all from the beginning of the call."""
    start = time.perf_counter()
    save = begin(path)
    call = time.perf_counter() - start
    save.staged()
    staged = time.perf_counter() - start
    save.done()
    return {"call": call, "staged": staged, "wall": time.perf_counter() - start}
