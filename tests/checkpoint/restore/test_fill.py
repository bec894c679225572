"""Bytes reach tensors of every dtype and layout, across shards, through a small ring."""

import random

import maker
import pytest
import torch

from residency._checkpoint._restore import _fill
from residency._checkpoint._restore._boxes import Box, row_major, spans, stretches
from residency._checkpoint._restore._fill import fill
from residency._checkpoint._restore._plan import RestorePlan, Target, box_of
from residency._checkpoint._sources._own import saved_for_rank
from residency._checkpoint._sources._source import StoredTensor

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.complex64, torch.complex128, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


def noise(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (size,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def raw(tensor):
    tensor = tensor.detach().cpu().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def restored(saved, tree, **settings):
    """Fills tensors by name."""
    plan = RestorePlan(saved_for_rank(saved))
    for name, tensor in tree.items():
        plan.fill(name, tensor)
    assert not plan.differences()
    fill(plan.targets, checksums=plan.source.checksums, staging_bytes=1 << 13, **settings)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch's, on making one
@pytest.mark.parametrize("place", ["device", "host"])
def test_every_dtype_comes_back(device, save, place):
    values = {str(d).split(".")[1]: noise(7, 6, dtype=d, seed=i) for i, d in enumerate(DTYPES)}
    saved = save({"t": values})
    where = device if place == "device" else "cpu"
    targets = {f"t.{n}": torch.empty_like(v, device=where) for n, v in values.items()}
    restored(saved, targets)
    for name, value in values.items():
        assert raw(targets[f"t.{name}"]) == raw(value), name


LAYOUTS = {
    "in order": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "channels last": lambda t: t[None].to(memory_format=torch.channels_last)[0],
    "every other": lambda t: torch.zeros(*t.shape[:-1], 2 * t.shape[-1]).to(t)[..., ::2].copy_(t),
    "offset": lambda t: torch.zeros(t.shape[0] + 3, *t.shape[1:]).to(t)[3:].copy_(t),
}


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("here", LAYOUTS)
def test_every_layout_fills_every_layout(device, save, place, there, here):
    value = noise(3, 50, 70)
    saved = save({"t": {"a": LAYOUTS[there](value)}})
    where = device if place == "device" else "cpu"
    target = LAYOUTS[here](torch.zeros(3, 50, 70).to(where))
    stride = target.stride()
    restored(saved, {"t.a": target})
    assert raw(target) == raw(value)
    assert target.stride() == stride


def test_sizes_from_nothing_to_several_rings_come_back(device, save):
    shapes = [(), (0,), (3, 0), (1,), (2047,), (2048,), (2049,), (1, 1, 1), (20_000,), (100, 333)]
    values = {str(i): noise(*shape, seed=i) for i, shape in enumerate(shapes)}
    saved = save({"t": values})
    targets = {f"t.{n}": torch.zeros_like(v, device=device) for n, v in values.items()}
    restored(saved, targets)
    for name, value in values.items():
        assert raw(targets[f"t.{name}"]) == raw(value)


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_boxes_are_assembled_from_whatever_shards_overlap_them(
    device, tmp_path, monkeypatch, seed, sums
):
    monkeypatch.setattr(_fill, "_FEW_STRETCHES", 3)
    monkeypatch.setattr(_fill, "_LONG_STRETCH", 64)
    chance = random.Random(seed)
    shape = tuple(chance.choice([1, 5, 24, 40]) for _ in range(chance.choice([1, 2, 3])))
    whole = noise(*shape, dtype=chance.choice([torch.float32, torch.uint8]), seed=seed)
    shards = []
    for index, box in enumerate(cut(shape, chance)):
        path = tmp_path / f"{index}.bin"
        data = raw(narrowed(whole, box))
        path.write_bytes(b"x" * 13 + data)
        stored = StoredTensor("t", whole.dtype, box.shape, shape, box.offsets, path, 13, len(data))
        if index % 3 == 2:
            held = narrowed(whole, box).clone()
            stored = StoredTensor("t", whole.dtype, box.shape, shape, box.offsets, tensor=held)
        shards.append(stored)
    targets, expected = [], []
    for box in cut(shape, chance):
        place = device if chance.random() < 0.6 else torch.device("cpu")
        local = torch.zeros(box.shape, dtype=whole.dtype, device=place)
        targets.append(Target("t", local, box, shape, shards))
        expected.append((local, narrowed(whole, box)))
    fill(targets, checksums={}, staging_bytes=1 << 13)
    for local, value in expected:
        assert raw(local) == raw(value)


def narrowed(tensor, box):
    for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def cut(shape, chance):
    """Cuts a shape into boxes that cover it, some of them empty."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(chance.choice([0, 1, 3])):
        box = boxes.pop(chance.randrange(len(boxes)))
        dim = chance.randrange(len(shape))
        first = chance.randint(0, box.shape[dim])
        for start, size in ((0, first), (first, box.shape[dim] - first)):
            offsets, sizes = list(box.offsets), list(box.shape)
            offsets[dim] += start
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def test_stretches_and_spans_say_the_same_as_indexing():
    whole = torch.arange(6 * 7 * 8).reshape(6, 7, 8)
    source, target = Box((1, 0, 2), (4, 7, 6)), Box((0, 3, 0), (6, 3, 8))
    part = source.overlap(target)
    assert part is not None
    stored, local = narrowed(whole, source).contiguous(), torch.zeros(target.shape).long()
    for start, at, numel in stretches(part, source, target):
        local.reshape(-1)[at : at + numel] = stored.reshape(-1)[start : start + numel]
    assert torch.equal(narrowed(local, part.within(target)), narrowed(whole, part))
    strides = row_major(source.shape)
    for most in (1, 5, 60, 1000):
        seen = 0
        for box, start, numel in spans(part, source, strides, most):
            assert numel <= most
            flat = stored.reshape(-1)[start : start + numel]
            assert torch.equal(flat.as_strided(box.shape, strides), narrowed(whole, box))
            seen += box.numel
        assert seen == part.numel


def test_the_ring_bounds_what_a_restore_takes_on_device_and_host(device, save, pinned_bytes):
    staging = 1 << 16
    value = noise(40, 100, 100)
    saved = save({"t": {"a": value, "b": value.mT.contiguous().mT}})
    targets = {f"t.{n}": torch.zeros(40, 100, 100, device=device) for n in "ab"}
    targets["t.b"] = LAYOUTS["transposed"](targets["t.b"])
    plan = RestorePlan(saved_for_rank(saved))
    for name, tensor in targets.items():
        plan.fill(name, tensor)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before, pinned = torch.accelerator.memory_allocated(), pinned_bytes()
    fill(plan.targets, checksums=plan.source.checksums, staging_bytes=staging)
    torch.accelerator.synchronize()
    slot = staging // _fill._NUM_SLOTS
    assert torch.accelerator.max_memory_allocated() - before <= slot
    assert torch.accelerator.memory_allocated() == before
    assert pinned_bytes() == pinned
    for tensor in targets.values():
        assert raw(tensor) == raw(value)


def test_writers_pass_the_gate_first(device, save, tmp_path):
    from residency._transfer import Mover

    value = noise(64, 1024)
    saved = save({"t": {"a": value}})
    target = torch.full((64, 1024), 3.0, device=device)
    kept = torch.empty(64, 1024, pin_memory=True)
    mover = Mover(device)
    mover.follow_to_host()
    mover.to_host([(kept, target)], [target])
    restored(saved, {"t.a": target})
    torch.accelerator.synchronize()
    assert torch.equal(kept, torch.full_like(kept, 3.0))
    assert raw(target) == raw(value)


def test_the_maker_writes_what_safetensors_reads(tmp_path, save):
    safetensors = pytest.importorskip("safetensors.torch")
    values = {"a": noise(5, 3), "b": noise(2048)}
    saved = save({"t": values})
    loaded = safetensors.load_file(saved.folder / "t.safetensors")
    assert {n: raw(v) for n, v in loaded.items()} == {f"t.{n}": raw(v) for n, v in values.items()}
    assert maker.CHUNK_BYTES % 4096 == 0
    assert box_of(saved_for_rank(saved).tensors["t.a"][0]) == Box((0, 0), (5, 3))
