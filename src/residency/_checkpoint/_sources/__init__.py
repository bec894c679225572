"""Checkpoints of every known format, opened to read from: names, layouts, where the bytes lie."""

from residency._checkpoint._sources._open import open_source
from residency._checkpoint._sources._source import Source, StoredTensor, TensorName

__all__ = ["Source", "StoredTensor", "TensorName", "open_source"]
