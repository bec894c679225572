"""Real text that is on every machine: the standard library of the running Python.

The choice of files depends on nothing but the installation: sorted by path, every tenth one held
out, up to a fixed number of bytes. No file is in both parts.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from residency._errors import RefusedError
from residency._units import MIB

_SUFFIXES = (".py", ".txt", ".rst")
_SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
_HELD_OUT_EVERY = 10
_MAX_BYTES = 4 * MIB


@dataclass(frozen=True)
class Corpus:
    """The text as bytes, in two parts that share no file.

    Attributes:
        train: ``uint8`` tensor ``[num_train_bytes]`` on the host.
        heldout: ``uint8`` tensor ``[num_heldout_bytes]`` on the host.
        train_files: Paths relative to the root, in the order in which they were read.
        heldout_files: The same for the held-out part.
    """

    train: torch.Tensor
    heldout: torch.Tensor
    train_files: tuple[str, ...]
    heldout_files: tuple[str, ...]


def read_corpus(root: Path | None = None, *, max_bytes: int = _MAX_BYTES) -> Corpus:
    """Reads text files below a directory into a training part and a held-out part.

    Args:
        root: Where to look; by default the standard library of the running Python.
        max_bytes: Reading stops with the file that reaches this size.

    Raises:
        RefusedError: The directory has too few readable text files to fill both parts.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    names: tuple[list[str], list[str]] = ([], [])
    for index, path in enumerate(_text_files(root)):
        which = int(index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1)
        parts[which].extend(path.read_bytes())
        names[which].append(path.relative_to(root).as_posix())
        if len(parts[0]) + len(parts[1]) >= max_bytes:
            break
    if not all(parts):
        raise RefusedError(
            f"{root} has {len(names[0]) + len(names[1])} text files; expected at least "
            f"{_HELD_OUT_EVERY}. Run a Python whose standard library is installed as files."
        )
    train, heldout = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return Corpus(train, heldout, tuple(names[0]), tuple(names[1]))


def training_batch(
    corpus: Corpus, *, seed: int, step: int, rows: int, columns: int
) -> torch.Tensor:
    """Returns a step's batch, ``int64`` ``[rows, columns]`` on the host: seed and step decide."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    num_starts = max(1, corpus.train.numel() - columns)
    starts = torch.randint(0, num_starts, (rows,), generator=generator)
    return torch.stack([_window(corpus.train, int(start), columns) for start in starts])


def heldout_batch(corpus: Corpus, *, rows: int, columns: int) -> torch.Tensor:
    """Returns evenly spaced held-out text, ``int64`` ``[rows, columns]`` on the host."""
    stride = max(1, (corpus.heldout.numel() - columns) // rows)
    return torch.stack([_window(corpus.heldout, row * stride, columns) for row in range(rows)])


def _window(text: torch.Tensor, start: int, columns: int) -> torch.Tensor:
    positions = torch.arange(start, start + columns) % text.numel()
    return text[positions].long()


def _text_files(root: Path) -> Iterator[Path]:
    found = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRECTORIES]
        found += [Path(directory, name) for name in files if name.endswith(_SUFFIXES)]
    # By posix path, so that the order does not depend on the file system's.
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        if path.is_file() and os.access(path, os.R_OK) and path.stat().st_size:
            yield path
