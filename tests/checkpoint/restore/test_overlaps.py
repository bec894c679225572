"""Two names for the same bytes: one value for both, or a refusal before any byte moves."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import residency
from residency import RefusedError
from residency.integrations.dcp import ResidencyStorageReader, ResidencyStorageWriter


class Tied(nn.Module):
    def __init__(self, *, is_tied, size=5):
        super().__init__()
        self.embed = nn.Embedding(size, 3)
        self.head = nn.Linear(3, size, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


@pytest.fixture
def checkpointer(tmp_path):
    with residency.Checkpointer(tmp_path) as made:
        yield made


def copies(state):
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def refused(checkpointer, state, words):
    before = copies(state)
    with pytest.raises(RefusedError, match=words) as caught:
        checkpointer.restore(state)
    assert "nothing was changed" in str(caught.value)
    assert all(map(torch.equal, copies(state).values(), before.values()))


@pytest.mark.parametrize("view", ["same", "part", "bytes", "numpy"])
def test_what_differs_in_the_save_is_not_read_into_one_memory(device, checkpointer, view):
    here = "cpu" if view == "numpy" else device
    checkpointer.save(1, {"a": torch.ones(64, device=here), "b": torch.zeros(64, device=here)})
    whole = torch.full((96,), 7.0, device=here)
    others = {
        "same": lambda: (whole[:64], whole[:64].view(64)),
        "part": lambda: (whole[:64], whole[32:]),
        "bytes": lambda: (whole[:64], whole.view(torch.uint8)[4:260].view(torch.float32)),
        "numpy": lambda: (whole[:64], torch.from_numpy(numpy.asarray(whole))[:64]),
    }
    a, b = others[view]()
    refused(checkpointer, {"a": a, "b": b}, "a and b: they share memory here")


def test_equal_bytes_go_into_one_memory_wherever_they_were_saved(device, checkpointer):
    values = torch.arange(40_000.0, device=device)
    checkpointer.save(1, {"a": values, "b": values.clone(), "v": values.clone()[5:9]}).wait()
    whole = torch.zeros(40_000, device=device)
    checkpointer.restore({"a": whole, "b": whole.view(200, 200).view(-1)})
    assert torch.equal(whole, values)


def test_views_that_lie_among_one_another_as_they_were_saved_are_read(device, checkpointer):
    saved = torch.arange(24.0, device=device).view(4, 6)
    state = {"whole": saved, "column": saved[:, 2], "rows": saved[1:3], "turned": saved.t()}
    checkpointer.save(1, state).wait()
    whole = torch.zeros(4, 6, device=device)
    state = {"whole": whole, "column": whole[:, 2], "rows": whole[1:3], "turned": whole.t()}
    checkpointer.restore(state)
    assert torch.equal(whole, saved)


def test_rows_that_lie_farther_apart_than_they_were_saved_are_refused(device, checkpointer):
    saved = torch.arange(16.0, device=device)
    checkpointer.save(1, {"flat": saved, "square": saved.view(4, 4)}).wait()
    whole = torch.zeros(32, device=device)
    state = {"flat": whole[:16], "square": whole.view(4, 8)[:, :4]}  # 0 to 3, 8 to 11, ...
    refused(checkpointer, state, "flat and square: they share memory here")


class Views(nn.Module):
    """Names a matrix and tensors that lie in its memory."""

    def __init__(self, whole, *parts):
        super().__init__()
        self.whole = nn.Parameter(whole)
        for index, part in enumerate(parts):
            self.register_buffer(f"part{index}", part(self.whole.detach()))


PARTS = {
    "rows": lambda whole: whole[100:300],
    "column": lambda whole: whole[:, 7],
    "turned": lambda whole: whole.t(),
    "steps": lambda whole: whole[1::3, ::5],
    "bytes": lambda whole: whole.view(torch.uint8)[3:9, 5:77],
    "one": lambda whole: whole[5, 6],
}


def one_in(part):
    """Changes one bit of the element in the middle."""
    bits = part.view(-1).view(torch.uint8)
    bits[bits.numel() // 2] ^= 1


@pytest.mark.parametrize(
    ("form", "kinds"),
    [("torch.save", [kind]) for kind in PARTS]
    + [(form, ["rows", "column", "turned"]) for form in ("own", "dcp")],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_and_a_part_of_it_that_a_file_holds_apart_are_read_where_they_are_equal(
    device, tmp_path, form, kinds
):
    def write(values):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"
        if form == "own":
            with residency.Checkpointer(path) as checkpointer:
                checkpointer.save(1, {"model": values}).wait()
        elif form == "dcp":
            dcp.save(values, checkpoint_id=path)
        else:
            torch.save(values, path)
        return path

    saved = torch.arange(512.0 * 64).view(512, 64)
    parts = [PARTS[kind] for kind in kinds]
    values = {"whole": saved} | {
        f"part{index}": part(saved).clone(memory_format=torch.contiguous_format)
        for index, part in enumerate(parts)
    }
    model = Views(torch.zeros(512, 64, device=device), *parts)
    path = write(values)
    residency.load_into(model, path, staging="16KiB")
    assert torch.equal(model.whole.detach().cpu(), saved)
    one_in(values["part0"])
    path = write(values)
    with pytest.raises(RefusedError, match="whole and part0: they share memory") as caught:
        residency.load_into(model, path, staging="16KiB")
    assert "their saved values differ" in str(caught.value)
    assert torch.equal(model.whole.detach().cpu(), saved)


@pytest.mark.parametrize("is_equal", [True, False])
def test_weights_that_are_tied_only_here_are_refused_unless_they_are_equal(
    device, checkpointer, is_equal
):
    model, other = Tied(is_tied=False).to(device), Tied(is_tied=True).to(device)
    if is_equal:
        with torch.no_grad():
            model.head.weight.copy_(model.embed.weight)
    checkpointer.save(1, {"model": model}).wait()
    path = checkpointer.save(2, {"model": model}).wait().path
    if not is_equal:
        before = copies(other.state_dict())
        for load in (
            lambda: checkpointer.restore({"model": other}),
            lambda: residency.load_into(other, path),
        ):
            with pytest.raises(RefusedError, match=r"embed\.weight and .*head\.weight: they share"):
                load()
        assert all(map(torch.equal, copies(other.state_dict()).values(), before.values()))
        with pytest.warns(UserWarning, match="they share memory here"):
            checkpointer.restore({"model": other}, strict=False)
        assert torch.equal(other.head.weight, model.head.weight)  # the last one, as torch does
        return
    checkpointer.restore({"model": other})
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight


def test_what_was_tied_is_read_into_both(device, checkpointer):
    model, other = Tied(is_tied=True).to(device), Tied(is_tied=False).to(device)
    checkpointer.save(1, {"model": model}).wait()
    checkpointer.restore({"model": other})
    assert torch.equal(other.head.weight, model.head.weight)
    assert torch.equal(other.embed.weight, model.head.weight)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: torch.zeros(1, 6, device=d).expand(4, 6), "share their bytes here"),
        (lambda d: torch.zeros(9, device=d).as_strided((4, 6), (1, 1)), "share their bytes here"),
        (lambda d: torch.zeros(4, 6).to_sparse(), "here a torch.sparse"),
    ],
    ids=["expanded", "windows", "sparse"],
)
def test_targets_without_bytes_of_their_own_are_refused_before_others_are_filled(
    device, checkpointer, make, words
):
    checkpointer.save(1, {"a": torch.ones(3), "t": torch.ones(4, 6)}).wait()
    first = torch.zeros(3)
    with pytest.raises(RefusedError, match=rf"t: .*{words}"):
        checkpointer.restore({"a": first, "t": make(device)})
    assert not first.any()


def test_a_strange_layout_without_overlaps_is_filled(device, checkpointer):
    values = torch.arange(6.0).view(2, 3)
    checkpointer.save(1, {"t": values, "one": torch.ones(1, 2)[:, 0]}).wait()
    target = torch.zeros(8, device=device).as_strided((2, 3), (3, 2))  # 0 2 4, 3 5 7
    one = nn.Parameter(torch.zeros(1, 2, device=device)[:, 0])
    checkpointer.restore({"t": target, "one": one})
    assert torch.equal(target.cpu(), values)
    assert one.item() == 1


def test_a_read_only_array_is_refused_before_others_are_filled(checkpointer):
    checkpointer.save(1, {"a": torch.ones(3), "n": numpy.ones(3), "m": numpy.ones(3)}).wait()
    first, array = torch.zeros(3), numpy.zeros(3)
    array.flags.writeable = False
    with pytest.raises(RefusedError, match="n: the array that is here is read-only"):
        checkpointer.restore({"a": first, "n": array})
    assert not first.any()
    assert checkpointer.restore({"a": first, "n": None}) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_element_with_a_stride_goes_through_every_writer_of_bytes(device, tmp_path):
    def state():
        return {"one": torch.full((1, 2), 3.0, device=device)[:, 0]}

    path = tmp_path / "step-00000001"
    dcp.save(state(), storage_writer=ResidencyStorageWriter(path))
    found = {"one": torch.zeros(1, 2)[:, 0]}
    dcp.load(found, storage_reader=ResidencyStorageReader(path))
    assert found["one"].item() == 3
