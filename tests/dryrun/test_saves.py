"""Saves and loads of a dry run: accounted as on a GPU, restored in the same run, and small."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from residency import Checkpointer
from residency._checkpoint import be_dry
from residency._cli import main
from residency._dryrun import _saves

MIB = 1 << 20


@pytest.fixture
def holes() -> Iterator[None]:
    """Makes saves of this process those of a dry run."""
    be_dry()
    yield
    be_dry(False)


def files_of(folder: Path) -> dict[str, int]:
    return {
        str(file.relative_to(folder)): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix in (".safetensors", ".distcp", ".pt")
    }


def bytes_on_disk(folder: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def state(value: float) -> dict[str, torch.Tensor]:
    return {
        "large": torch.full((3, MIB), value),
        "between": torch.full((MIB // 2,), value),
        "small": torch.full((1000,), value),
        "last": torch.full((5, MIB + 3), value),
        "step": torch.tensor(value),
    }


def test_a_dry_save_has_the_size_of_a_real_one_and_holes(tmp_path: Path, holes: None) -> None:
    with Checkpointer(tmp_path / "dry") as checkpointer:
        checkpointer.save(1, state(7.0)).wait()
    be_dry(False)
    with Checkpointer(tmp_path / "real") as checkpointer:
        checkpointer.save(1, state(7.0)).wait()
    assert files_of(tmp_path / "dry") == files_of(tmp_path / "real")
    assert bytes_on_disk(tmp_path / "real") > 32 * MIB
    assert bytes_on_disk(tmp_path / "dry") < MIB


def test_a_dry_save_is_whole_for_those_who_verify_it(tmp_path: Path, holes: None) -> None:
    with Checkpointer(tmp_path, verify="read") as checkpointer:
        checkpointer.save(1, state(7.0)).wait()
    be_dry(False)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    found = state(1.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(found)
    # Its checksums are those of the bytes that it has: of large tensors zeros.
    assert found["large"].count_nonzero() == found["last"].count_nonzero() == 0
    assert found["between"].count_nonzero() == 0
    assert found["small"].unique().tolist() == [7.0]
    assert found["step"].item() == 7.0


def test_a_dry_restore_reads_what_is_known_and_leaves_the_rest(tmp_path: Path, holes: None) -> None:
    found = state(1.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, state(7.0)).wait()
        assert checkpointer.restore(found) == 5
    assert found["small"].unique().tolist() == [7.0]
    assert found["step"].item() == 7.0
    assert found["large"].unique().tolist() == found["last"].unique().tolist() == [1.0]
    assert found["between"].count_nonzero() == 0  # so small that the simulator may know it


def test_a_dry_restore_finds_damage_beside_holes(tmp_path: Path, holes: None) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, state(7.0)).wait()
    large = next(tmp_path.rglob("large*.safetensors"))
    with large.open("r+b") as file:
        file.seek(6 * MIB)
        file.write(b"x")
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(Exception, match="checksum"):
        checkpointer.restore(state(1.0), step=5)


def test_a_dry_save_asks_for_no_room(
    tmp_path: Path, holes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 10, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(7.0)).wait()
        assert checkpointer.steps() == [1]


@pytest.mark.parametrize("index", [(slice(2, 4),), (slice(None), slice(5)), (1,), (..., 3)])
@pytest.mark.parametrize("width", [16, MIB])
def test_a_slice_of_a_file_has_the_shape_and_the_type_of_the_real_one(
    tmp_path: Path, index: tuple[object, ...], width: int
) -> None:
    import safetensors
    from safetensors.torch import save_file

    rows = torch.arange(6 * width, dtype=torch.int16).view(6, width)
    save_file({"rows": rows}, tmp_path / "rows.safetensors")
    with safetensors.safe_open(tmp_path / "rows.safetensors", "pt") as file:
        real = file.get_slice("rows")[index]
        part = _saves._Slice(file.get_slice("rows"), "cpu")
        assert part.get_shape() == [6, width]
        assert part.get_dtype() == "I16"
        found = part[index]
    assert found.shape == real.shape == rows[index].shape
    assert found.dtype == real.dtype
    assert found.device.type == "cpu"
    if width == 16:
        assert torch.equal(found, real)


def test_a_file_of_holes_has_the_header_of_the_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        "b": torch.ones(3, dtype=torch.bfloat16), "a": torch.ones(2, 2, dtype=torch.float16),
        "d": torch.ones(5, dtype=torch.complex64), "c": torch.ones(4, dtype=torch.int64),
        "f": torch.ones(0), "e": torch.tensor(True), "g": torch.zeros(MIB, 2),
    }  # fmt: skip
    for name, metadata in (("with", {"format": "pt"}), ("without", None)):
        save_file(tensors, tmp_path / f"{name}-real", metadata)
        _saves.write_holes(tensors, tmp_path / f"{name}-dry", metadata)
        assert (tmp_path / f"{name}-dry").read_bytes() == (tmp_path / f"{name}-real").read_bytes()
    found = load_file(tmp_path / "with-dry")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


CHECKPOINTER = """
import json, pathlib, sys, torch, residency
open(sys.argv[1], "w").close()  # a dry run removes files made after a save
from torch import nn
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
seen = []
def train():
    for _ in range(2):
        model(torch.ones(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
def see():
    seen.append([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()])
train()
with residency.Checkpointer("saves") as checkpointer:
    save = checkpointer.save(2, {"model": model, "optimizer": optimizer, "extra": {"epoch": 3}})
    see()
    save.wait()
    extra = {"epoch": 0}
    state = {"model": model, "optimizer": optimizer, "extra": extra}
    assert checkpointer.restore(state) == 2
    see()
assert extra["epoch"] == 3
assert int(optimizer.state[model[0].weight]["step"]) == 2
train()
assert int(optimizer.state[model[0].weight]["step"]) == 4
see()
figures = save.statistics()
files = [file.lstat() for file in pathlib.Path("saves").rglob("*.safetensors")]
json.dump([[seen, figures.copied_from_device_bytes, figures.pinned_bytes, figures.written_bytes,
            sorted(file.st_size for file in files)],
           sum(file.st_blocks * 512 for file in files)], open(sys.argv[1], "w"))
"""


def test_a_checkpointer_saves_and_restores_as_in_real_mode_and_is_counted(
    dry_run, tmp_path: Path
) -> None:
    seen = []
    for real in ((), ("--real",)):
        file = f"seen{len(real)}.json"
        outcome = dry_run(CHECKPOINTER, file, options=("--capacity", "4GiB", *real))
        assert outcome.has_run, outcome.errors
        assert {"save", "load"} <= {phase["name"] for phase in outcome.answer["phases"]}
        assert [*tmp_path.glob("saves/*/*")] == [] or real
        found, room = json.loads((tmp_path / file).read_text())
        assert room < 4 * MIB or real
        told = [outcome.answer[key] for key in ("files", "saved", "pinned_peak")]
        seen.append([found, told])
    assert seen[0] == seen[1]
    sizes = seen[0][0][-1]
    assert seen[0][1][:2] == [len(sizes), sum(sizes)]


SHARDED = """
import json, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
open("done", "w").close()  # a dry run removes files made after a save
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
import residency
from residency.integrations.dcp import ResidencyStorageReader, ResidencyStorageWriter
dist.init_process_group("nccl")
model = nn.Sequential(*[nn.Linear(1536, 1536) for _ in range(4)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
def train():
    for _ in range(2):
        model(torch.ones(8, 1536, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
def step():
    return int(next(iter(optimizer.state.values()))["step"])
def states():
    kept, of_optimizer = get_state_dict(model, optimizer)
    return {"model": kept, "optimizer": of_optimizer, "extra": torch.tensor([1, 2, 3])}
for reader, writer, folder in (
    (dcp.FileSystemReader, dcp.FileSystemWriter, "stock"),
    (ResidencyStorageReader, ResidencyStorageWriter, "ours"),
):
    train()
    before = step()
    dcp.save(states(), storage_writer=writer(folder))
    train()
    found = states() | {"extra": torch.zeros(3, dtype=torch.int64)}
    dcp.load(found, storage_reader=reader(folder))
    set_state_dict(model, optimizer, model_state_dict=found["model"],
                   optim_state_dict=found["optimizer"])
    assert found["extra"].tolist() == [1, 2, 3]
    assert step() == before, (step(), before)
with residency.Checkpointer("saves") as checkpointer:
    before = step()
    checkpointer.save(7, {"model": model, "optimizer": optimizer}).wait()
    train()
    assert checkpointer.restore({"model": model, "optimizer": optimizer}) == 7
    assert step() == before, (step(), before)
open("done", "w").write("all")
dist.destroy_process_group()
"""


@pytest.mark.whole
def test_one_rank_of_four_loads_what_it_saved(dry_run, tmp_path: Path) -> None:
    options = ("--capacity", "4GiB", "--ranks", "4", "--steps", "0")
    outcome = dry_run(SHARDED, options=options)
    assert outcome.has_run, outcome.errors
    assert (tmp_path / "done").read_text() == "all"
    assert bytes_on_disk(tmp_path) < 4 * MIB
    # A quarter of the parameters and of both moments, thrice.
    weights = 4 * (1536 * 1536 + 1536) * 4 // 4
    assert 9 * weights < outcome.answer["saved"] < 9 * weights + MIB


BACKGROUND = """
import json, threading, torch
open("seen.json", "w").close()  # a dry run removes files made after a save
from concurrent.futures import ThreadPoolExecutor
weights = torch.ones(8, 1 << 20).cuda()
seen = []
def see(held):
    seen.append([round(f() / weights.nbytes, 1) for f in (
        torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)] + held)
    torch.cuda.reset_peak_memory_stats()
pool = ThreadPoolExecutor(1)
written = []
for number in range(3):
    written.append(pool.submit(torch.save, weights.clone(), f"{number}.pt"))
    while not written[-1].done():
        pass
see([2, 3])  # the last one is under way, as was the one before it when its copy was made
pool.shutdown()
see([1, 2])
for number in range(2):
    thread = threading.Thread(target=torch.save, args=(weights.clone(), f"{number}.pt"))
    thread.start()
    thread.join()
see([1, 2])
assert pool.__class__(1).submit(torch.save, weights.clone(), "4.pt").result() is None
see([1, 2])
json.dump(seen, open("seen.json", "w"))
"""


def test_a_write_in_the_background_goes_on_until_the_next_save_or_until_it_is_waited_for(
    dry_run, tmp_path: Path
) -> None:
    outcome = dry_run(BACKGROUND, options=("--capacity", "4GiB"))
    assert outcome.has_run, outcome.errors
    for *found, allocated, peak in json.loads((tmp_path / "seen.json").read_text()):
        assert found == [allocated, peak]


STREAMS = """
import io, json, torch, torch.distributed.checkpoint as dcp
open("seen.json", "w").close()  # a dry run removes files made after a save
from lightning.fabric.utilities.cloud_io import _atomic_save
weights = {str(size): torch.ones(size, 1 << 20).cuda() for size in (3, 5)}
small = {"small": torch.arange(4.0)}
def see():
    seen.append([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()])
    torch.cuda.reset_peak_memory_stats()
seen = []
# Host memory that is used again: what lies in it is no zeros.
del [torch.full((1 << 20,), 3.0) for _ in range(20)][:]
dcp.async_save(weights | small, checkpoint_id="async").result()
see()
clones = {name: weight.clone() for name, weight in weights.items()}  # as some saves begin
_atomic_save(clones | small, "lightning.pt")
del clones
see()
with open("stream.pt", "wb") as file:
    torch.save({name: weight.cpu() for name, weight in weights.items()} | small, file)
see()
for name in ("lightning.pt", "stream.pt"):
    found = torch.load(name, map_location="cuda")
    assert {name: each.shape for name, each in found.items()} == {
        name: each.shape for name, each in (weights | small).items()}
    assert found["small"].tolist() == [0, 1, 2, 3]
    del found
    see()
json.dump(seen, open("seen.json", "w"))
"""


@pytest.mark.whole
def test_staged_and_cloned_saves_take_their_memory_and_no_room_on_the_disk(
    dry_run, tmp_path: Path
) -> None:
    outcome = dry_run(STREAMS, options=("--capacity", "4GiB"))
    assert outcome.has_run, outcome.errors
    weights = 8 * 4 * MIB
    seen = json.loads((tmp_path / "seen.json").read_text())
    rounded = [[round(each / weights, 1) for each in pair] for pair in seen]
    assert rounded == [[1, 1], [1, 2], [1, 1], [1, 2], [1, 2]]
    assert outcome.phase("save")["at_peak"]["other"] >= 2 * weights
    assert bytes_on_disk(tmp_path) < MIB
    assert 2 * weights < outcome.answer["saved"] < 2 * weights + MIB  # without the script's own
    assert outcome.answer["host_peak"] > weights


ACCELERATE = """
import torch
open("done", "w").close()  # a dry run removes files made after a save
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
accelerator = Accelerator(fsdp_plugin=plugin)
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(2)])
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
def train():
    accelerator.backward(model(torch.ones(8, 1024, device="cuda")).sum())
    optimizer.step()
    optimizer.zero_grad()
def step():
    return int(next(iter(optimizer.state.values()))["step"])
train()
accelerator.save_state("state")
train()
assert step() == 2
accelerator.load_state("state")
assert step() == 1
train()
open("done", "w").write("all")
"""


@pytest.mark.whole
def test_one_rank_of_four_loads_what_accelerate_saved(dry_run, tmp_path: Path) -> None:
    options = ("--capacity", "4GiB", "--ranks", "4", "--steps", "0")
    outcome = dry_run(ACCELERATE, options=options)
    assert outcome.has_run, outcome.errors
    assert (tmp_path / "done").read_text() == "all", outcome.errors


REWRITTEN = """
import os, shutil, torch

def write(other, place):
    if place == "saved":
        torch.save(other, "a.pt")
    elif place == "copied":
        torch.save(other, "b.pt")
        shutil.copyfile("b.pt", "a.pt")
    else:
        with open("a.pt", "wb") as file:
            torch.save(other, file)

for place in ("saved", "copied", "opened"):
    torch.save({"large": torch.ones(1 << 20), "small": torch.arange(3)}, "a.pt")
    state = torch.load("a.pt", map_location="cpu")
    write({"small": state["small"]}, place)
    assert state["large"].half().shape == (1 << 20,)
    assert state["small"].tolist() == [0, 1, 2]
    assert torch.load("a.pt")["small"].tolist() == [0, 1, 2]
    assert os.path.getsize("a.pt") < 1 << 20
torch.ones(3, device="cuda")
"""


def test_a_file_can_be_written_over_while_what_was_loaded_of_it_is_used(dry_run) -> None:
    outcome = dry_run(REWRITTEN)
    assert outcome.answer["ended"] == "finished", outcome.errors
