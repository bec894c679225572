"""A pointer of git-lfs in the place of weights is named, whichever file it stands for."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from residency import CorruptSaveError, RefusedError
from residency._checkpoint._sources import open_source

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
INDEX = '{"weight_map": {"weight": "1.safetensors"}}'


def checkpoints(folder: Path) -> None:
    weights = {"weight": torch.ones(4)}
    for name in ("alone", "indexed", "pickled", "dcp"):
        (folder / name).mkdir()
    save_file(weights, folder / "alone" / "model.safetensors")
    save_file(weights, folder / "indexed" / "1.safetensors")
    (folder / "indexed" / "model.safetensors.index.json").write_text(INDEX)
    torch.save(weights, folder / "pickled" / "model.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save by one process
        dcp.save(weights, checkpoint_id=folder / "dcp")


def test_a_pointer_in_the_place_of_any_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    checkpoints(tmp_path / "whole")
    files = [path for path in sorted((tmp_path / "whole").rglob("*")) if path.is_file()]
    assert len(files) == 6
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(file.parent, copy)
        pointer = copy / file.name
        opened = pointer if file.parent.name == "pickled" else copy
        open_source(opened).close()
        pointer.write_bytes(POINTER)
        told = re.escape(f"{pointer} is a git-lfs pointer, not the weights: run `git lfs pull`")
        with pytest.raises(RefusedError, match=told):
            open_source(opened)


def test_a_pointer_beside_a_damaged_file_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    (tmp_path / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(Exception, match="model") as caught:
        open_source(tmp_path)
    assert "git-lfs" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_damage_and_no_pointer(tmp_path: Path) -> None:
    checkpoints(tmp_path)
    file = next((tmp_path / "dcp").glob("*.distcp"))
    file.unlink()
    file.symlink_to("/proc/self/mem")  # opens, is empty, and fails at its first byte
    with pytest.raises(CorruptSaveError, match="has 0 bytes"):
        open_source(tmp_path / "dcp")
