"""Loads files that somebody made to do harm, in a process with little memory; prints what came.

``hostile.py FOLDER``: each file below it is loaded into a small module. A process of its own: what
takes too much memory or never ends must not take the tests along.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import residency
from residency._checkpoint._disk import _manifest

SPARE_BYTES = 64 * 2**20
WEIGHT = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
BIAS = {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}
EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


def safetensors(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def torch_save(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def archive(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as made:
        made.writestr("a/data.pkl", pickled)
        made.writestr("a/version", "3")
    return file.getvalue()


def zip_bomb(member: str) -> bytes:
    source = zipfile.ZipFile(io.BytesIO(torch_save({"weight": torch.ones(2, 2)})))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as made:
        for name in source.namelist():
            if not name.endswith(member):
                made.writestr(name, source.read(name))
        info = zipfile.ZipInfo(f"archive/{member}")
        info.compress_type = zipfile.ZIP_DEFLATED
        with made.open(info, "w", force_zip64=True) as stream:
            for _ in range(200):
                stream.write(bytes(2**20))
    return file.getvalue()


def shared(depth: int, kind: Callable[[list[Any]], Any] = list) -> Any:
    value: Any = kind([1])
    for _ in range(depth):
        value = kind([value, value])
    return value


class _Storage:
    """Pickles as what torch has for a storage, with another thing for its name."""

    def __init__(self, name: Any) -> None:
        self.name = name


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", torch.FloatStorage, value.name, "cpu", 4
        return None


def persistent(name: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, 2).dump({"weight": _Storage(name)})
    return archive(file.getvalue())


FILES: dict[str, Callable[[], bytes]] = {
    "doubled.safetensors": lambda: safetensors(
        ("{" + ",".join(f'"k{i}":0' for i in range(60000)) + ',"z":0,"z":0}').encode()
    ),
    "dots.safetensors": lambda: safetensors(
        {"." * 60000: EMPTY, "weight": WEIGHT, "bias": BIAS}, bytes(24)
    ),
    "many_dots.safetensors": lambda: safetensors(
        {"a." * 2000 + str(i): EMPTY for i in range(300)} | {"weight": WEIGHT}, bytes(16)
    ),
    "digits.safetensors": lambda: safetensors(
        b'{"weight":{"dtype":"U8","shape":['
        + b",".join([b"9" * 4000] * 250)
        + b'],"data_offsets":[0,16]}}',
        bytes(16),
    ),
    "dimensions.safetensors": lambda: safetensors(
        {"weight": {**WEIGHT, "shape": [1] * 500_000 + [4]}}, bytes(16)
    ),
    "length.safetensors": lambda: struct.pack("<Q", 100_000_000) + b"{",
    "many.safetensors": lambda: safetensors({f"k{i}": EMPTY for i in range(20000)}),
    "laughs.pt": lambda: torch_save({"weight": torch.ones(2, 2), "x": shared(60)}),
    "laughs_of_dicts.pt": lambda: torch_save({"x": shared(60, lambda e: dict(enumerate(e)))}),
    "bomb_of_the_order.pt": lambda: zip_bomb("byteorder"),
    "bomb_of_the_pickle.pt": lambda: zip_bomb("data.pkl"),
    "name_without_end.pt": lambda: persistent(shared(60)),
    "long_int.pt": lambda: archive(b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x"),
    "long_bytes.pt": lambda: archive(b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x."),
}


def changed(folder: Path, change: Callable[[Any], object]) -> Path:
    """Makes a save with another manifest, whose checksum holds."""
    with residency.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.Linear(2, 2)}, rng=False).wait()
    file = folder / "step-00000001" / "manifest.json"
    fields = json.loads(file.read_bytes())
    del fields["crc32"]
    change(fields["ranks"][0])
    file.write_bytes(_manifest._seal(fields))
    return file.parent


def noted(**note: Any) -> Callable[[Any], object]:
    view = {"of": "model.bias", "start": 0, "dtype": "float32", "shape": [2, 2], "stride": [0, 0]}
    return lambda rank: rank["document"].update(tensors={"model.weight": {**view, **note}})


def file_of(rank: Any, **fields: Any) -> None:
    rank["files"]["model.safetensors"].update(fields)


def tree_of(rank: Any, **fields: Any) -> None:
    rank["document"]["tree"]["model"].update(fields)


MANIFESTS: dict[str, Callable[[Any], object]] = {
    "a header of a terabyte": lambda rank: file_of(
        rank, header_bytes=2**40, num_bytes=2**41, chunk_bytes=2**41, crc32=[1]
    ),
    "a chunk of a terabyte": lambda rank: file_of(rank, chunk_bytes=2**40, crc32=[1]),
    "no tree": lambda rank: rank["document"].pop("tree"),
    "a tree of text": lambda rank: rank["document"].update(tree="x"),
    "no keys": lambda rank: rank["document"]["tree"]["model"].pop("keys"),
    "names of numbers": lambda rank: tree_of(rank, names=[1, 2]),
    "fewer names than keys": lambda rank: tree_of(rank, names=["model.weight"]),
    "notes of text": lambda rank: rank["document"].update(tensors="x"),
    "a view before its base": noted(start=-4),
    "a view beyond its base": noted(stride=[10**9, 1]),
    "a view between elements": noted(start=2),
    "a view without end": noted(shape=[2**40, 2**40]),
    "a view of another rank": noted(of_rank="x"),
    "a dtype that is none": noted(dtype="nn"),
    "a whole of a terabyte": lambda rank: rank["document"].update(
        tensors={"model.weight": {"whole_shape": [2**40, 2], "offsets": [0, 0]}}
    ),
}


def outcome(path: Path) -> str:
    try:
        residency.load_into(torch.nn.Linear(2, 2), path, strict=False)
    except residency.ResidencyError as error:
        return f"{type(error).__name__} of {len(str(error))} letters"
    except BaseException as error:
        return f"another error: {error!r:.200}"
    return "loaded"


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    paths = {}
    for name, make in FILES.items():
        paths[name] = folder / name
        paths[name].write_bytes(make())
    for index, (name, change) in enumerate(MANIFESTS.items()):
        paths[name] = changed(folder / str(index), change)
    outcome(folder / "0" / "nothing")  # what is imported late is there
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE_BYTES, held + SPARE_BYTES))
    print(json.dumps({name: outcome(path) for name, path in paths.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
