"""Writes saves by the letter of the format, without the code that writes them: what a restore
reads must not depend on who wrote it.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch

from residency._checkpoint._capture._blocks import make_blocks
from residency._checkpoint._capture._walk import describe
from residency._checkpoint._disk._manifest import FileRecord, Record, StoredEntry, file_name
from residency._checkpoint._document._encode import Encoder
from residency._checkpoint._restore._restore import carry_out, plan_state

CHUNK_BYTES = 8192


class Part:
    """Is what one rank saves."""

    def __init__(self, state, *, rng=None, rank=0):
        if rng is not None:
            state = {**state}
        described = describe(state)
        if rng is not None:
            encoder = Encoder()
            described.tree["rng"] = encoder.node("rng", rng)
            described.leaves.update(encoder.leaves)
        made = make_blocks(described.leaves, rank=rank)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.document = {"tree": described.tree, "tensors": made.special}
        self.tensors = [(block.record, bytes_of(block)) for block in made.blocks]
        described.loans.end()


def bytes_of(block):
    span = block.span.detach().cpu()
    if block.gather is not None:
        dtype, shape, stride, start = block.gather
        flat = span[start:].clone()
        whole = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        span = whole.as_strided(shape, stride).contiguous().reshape(-1).view(torch.uint8)
    return span.numpy().tobytes()


def write(folder, *parts, chunk_bytes=CHUNK_BYTES):
    """Writes the parts of all ranks; returns the save as the disk layer opens it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    entries, files, rank_of_file = {}, {}, {}
    for rank, part in enumerate(parts):
        by_top = {}
        for record, data in part.tensors:
            by_top.setdefault(record.name.split(".")[0], []).append((record, data))
        for top, tensors in by_top.items():
            name = file_name(top, rank=rank, world_size=len(parts))
            tensors.sort(key=lambda pair: (pair[0].num_bytes % 4096 != 0, -itemsize_of(pair[0])))
            content, starts = safetensors_bytes(tensors)
            (folder / name).write_bytes(content)
            rank_of_file[name] = rank
            sums = [
                zlib.crc32(content[at : at + chunk_bytes])
                for at in range(0, len(content), chunk_bytes)
            ]
            files[name] = FileRecord(len(content), 0, 0, chunk_bytes, tuple(sums))
            for (record, _), start in zip(tensors, starts, strict=True):
                entries.setdefault(record.name, []).append(StoredEntry(*record, name, start))
    documents = [json.loads(json.dumps(part.document)) for part in parts]
    return SimpleNamespace(
        folder=folder,
        documents=documents,
        entries=entries,
        files=files,
        rank_of_file=rank_of_file,
    )


def itemsize_of(record: Record) -> int:
    count = torch.Size(record.shape).numel()
    return record.num_bytes // count if count else 0


def safetensors_bytes(tensors):
    header, offset = {"__metadata__": {"format": "pt", "residency": "1"}}, 0
    for record, data in tensors:
        assert len(data) == record.num_bytes
        header[record.name] = {
            "dtype": record.dtype,
            "shape": list(record.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    start = 8 + len(text)
    content = len(text).to_bytes(8, "little") + text + b"".join(data for _, data in tensors)
    starts, at = [], start
    for _, data in tensors:
        starts.append(at)
        at += len(data)
    return content, starts


def restore_state(state, save, *, on_bytes=None, **settings):
    """Plans a restore and carries it out; returns what was left out."""
    planned = plan_state(state, save, **settings)
    carry_out(planned, on_bytes)
    return planned.differences()
