"""Files of a training run on the device: ``torch.save`` and ``torch.distributed.checkpoint``, read
back anywhere, and a resumed run that ends at the bits of an uninterrupted one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from residency import sim

pytestmark = [
    pytest.mark.sim,
    # Torch's stager registers its memory with CUDA's driver alone; on any other device it says that
    # it does not pin.
    pytest.mark.filterwarnings("ignore:Ignoring pin_memory flag:UserWarning"),
]

AssertSame = Callable[[object, object], None]
Make = Callable[[], Any]
Pair = tuple[Any, torch.optim.Optimizer]


def _start(make_reader: Make, place: object) -> Pair:
    reader = make_reader().to(place)
    return reader, torch.optim.AdamW(reader.parameters(), lr=1e-2, foreach=True)


def _train(pair: Pair, text: torch.Tensor, first: int, last: int) -> None:
    reader, optimizer = pair
    for step in range(first, last):
        optimizer.zero_grad()
        reader.loss(text[4 * step : 4 * step + 4].to(reader.out.weight.device)).backward()
        optimizer.step()


def _begin(make_reader: Make, text: torch.Tensor, place: object) -> tuple[Pair, Pair]:
    """Returns a run of four steps on the host, and the first two of them on the given device."""
    whole, first = _start(make_reader, "cpu"), _start(make_reader, place)
    _train(whole, text, 0, 4)
    _train(first, text, 0, 2)
    return whole, first


def _states(pair: Pair) -> list[Any]:
    return copy.deepcopy([pair[0].state_dict(), pair[1].state_dict()])


@pytest.mark.parametrize("is_mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize(
    ("start", "end"), [("sim", "sim"), ("sim", "cpu"), ("cpu", "sim")], ids=str
)
def test_a_run_resumes_from_a_file_on_either_device(
    device: torch.device,
    tmp_path: Path,
    start: str,
    end: str,
    is_mapped: bool,
    make_reader: Make,
    text: torch.Tensor,
    assert_same: AssertSame,
) -> None:
    whole, first = _begin(make_reader, text, start)
    torch.save(_states(first), tmp_path / "run.pt")
    second = _start(make_reader, end)
    saved = torch.load(tmp_path / "run.pt", map_location=end, mmap=is_mapped)
    assert {tensor.device.type for tensor in saved[0].values()} == {end}
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    _train(second, text, 2, 4)
    assert_same(_states(second), _states(whole))


# -------------------------------------------------------------------------------------------- DCP


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank: asynchronous saves ask for one with a part for the host."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _distributed(pair: Pair) -> dict[str, Any]:
    return {"model": get_model_state_dict(pair[0]), "optimizer": get_optimizer_state_dict(*pair)}


def _load(pair: Pair, folder: Path) -> None:
    state = _distributed(pair)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(pair[0], state["model"])
    set_optimizer_state_dict(*pair, state["optimizer"])


def _save(pair: Pair, folder: Path) -> None:
    dcp.save(_distributed(pair), checkpoint_id=folder)


def _save_async(pair: Pair, folder: Path, **options: Any) -> None:
    state = _distributed(pair)
    response = dcp.async_save(state, checkpoint_id=folder, **options)
    if not isinstance(response, dcp.state_dict_saver.AsyncSaveResponse):
        upload = response  # the default has copied when it returns
    else:
        response.staging_completion.result()
        upload = response.upload_completion
    for part in state["model"].values():  # training goes on while the file is written
        part.detach().fill_(float("nan"))
    upload.result()


def _save_staged(pair: Pair, folder: Path, **options: bool) -> None:
    stager = DefaultStager(StagingOptions(use_non_blocking_copy=True, **options))
    _save_async(pair, folder, async_stager=stager)
    stager.close()


def _save_pinned(pair: Pair, folder: Path) -> None:
    _save_staged(pair, folder, use_shared_memory=False, use_async_staging=False)


def _save_in_a_thread(pair: Pair, folder: Path) -> None:
    torch.accelerator.synchronize()  # see test_the_checker_finds_that_torch_stages_without_a_wait
    _save_staged(pair, folder)


SAVES: dict[str, Callable[[Pair, Path], None]] = {
    "at once": _save,
    "asynchronous": _save_async,
    "asynchronous, pinned, without blocking": _save_pinned,
    "asynchronous, shared, in a thread": _save_in_a_thread,
}


@pytest.mark.parametrize("name", SAVES)
def test_a_run_resumes_from_a_distributed_checkpoint(
    device: torch.device,
    group: None,
    tmp_path: Path,
    name: str,
    make_reader: Make,
    text: torch.Tensor,
    assert_same: AssertSame,
) -> None:
    whole, first = _begin(make_reader, text, device)
    SAVES[name](first, tmp_path / "checkpoint")
    second = _start(make_reader, device)
    _load(second, tmp_path / "checkpoint")
    assert second[1].state[second[0].out.weight]["exp_avg"].device.type == "sim"
    _train(second, text, 2, 4)
    assert_same(_states(second)[0], _states(whole)[0])
    assert_same(_states(second)[1]["state"], _states(whole)[1]["state"])


def test_the_checker_finds_that_torch_stages_without_a_wait(
    device: torch.device, group: None, tmp_path: Path, make_reader: Make, text: torch.Tensor
) -> None:
    # torch 2.13's stager in a thread copies on a stream of its own, which waits for nothing: what
    # the last step wrote may not be there yet. A synchronisation before the save is the cure.
    pair = _start(make_reader, device)
    _train(pair, text, 0, 2)
    with pytest.raises(sim.RaceError, match=r"copy_ \(device to host\)"):
        _save_staged(pair, tmp_path / "checkpoint")
