"""Whoever meets a damaged save is told which one, which of its files, and what to do."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner

import residency
from residency import CorruptSaveError
from residency._checkpoint._disk._manifest import MANIFEST, dump_manifest
from residency._checkpoint._disk._open_save import read_manifest
from residency.integrations.dcp import ResidencyStorageReader

DATA = "model.safetensors"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def rewrite(folder: Path, **tree: Any) -> None:
    """Gives a save a document that is written as it should be, and says what makes no sense."""
    manifest = read_manifest(folder)
    manifest.ranks[0].document["tree"] |= tree
    (folder / MANIFEST).write_bytes(dump_manifest(manifest))


DAMAGES = {
    "data flipped": (DATA, lambda folder: flip(folder / DATA, 5000)),
    "header flipped": (DATA, lambda folder: flip(folder / DATA, 12)),
    "data cut": (DATA, lambda folder: os.truncate(folder / DATA, 5000)),
    "data gone": (DATA, lambda folder: os.unlink(folder / DATA)),
    "manifest flipped": (MANIFEST, lambda folder: flip(folder / MANIFEST, 40)),
    "manifest cut": (MANIFEST, lambda folder: os.truncate(folder / MANIFEST, 50)),
    "unknown kind": (MANIFEST, lambda folder: rewrite(folder, n={"$": "unknown"})),
    "senseless node": (MANIFEST, lambda folder: rewrite(folder, n={"$": "int"})),
    "unknown dtype": (MANIFEST, lambda folder: rewrite(folder, n={"$": "dtype", "value": "x"})),
}


@pytest.fixture
def root(tmp_path):
    with residency.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(7, {"model": nn.Linear(30, 30), "n": 1}).wait()
    return tmp_path / "run"


def restore(root, folder, step=None):
    with residency.Checkpointer(root) as checkpointer:
        checkpointer.restore({"model": nn.Linear(30, 30), "n": 0}, step=step)


def load_stock(root, folder):
    state = {"model": nn.Linear(30, 30).state_dict(), "n": 0}
    reader, planner = ResidencyStorageReader(folder), DefaultLoadPlanner()
    planner.set_up_planner(state, reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner)


DOORS = {
    "restore": restore,
    "restore of a step": lambda root, folder: restore(root, folder, 7),
    "load_into": lambda root, folder: residency.load_into(nn.Linear(30, 30), folder),
    "load_into of a directory": lambda root, folder: residency.load_into(nn.Linear(30, 30), root),
    "stock dcp": load_stock,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_error_of_a_damaged_save_names_it_and_its_file_and_says_what_to_do(root, damage, door):
    [folder] = root.glob("step-*")
    file, break_it = DAMAGES[damage]
    break_it(folder)
    if door.startswith("load_into") and damage in ("unknown kind", "unknown dtype"):
        DOORS[door](root, folder)  # it reads the module alone
        return
    with pytest.raises(CorruptSaveError) as caught:
        DOORS[door](root, folder)
    assert caught.value.file == file
    assert str(folder) in str(caught.value)
    assert file in str(caught.value)
    assert str(caught.value).count("estore from another save") == 1


def test_the_warning_of_an_older_save_that_is_tried_names_the_damaged_one(root):
    with residency.Checkpointer(root) as checkpointer:
        newer = checkpointer.save(8, {"model": nn.Linear(30, 30), "n": 1}).wait().path
    flip(newer / DATA, 5000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restore(root, None)
    [said] = [str(each.message) for each in caught if "An older save is tried" in str(each.message)]
    assert said.startswith(f"{newer}/{DATA} does not have the checksum")


def test_the_error_of_the_last_damaged_save_says_how_many_are(root):
    with residency.Checkpointer(root) as checkpointer:
        checkpointer.save(8, {"model": nn.Linear(30, 30), "n": 1}).wait()
    folders = list(root.glob("step-*"))
    for folder in folders:
        flip(folder / DATA, 5000)
    with (
        pytest.warns(UserWarning, match="An older save is tried"),
        pytest.raises(CorruptSaveError) as caught,
    ):
        restore(root, None)
    message = f"None of the {len(folders)} saves in {str(root)!r} can be restored"
    assert str(caught.value).count(message) == 1
    assert f"residency checkpoint verify {root}" in str(caught.value)


def test_the_error_of_the_only_save_says_that_there_is_no_other(root):
    (folder,) = root.glob("step-*")
    flip(folder / DATA, 5000)
    with pytest.raises(CorruptSaveError) as caught:
        restore(root, None)
    message = str(caught.value)
    assert message.startswith(f"{folder}/{DATA} does not have the checksum")
    assert message.endswith(
        f"It is the only save in {str(root)!r}: `residency checkpoint verify {root}` names all of "
        "its damage."
    )


@pytest.mark.parametrize("form", ["torch.save", "safetensors", "dcp", "dcp metadata"])
def test_an_error_of_a_damaged_foreign_file_names_it_and_says_what_to_do(tmp_path, form):
    model = nn.Linear(30, 30)
    if form == "torch.save":
        file = tmp_path / "model.pt"
        torch.save(model.state_dict(), file)
        path = file
    elif form == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(model.state_dict(), tmp_path / DATA)
        path = file = tmp_path / DATA
    else:
        path = tmp_path / "dcp"
        dcp.save(model.state_dict(), checkpoint_id=path)
        [data] = path.glob("*.distcp")
        file = data if form == "dcp" else path / ".metadata"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CorruptSaveError) as caught:
        residency.load_into(model, path)
    assert str(file) in str(caught.value)
    assert caught.value.file == file.name
    assert str(caught.value).count("estore from another save") == 1


def test_states_that_the_optimizers_class_cannot_use_are_damage(tmp_path: Path) -> None:
    """A document that is written as it should be, with a number that is none."""
    model = nn.Linear(30, 30)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with residency.Checkpointer(tmp_path) as checkpointer:
        older, newer = (checkpointer.save(step, state).wait().path for step in (1, 2))
        node = read_manifest(newer).ranks[0].document["tree"]["optimizer"]
        for values in node["state"].values():
            values["step"] = {}
        rewrite(newer, optimizer=node)
        with pytest.raises(CorruptSaveError, match=r"Adam cannot use.*not 'dict'") as caught:
            checkpointer.restore(state, step=2)
        assert caught.value.file == MANIFEST
        assert str(newer) in str(caught.value)
        with pytest.warns(UserWarning, match="An older save is tried"):
            assert checkpointer.restore(state) == 1
    assert older.exists()
