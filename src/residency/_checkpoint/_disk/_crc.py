"""The checksum of the format: that of zlib, gzip and PNG.

ISA-L computes it with the processor's carry-less multiplication, several times as fast as zlib,
which alone would set the speed of a save (`python -m benchmarks checkpoint`).
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this system
    from zlib import crc32

__all__ = ["crc32"]
