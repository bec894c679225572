"""What a save says of itself: the records of its tensors, the checksums of its files, and the
manifest and the ranks' reports that carry both as JSON.

A manifest is taken for what it says only when its bytes are exactly those that were written: its
own checksum holds, and writing it again gives the same bytes.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, NoReturn

from residency._checkpoint._disk._crc import crc32
from residency._errors import CheckpointError, CorruptSaveError, InvalidArgumentError

MANIFEST = "manifest.json"
MANIFEST_BEGIN = b'{"format":"residency",'
"""What the first bytes of every manifest are, whatever its version."""

_FORMAT = "residency"
_VERSION = 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class Record(NamedTuple):
    """One tensor, or one shard of it, as a file holds it.

    Attributes:
        name: The tensor's name.
        dtype: The name that safetensors has for its dtype, such as ``"F32"``.
        shape: The shape of what is stored.
        num_bytes: Its size.
        offsets: Where a shard begins in the whole tensor, or None for a whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offsets: tuple[int, ...] | None = None


class StoredEntry(NamedTuple):
    """A record as it was read, and the place of its bytes.

    Attributes:
        file: The name of the file, in the save's directory.
        start: Where in the file its bytes begin.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offsets: tuple[int, ...] | None
    file: str
    start: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A manifest's entry of one file.

    Attributes:
        num_bytes: The file's size.
        header_bytes: Where its tensors' bytes begin.
        header_crc32: The checksum of what is before them.
        chunk_bytes: The file is cut at multiples of this; the last chunk is what is left.
        crc32: The checksum of each chunk.
    """

    num_bytes: int
    header_bytes: int
    header_crc32: int
    chunk_bytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankReport:
    """The files that one rank wrote.

    Attributes:
        document: The rank's state, but for its tensors' bytes.
        files: What is known of each file, by its name.
    """

    document: dict[str, Any]
    files: Mapping[str, FileRecord]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The file that makes other files a save.

    Attributes:
        step: The training step.
        token: What tells this save from another of the same step.
        metrics: Figures that the caller gave.
        ranks: What each rank wrote, in order.
    """

    step: int
    token: str
    metrics: Mapping[str, float]
    ranks: Sequence[RankReport]


def file_name(top: str, *, rank: int = 0, world_size: int = 1) -> str:
    """Returns the name of the file for one top-level name of the state, on one rank."""
    shard = f"-rank-{rank:05d}-of-{world_size:05d}" if world_size > 1 else ""
    return f"{top}{shard}.safetensors"


def check_file_name(name: str) -> None:
    """Raises InvalidArgumentError unless a name can only be that of a file in its directory."""
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise InvalidArgumentError(
            f"the file name {name!r} is not fit for a save; expected letters, digits, '_', '-' and "
            f"'.', not beginning with '.' or '-', and not {MANIFEST!r}."
        )


def dump_manifest(manifest: Manifest) -> bytes:
    """Returns the bytes of a manifest file."""
    return _seal(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "step": manifest.step,
            "token": manifest.token,
            "world_size": len(manifest.ranks),
            "metrics": {name: _dump_float(v) for name, v in manifest.metrics.items()},
            "ranks": [_dump_rank(report) for report in manifest.ranks],
        }
    )


def parse_manifest(data: bytes) -> Manifest:
    """Returns what the bytes of a manifest file say.

    Raises:
        CorruptSaveError: They are not the bytes of a manifest, or not those that were written.
        CheckpointError: A later version of the format.
    """
    file = MANIFEST
    found = _unseal(data, file)
    if found.get("format") != _FORMAT:
        _fail(file, f"it is of the format {found.get('format')!r}, expected {_FORMAT!r}")
    if found.get("version") != _VERSION:
        raise CheckpointError(
            f"{file} is of version {found.get('version')!r} of the format; this release of "
            f"residency reads version {_VERSION}. Read it with the release that wrote it."
        )
    try:
        manifest = Manifest(
            step=_count(found["step"]),
            token=str(found["token"]),
            metrics={str(name): float(value) for name, value in found["metrics"].items()},
            ranks=tuple(_parse_rank(rank) for rank in found["ranks"]),
        )
        if _count(found["world_size"]) != len(manifest.ranks) or not manifest.ranks:
            raise ValueError(f"{len(manifest.ranks)} ranks, world_size {found['world_size']}")
        names = [name for rank in manifest.ranks for name in rank.files]
        if len(set(names)) != len(names):
            raise ValueError("two ranks name the same file")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _fail(file, f"a field is missing or of no use: {error!r}")
    return manifest


def dump_report(report: RankReport, *, rank: int) -> bytes:
    """Returns the bytes of a rank's report."""
    return _seal({"rank": rank, **_dump_rank(report)})


def parse_report(data: bytes, *, rank: int, file: str) -> RankReport:
    """Returns what a rank reported.

    Raises:
        CorruptSaveError: They are not the bytes that this rank wrote.
    """
    found = _unseal(data, file)
    try:
        if found["rank"] != rank:
            raise ValueError(f"it is of rank {found['rank']}, expected {rank}")
        return _parse_rank(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _fail(file, f"a field is missing or of no use: {error!r}")


def parse_json(text: str) -> Any:
    """Returns what JSON says, with arrays in objects as tuples: of numbers, those are nothing that
    a garbage collection looks at. A key that stands twice, and NaN, are errors as any other.
    """
    return json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_refuse_constant)


def _seal(fields: dict[str, Any]) -> bytes:
    """Returns JSON that ends with the checksum of everything before it."""
    return _dump({**fields, "crc32": _sum(fields)})


def _unseal(data: bytes, file: str) -> dict[str, Any]:
    try:
        # A key that stands twice would not be written so: the last check below finds it.
        found = json.loads(data.decode("ascii"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        _fail(file, f"it is not JSON as it was written: {error}")
    if not isinstance(found, dict) or "crc32" not in found:
        _fail(file, "it has no checksum")
    fields = {key: value for key, value in found.items() if key != "crc32"}
    try:
        said, again = _sum(fields), _dump(found)
    except (ValueError, RecursionError) as error:  # what JSON reads and does not write, as 1e400
        _fail(file, f"it has a value that no manifest has: {error}")
    if found["crc32"] != said:
        _fail(file, f"its checksum is {said}, and was {found['crc32']!r} when written")
    if again != data:  # a byte changed, but not what the JSON means
        _fail(file, "its bytes are not as they were written")
    return fields


def _sum(fields: dict[str, Any]) -> int:
    return crc32(_dump(fields, sort_keys=True))


def _dump(fields: dict[str, Any], *, sort_keys: bool = False) -> bytes:
    text = json.dumps(fields, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _dump_rank(report: RankReport) -> dict[str, Any]:
    return {
        "document": report.document,
        "files": {name: asdict(record) for name, record in report.files.items()},
    }


def _parse_rank(found: Any) -> RankReport:
    if not isinstance(found["document"], dict):
        raise ValueError("a rank's document is no object")
    return RankReport(
        document=found["document"],
        files={name: _parse_file(name, record) for name, record in found["files"].items()},
    )


def _parse_file(name: str, found: Any) -> FileRecord:
    check_file_name(name)
    record = FileRecord(
        num_bytes=_count(found["num_bytes"]),
        header_bytes=_count(found["header_bytes"]),
        header_crc32=_count(found["header_crc32"]),
        chunk_bytes=_count(found["chunk_bytes"]),
        crc32=tuple(_count(value) for value in found["crc32"]),
    )
    if record.chunk_bytes == 0 or record.header_bytes > record.num_bytes:
        raise ValueError(f"the sizes of {name} contradict each other")
    if len(record.crc32) != -(-record.num_bytes // record.chunk_bytes):
        raise ValueError(f"{name} has {len(record.crc32)} checksums for {record.num_bytes} bytes")
    return record


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _dump_float(value: float) -> float | str:
    # JSON has no word for these three.
    return float(value) if math.isfinite(value) else str(float(value))


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {name: tuple(each) if type(each) is list else each for name, each in pairs}
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {reprlib.repr(name)} stands twice")
            seen.add(name)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _fail(file: str, reason: str) -> NoReturn:
    raise CorruptSaveError(f"{file} is damaged: {reason}.", file=file)
