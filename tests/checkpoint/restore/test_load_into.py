"""Checkpoints of every format are loaded into a module that exists."""

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import Net

from residency import (
    Checkpointer,
    CheckpointError,
    CorruptSaveError,
    InvalidArgumentError,
    RefusedError,
)
from residency._checkpoint._restore import _load_into
from residency._checkpoint._restore._load_into import load_into, load_save


def net(device, seed):
    torch.manual_seed(seed)
    model = Net().to(device)
    with torch.no_grad():
        model.norm.running_mean.add_(seed)
    return model


def values_of(model):
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def assert_same(left, right):
    left, right = values_of(left), values_of(right)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def write_torch_save(model, folder):
    torch.save(values_of(model), folder / "model.pt")
    return folder / "model.pt"


def write_nested(model, folder):
    torch.save({"epoch": 3, "model": values_of(model)}, folder / "model.pt")
    return folder / "model.pt"


def write_safetensors(model, folder):
    safetensors = pytest.importorskip("safetensors.torch")
    values = values_of(model)
    del values["head.weight"]  # the format takes no ties
    safetensors.save_file(values, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_dcp(model, folder):
    dcp.save({"model": values_of(model)}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [write_torch_save, write_nested, write_safetensors, write_dcp])
def test_stock_formats_fill_a_module_in_place(device, tmp_path, write):
    first, second = net(device, 1), net(device, 2)
    path = write(first, tmp_path)
    before = dict(second.named_parameters(remove_duplicate=False))
    pointers = {name: p.data_ptr() for name, p in before.items()}
    torch.accelerator.synchronize()
    held = torch.accelerator.memory_allocated()
    assert not load_into(second, path, staging="64KiB")
    assert torch.accelerator.memory_allocated() == held
    assert_same(first, second)
    after = dict(second.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {name: p.data_ptr() for name, p in after.items()} == pointers
    assert second.head.weight is second.embed.weight


def test_a_save_of_ours_fills_the_module_that_has_its_names(device, save):
    first, other = net(device, 1), torch.nn.Linear(3, 3).to(device)
    saved = save({"teacher": other, "student": first})
    second = net(device, 2)
    assert not load_save(second, saved, strict=True, staging_bytes=1 << 16)
    assert_same(first, second)
    with pytest.raises(RefusedError, match="has the modules teacher, student"):
        load_save(
            torch.nn.Sequential(torch.nn.Linear(3, 4)), saved, strict=True, staging_bytes=1 << 16
        )


def test_what_does_not_fit_is_refused_with_nothing_changed_or_left_out(device, tmp_path):
    first, second = net(device, 1), net(device, 2)
    values = values_of(first)
    values["surplus"] = torch.ones(3)
    del values["scale"]
    values["inner.bias"] = torch.ones(4)
    torch.save(values, tmp_path / "model.pt")
    before = values_of(second)
    with pytest.raises(RefusedError) as caught:
        load_into(second, tmp_path / "model.pt")
    for part in ("surplus", "scale", "inner.bias: saved shape (4,), here (65,)"):
        assert part in str(caught.value)
    assert all(torch.equal(v, before[n]) for n, v in values_of(second).items())
    with pytest.warns(UserWarning, match="surplus") as warned:
        found = load_into(second, tmp_path / "model.pt", strict=False)
    assert warned[0].filename == __file__
    assert found.unexpected == ("surplus",)
    assert found.missing == ("scale",)
    assert torch.equal(second.inner.weight.cpu(), first.inner.weight.cpu())
    assert torch.equal(second.inner.bias.cpu(), before["inner.bias"])


@pytest.mark.parametrize("staging", ["4KiB", "lots", -1])
def test_a_staging_that_is_no_ring_is_refused(tmp_path, staging):
    with pytest.raises(InvalidArgumentError, match="staging"):
        load_into(torch.nn.Linear(2, 2), tmp_path, staging=staging)


def test_a_prefix_is_found_where_most_names_have_one():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for names, prefix in (
        (["0.weight", "0.bias"], ""),
        (["net.model.0.weight", "net.model.0.bias", "other.x"], "net.model."),
        (["net.0.weight", "net.0.bias", "average.0.weight"], "net."),
        (["0.weight", "0.bias", "average.0.weight", "average.0.bias"], ""),
        (["x", "y.z"], ""),
    ):
        assert _load_into.find_prefix(model, names, "it") == prefix


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["torch.save", "dcp", "safetensors", "ours", "ours, state dicts"])
def test_of_several_sets_of_weights_one_is_taken_by_its_name_or_none(tmp_path, kind):
    safetensors = pytest.importorskip("safetensors.torch")
    made = {name: net("cpu", seed) for seed, name in enumerate(("model", "ema"))}
    values = {name: values_of(model) for name, model in made.items()}
    path = tmp_path / "saved"
    if kind == "torch.save":
        torch.save(values, path)
    elif kind == "dcp":
        dcp.save(values, checkpoint_id=path, no_dist=True)
    elif kind == "safetensors":
        flat = {f"{o}.{i}": v for o, inner in values.items() for i, v in inner.items()}
        path = tmp_path / "saved.safetensors"
        safetensors.save_file({n: v for n, v in flat.items() if "head.weight" not in n}, path)
    else:
        with Checkpointer(path) as checkpointer:
            checkpointer.save(1, dict(made if kind == "ours" else values)).wait()
    target = net("cpu", 9)
    before = values_of(target)
    for name in (None, "best"):
        with pytest.raises(RefusedError, match="Nothing was changed") as caught:
            load_into(target, path, name=name)
        assert "model" in str(caught.value)
        assert all(torch.equal(v, before[n]) for n, v in values_of(target).items())
    for name, model in made.items():
        assert not load_into(target, path, name=name)
        assert_same(target, model)


def save_runs(folder, *models):
    """Saves each model as a step of its own, 10, 20 and so on."""
    with Checkpointer(folder) as checkpointer:
        for index, model in enumerate(models):
            checkpointer.save(10 * (index + 1), {"model": model}).wait()


def test_a_copy_of_an_older_save_beside_the_newer_ones_loads_its_own_bytes(device, tmp_path):
    old, new, target = net(device, 1), net(device, 2), net(device, 3)
    save_runs(tmp_path / "run", old)
    shutil.copytree(tmp_path / "run" / "step-00000010", tmp_path / "run" / "best")
    shutil.rmtree(tmp_path / "run" / "step-00000010")
    save_runs(tmp_path / "run", new)  # step 10 again, with other bytes
    load_into(target, tmp_path / "run" / "best")
    assert_same(target, old)
    load_into(target, tmp_path / "run" / "step-00000010")
    assert_same(target, new)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_of_the_storage_writer_loads_under_any_name(device, tmp_path):
    import torch.distributed.checkpoint as dcp

    from residency.integrations.dcp import ResidencyStorageWriter

    first, second = net(device, 1), net(device, 2)
    writer = ResidencyStorageWriter(tmp_path / "final")
    dcp.save({"model": values_of(first)}, storage_writer=writer, no_dist=True)
    load_into(second, tmp_path / "final")
    assert_same(first, second)
    os.rename(tmp_path / "final", tmp_path / "renamed")
    third = net(device, 3)
    load_into(third, tmp_path / "renamed" / "manifest.json")
    assert_same(first, third)


@pytest.mark.parametrize("path", ["run", "run/step-00000010", "run/step-00000010/manifest.json"])
@pytest.mark.parametrize("damage", ["manifest", "tensor"])
def test_a_damaged_save_is_corrupt_by_whatever_path_it_is_loaded(device, tmp_path, path, damage):
    save_runs(tmp_path / "run", net(device, 1))
    name = "manifest.json" if damage == "manifest" else "model.safetensors"
    file = tmp_path / "run" / "step-00000010" / name
    data = bytearray(file.read_bytes())
    data[-40] ^= 4
    file.write_bytes(data if damage == "tensor" else data[:-9])
    with pytest.raises(CorruptSaveError) as caught:
        load_into(net(device, 2), tmp_path / path)
    assert caught.value.file == name


def test_a_save_that_a_crash_left_between_two_renames_is_loaded_from_its_directory(
    device, tmp_path
):
    first, second = net(device, 1), net(device, 2)
    save_runs(tmp_path, first)
    os.rename(tmp_path / "step-00000010", tmp_path / ".replaced-00000010-0123456789abcdef")
    load_into(second, tmp_path)
    assert_same(first, second)


def test_a_path_that_the_system_does_not_take_is_an_error_of_ours(tmp_path):
    for name in ("x" * 300, "loop"):
        if name == "loop":
            (tmp_path / name).symlink_to(tmp_path / name)
        with pytest.raises((CheckpointError, RefusedError), match=name):
            load_into(torch.nn.Linear(2, 2), tmp_path / name)


def test_a_renamed_directory_of_saves_loads_its_newest(device, tmp_path):
    old, new, target = net(device, 1), net(device, 2), net(device, 3)
    save_runs(tmp_path / "run", old, new)
    os.rename(tmp_path / "run", tmp_path / "elsewhere")
    load_into(target, Path(tmp_path / "elsewhere"))
    assert_same(target, new)


@pytest.mark.parametrize("dtype", ["F32", "F4", "???"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_name_of_a_file_may_be_long_and_no_message_is(tmp_path, strict, dtype):
    fields = {"dtype": dtype, "shape": [2], "data_offsets": [0, 8 if dtype == "F32" else 1]}
    text = json.dumps({"model." + "x" * 60_000: fields}).encode()
    file = tmp_path / "long.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(fields["data_offsets"][1]))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            load_into(torch.nn.Linear(2, 2), file, strict=strict)
            said = str(warned[0].message)
        except (CorruptSaveError, RefusedError) as error:
            said = str(error)
    assert "xxx" in said
    assert len(said) < 4000


class Computing(torch.nn.Linear):
    """Saves its weight doubled, as a tensor of its own, and halves what it loads."""

    num_loads = 0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.num_loads += 1
        if prefix + "weight" in state_dict:
            state_dict = {**state_dict, prefix + "weight": state_dict[prefix + "weight"] / 2}
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_tensor_that_a_module_makes_for_its_state_dict_is_loaded_by_the_module(
    device, tmp_path, monkeypatch
):
    first, second = Computing(3, 4).to(device), Computing(3, 4).to(device)
    torch.save(values_of(first), tmp_path / "model.pt")
    assert not load_into(second, tmp_path / "model.pt")
    assert_same(first, second)
    assert torch.equal(second.weight, first.weight)
    assert second.num_loads == 1
    # Where every tensor is filled in place and nothing else is to be done, it does not.
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(device)
    torch.save(values_of(plain), tmp_path / "model.pt")
    monkeypatch.setattr(torch.nn.Module, "_load_from_state_dict", lambda *_: pytest.fail("loaded"))
    assert not load_into(plain, tmp_path / "model.pt")


class Noted(torch.nn.Linear):
    """A layer whose state dict holds a number, a list and an extra state beside its tensors."""

    epoch, seen = 0, ()

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        return {**found, "epoch": self.epoch, "seen": list(self.seen)}

    def load_state_dict(self, state_dict, *args, **kwargs):
        left = dict(state_dict)
        self.epoch, self.seen = left.pop("epoch"), tuple(left.pop("seen"))
        return super().load_state_dict(left, *args, **kwargs)

    def get_extra_state(self):
        return {"epoch": self.epoch}

    def set_extra_state(self, state):
        assert state == {"epoch": self.epoch}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("path", ["", "model", "runs.last"])
def test_what_a_state_dict_has_beside_tensors_is_loaded_as_stock_loads_it(
    device, tmp_path, path, legacy
):
    there = Noted(3, 2)
    there.epoch, there.seen = 7, (1, 2.5, "x")
    tree = there.state_dict()
    for part in reversed(path.split(".") if path else []):
        tree = {part: tree, "args": {"lr": 0.1}, "step": 12}
    file = tmp_path / "weights.pt"
    torch.save(tree, file, _use_new_zipfile_serialization=not legacy)
    here = Noted(3, 2).to(device)
    assert not load_into(here, file)
    assert (here.epoch, here.seen) == (7, (1, 2.5, "x"))
    assert torch.equal(here.weight.cpu(), there.weight)


def test_a_plain_value_that_no_file_has_is_named_as_missing(device, tmp_path):
    file = tmp_path / "weights.pt"
    tree = Noted(3, 2).state_dict()
    del tree["epoch"]
    torch.save(tree, file)
    here = Noted(3, 2).to(device)
    with pytest.raises(RefusedError, match=r"missing in the checkpoint \(1\):\n  epoch"):
        load_into(here, file)
