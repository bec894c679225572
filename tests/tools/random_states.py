"""Random training states, and what stock torch, safetensors and arithmetic say of their saves."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
SIZES = [0, 1, 2, 8, 16, 48, 511, 512, 513, 528, 4095, 4096, 4097, 4112, 65535, 65536, 65537]
MIB = 1 << 20
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD_NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "a.b",
    "../../x",
    "name with spaces",
    "Größe",
    "重み",
    "tab\tand\nline",
    "x" * 150,
    "nul\0byte",
    "'quoted\"",
    "CON",
    "Model",
    "__metadata__",
    "manifest",
    "$",
    "0",
    "-",
    "rank-00001-of-00002",
    "tensors",
    "\U0001f600",
]


def bits(tensor: Tensor) -> bytes:
    """Returns the bytes of a plain tensor's values, in the order of its elements."""
    tensor = tensor.detach()
    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    plain = tensor.view(_INTEGER[tensor.element_size()]).cpu().contiguous()
    return plain.numpy().tobytes()


def random_bytes(chance: random.Random, count: int, dtype: torch.dtype) -> Tensor:
    """Returns a contiguous host tensor of random bytes: all NaNs, but only true and false."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    item = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (count // item * item,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        raw &= 1
    return raw.view(dtype)


def size_of(chance: random.Random, may_be_large: bool) -> int:
    if may_be_large and chance.random() < 0.5:
        return 4 * MIB + 512 * chance.randint(-3, 3) + chance.choice([0, 0, 1, 8])
    return chance.choice(SIZES) if chance.random() < 0.8 else chance.randrange(20000)


def laid_out(chance: random.Random, flat: Tensor) -> Tensor:
    """Gives a flat tensor some shape and strides of the same storage."""
    count = flat.numel()
    kind = chance.randrange(7)
    if kind == 0 and count:
        return flat[0] if count < 64 else flat[1:]
    if kind == 1 and count >= 6:
        return flat[: count // 6 * 6].view(2, -1, 3).transpose(0, 2)
    if kind == 2 and count >= 2 * 3 * 4 * 4:
        return flat[:96].view(2, 4, 4, 3).permute(0, 3, 1, 2)  # channels_last
    if kind == 3 and count >= 4:
        return flat[1::3]
    if kind == 4 and count >= 9:
        side = int(count**0.5)
        return flat[: side * side].view(side, side)[:, : side // 2 + 1]
    if kind == 5:
        return flat[:0].view(0, 3) if chance.random() < 0.3 else flat.view(1, -1, 1)
    return flat


class Bag:
    """Tensors by name: ties, views and layouts, the same for the same seed."""

    def __init__(self, seed: int, device: torch.device, count: int, large: int) -> None:
        chance = random.Random(seed)
        self.tensors: dict[str, Tensor] = {}
        flats: list[Tensor] = []
        for index in range(count):
            where = device if chance.random() < 0.6 else torch.device("cpu")
            number = size_of(chance, may_be_large=index < large)
            kind = chance.random()
            if flats and kind < 0.1:
                value = chance.choice(list(self.tensors.values()))  # a tie
            elif flats and kind < 0.25:
                value = laid_out(chance, chance.choice(flats))  # another view of the storage
            else:
                flat = random_bytes(chance, number, chance.choice(DTYPES)).to(where)
                flats.append(flat)
                value = laid_out(chance, flat)
                if value.is_floating_point() and value.dtype.itemsize > 1 and kind > 0.9:
                    value = nn.Parameter(value.detach(), requires_grad=chance.random() < 0.5)
            name = f"t{index}"
            if chance.random() < 0.1:
                name = chance.choice(ODD_NAMES) + chance.choice(["", str(index)])
            self.tensors[name] = value
        self.flats = flats

    def nested(self, chance: random.Random) -> dict[str, Any]:
        """Returns the tensors in mappings, lists and tuples."""
        items = list(self.tensors.items())
        cut = chance.randint(0, len(items))
        rest = [tensor for _, tensor in items[cut:]]
        return {"by name": dict(items[:cut]), "list": rest, "tuple": tuple(rest[:2])}

    def scramble(self, chance: random.Random) -> None:
        """Writes other bytes into every storage, as work queued on the current stream."""
        for flat in self.flats:
            if flat.numel():
                raw = flat.view(torch.uint8) if flat.element_size() <= 8 else None
                other = random_bytes(chance, flat.numel() * flat.element_size(), torch.uint8)
                if flat.dtype == torch.bool:
                    other &= 1
                target = torch.view_as_real(flat).view(torch.uint8) if raw is None else raw
                with torch.no_grad():
                    target.copy_(other.to(flat.device).view(target.shape))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what is no container, by path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        yield f"{path}.type", type(value)
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def digest(state: Any) -> dict[str, Any]:
    """Returns all of a state as plain values, read with stock torch alone."""
    found: dict[str, Any] = {}
    for name, value in leaves(state):
        if hasattr(value, "state_dict"):
            for inner, part in leaves(value.state_dict()):
                found[f"{name}:{inner}"] = _plain(part)
        else:
            found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), bits(value))
    return (type(value).__name__, repr(value))


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names what two digests have differently."""
    names = sorted(one.keys() | other.keys())
    return [name for name in names if one.get(name) != other.get(name)]


def check_format(save: Path) -> dict[str, Tensor]:
    """Reads a save with json, zlib and stock safetensors, as docs/reference/checkpoint-format.md
    says; returns its tensors by name."""
    manifest = json.loads((save / "manifest.json").read_text("ascii"))
    said = manifest.pop("crc32")
    plain = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    assert zlib.crc32(plain) == said
    assert save.name == f"step-{manifest['step']:08d}"
    tensors: dict[str, Tensor] = {}
    files = manifest["ranks"][0]["files"]
    assert {file.name for file in save.iterdir()} == {"manifest.json", *files}
    for name, file in files.items():
        content = (save / name).read_bytes()
        assert len(content) == file["num_bytes"]
        begin, step = file["header_bytes"], file["chunk_bytes"]
        assert begin % 4096 == 0
        assert zlib.crc32(content[:begin]) == file["header_crc32"]
        chunks = [content[at : at + step] for at in range(0, len(content), step)]
        assert [zlib.crc32(chunk) for chunk in chunks] == file["crc32"], name
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        assert header.pop("__metadata__") == {"format": "pt", "residency": "1"}
        spans = sorted(entry["data_offsets"] for entry in header.values())
        ends = [0, *(end for _, end in spans)]
        assert [start for start, _ in spans] == ends[:-1], "holes between tensors"
        assert begin + ends[-1] == len(content)
        with safetensors.safe_open(save / name, "pt") as opened:
            assert set(opened.keys()) == set(header)
        for key, tensor in safetensors.torch.load_file(save / name).items():
            assert key not in tensors, key
            tensors[key] = tensor
    return tensors
