"""Each name of a state has its file, or its part of one, and is told from names of ours."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import residency
from residency import InvalidArgumentError


def test_names_of_a_state_are_told_from_names_of_ours(tmp_path, monkeypatch):
    names = [
        "rank-0",
        "rank-00000",
        "failed-00000",
        "manifest",
        "latest",
        ".writers",
        "rank-0.json",
    ]
    state = {name: {"x": torch.arange(3.0) + index} for index, name in enumerate(names)}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with residency.Checkpointer("run") as checkpointer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpointer.save(1, state).wait()
        found = {name: {"x": torch.zeros(3)} for name in names}
        checkpointer.restore(found)
    assert all(torch.equal(found[name]["x"], state[name]["x"]) for name in names)
    assert (tmp_path / "run" / "step-00000001" / "manifest.json").exists()


def restored(folder, state, **options):
    """Saves a state, and returns it as it comes back, with the names of the files."""
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    with residency.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state, **options).wait()
        checkpointer.restore(found, **options)
    return found, sorted(p.name for p in (folder / "step-00000001").glob("*.safetensors"))


def test_a_flat_state_of_many_tensors_is_few_files(tmp_path):
    state = {f"layer.{index}.weight": torch.full((3,), index) for index in range(4000)}
    found, files = restored(tmp_path, {**state, "model": torch.ones(2), "tensors": torch.ones(5)})
    assert files == ["rng.safetensors", "tensors.safetensors"]
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_many_objects_share_a_file_but_for_the_largest(tmp_path):
    state = {f"m{index}": nn.Linear(index + 1, 1) for index in range(60)}
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, rng=False).wait()
        here = {name: nn.Linear(module.in_features, 1) for name, module in state.items()}
        checkpointer.restore(here)
    files = {path.name for path in (tmp_path / "step-00000001").glob("*.safetensors")}
    assert files == {"tensors.safetensors", *(f"m{n}.safetensors" for n in range(28, 60))}
    assert all(torch.equal(here[n].weight, state[n].weight) for n in state)


@pytest.mark.parametrize("rng", [True, False])
def test_any_name_is_a_file_or_is_refused_in_the_call(tmp_path, rng):
    names = ["x" * 300, "X" * 300, "x" * 299 + ".a", "a/b", "..", ".", "-", "é" * 200, "CON", "con"]
    state = OrderedDict((name, torch.arange(3.0) + i) for i, name in enumerate(names))
    found, files = restored(tmp_path, state, rng=rng)
    assert all(torch.equal(found[name], state[name]) for name in names)
    assert len(files) == len(names) + rng == len({name.lower() for name in files})
    with residency.Checkpointer(tmp_path) as checkpointer:
        for name in ("", "$x", "__metadata__"):
            with pytest.raises(InvalidArgumentError, match="has the name"):
                checkpointer.save(2, {name: torch.ones(1)}, rng=rng)
