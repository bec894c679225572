"""Copies between host and device, values that are read, and files, bit by bit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from operations import random

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("schedule")]  # both of them


# ------------------------------------------------------------------------------------------- copies

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[1:, ::2],
    "offset": lambda x: x[2:4],
    "column": lambda x: x[:, 3],
    "expanded": lambda x: x[:1].expand(5, 6),
    "one number": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_between_host_and_device_keep_every_bit(dtype: torch.dtype) -> None:
    host, other = random("cpu", 5, 6, dtype=dtype), torch.zeros(5, 6, dtype=dtype)
    device = host.to("sim")
    for name, layout in LAYOUTS.items():
        expected = layout(host)
        assert torch.equal(layout(device).cpu(), expected), name
        assert torch.equal(expected.to("sim").cpu(), expected), name
        if name != "expanded":
            layout(other).copy_(layout(device))
            assert torch.equal(layout(other), expected), name
            fresh = torch.zeros(5, 6, dtype=dtype, device="sim")
            layout(fresh).copy_(expected)
            assert torch.equal(layout(fresh).cpu(), expected), name
            again = torch.zeros(5, 6, dtype=dtype, device="sim")
            layout(again).copy_(layout(device))
            assert torch.equal(layout(again).cpu(), expected), name


@pytest.mark.parametrize("is_pinned", [True, False])
def test_copies_cast_broadcast_and_conjugate_on_their_way(is_pinned: bool) -> None:
    host = random("cpu", 6)
    host = host.pin_memory() if is_pinned else host
    target = torch.empty(4, 6, dtype=torch.bfloat16, device="sim")
    target.copy_(host, non_blocking=True)
    assert torch.equal(target.cpu(), host.bfloat16().expand(4, 6))
    back = torch.empty(4, 6, dtype=torch.float64, pin_memory=is_pinned)
    back.copy_(target, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(back, host.bfloat16().double().expand(4, 6))
    numbers = random("cpu", 5, dtype=torch.complex64)
    assert torch.equal(numbers.to("sim").conj().cpu(), numbers.conj())
    assert torch.equal(numbers.conj().to("sim").cpu(), numbers.conj())


def test_reading_values_gives_them() -> None:
    tensor = torch.arange(6, device="sim").view(2, 3)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensor[1, 2].item() == 5
    assert bool((tensor.sum() == 15).item())
    assert tensor.cpu().numpy().sum() == 15
    assert "[3, 4, 5]" in repr(tensor)
    assert copy.deepcopy(tensor).device.type == "sim"


# ---------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("place", [None, "cpu", "sim"])
def test_a_saved_tensor_loads_where_it_is_asked_to(
    tmp_path: Path, place: str | None, is_mapped: bool
) -> None:
    whole = random("sim", 30, 40)
    torch.save({"whole": whole, "part": whole[3:5].t()}, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", map_location=place, mmap=is_mapped)
    expected = "cpu" if place == "cpu" else "sim"
    assert {tensor.device.type for tensor in loaded.values()} == {expected}
    assert torch.equal(loaded["whole"].cpu(), whole.cpu())
    assert torch.equal(loaded["part"].cpu(), whole[3:5].t().cpu())
    loaded["whole"][3, 0] = 100.0  # the two still share their memory
    assert loaded["part"][0, 0].item() == 100.0


def test_a_tensor_of_the_host_loads_onto_the_device(tmp_path: Path) -> None:
    torch.save(torch.arange(5.0), tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", map_location="sim")
    assert loaded.device.type == "sim"
    assert loaded.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_safetensors_save_from_the_device_and_load_to_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": random("sim", 5, 6), "b": random("sim", 7, dtype=torch.bfloat16)}
    safetensors.save_file(tensors, tmp_path / "file.safetensors")
    for place in ("sim", "sim:0", "cpu"):
        loaded = safetensors.load_file(tmp_path / "file.safetensors", device=place)
        for name, tensor in tensors.items():
            assert loaded[name].device.type == place.split(":")[0]
            assert torch.equal(loaded[name].cpu(), tensor.cpu())
