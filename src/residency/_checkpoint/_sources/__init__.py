"""Checkpoints of every known format, opened to read from: names, layouts, where the bytes lie."""

from residency._checkpoint._sources._open import open_source as open_source
from residency._checkpoint._sources._source import (
    Source as Source,
    StoredTensor as StoredTensor,
    TensorName as TensorName,
)
