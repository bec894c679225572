"""How much host memory this process can still have: free RAM, or less where a cgroup says so.

Page cache that the kernel can drop counts as available, as ``MemAvailable`` counts it, and every
group from the process's own up to the root may set the tightest limit. Where the system does not
say, the answer is None, never a guess.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from residency._units import format_bytes, parse_bytes

_ROOT = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


class _Files(NamedTuple):
    """The names that one version of cgroups gives its figures."""

    limit: str
    usage: str
    inactive_file: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def ask_for_large_pages(address: int, num_bytes: int) -> None:
    """Tells the system that a range of memory, which begins at a page, is best made of large ones.

    Copies, checksums and direct writes of gigabytes then look up five hundred times fewer pages.
    A system that has none, or does not want to, goes on with small ones.
    """
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
    if advice is not None:
        _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def available_host_bytes() -> int | None:
    """Returns the host bytes that can still be had: free RAM, or less where a cgroup says so.

    Returns:
        None where the system does not say.
    """
    found = [n for n in (_available_ram(), available_in_cgroups()) if n is not None]
    return min(found) if found else None


def locked_limit() -> str:
    """Returns how much of its memory the system lets this process lock, as words."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return "as much as the system lets it"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "no limit" if limit == resource.RLIM_INFINITY else f"at most {format_bytes(limit)}"


def available_in_cgroups(*, root: Path = _ROOT, proc: Path = _PROC) -> int | None:
    """Returns what the tightest of this process's groups leaves, or None without a limit.

    Args:
        root: Where the hierarchies are mounted.
        proc: Where the kernel describes the process.
    """
    found = [
        available
        for files, folder in _folders_of_groups(root, proc)
        if (available := _available_in(folder, files)) is not None
    ]
    return min(found, default=None)


def _folders_of_groups(root: Path, proc: Path) -> Iterator[tuple[_Files, Path]]:
    """Yields the folders of the process's own groups and of all above them, in both versions."""
    lines = (_text(proc / "self" / "cgroup") or "0::/\n0:memory:/").splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts, files = (root, root / "unified"), _V2
        elif "memory" in controllers.split(","):
            mounts, files = (root / "memory", root / controllers), _V1
        else:
            continue
        # In a container the path may be the one outside, of which only the mount itself is here.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts), -1, -1):
                yield files, mount.joinpath(*parts[:depth])


def _available_in(folder: Path, files: _Files) -> int | None:
    limit, usage = _text(folder / files.limit), _text(folder / files.usage)
    if limit is None or usage is None or not (limit.isdigit() and usage.isdigit()):
        return None  # no such group here, or "max"
    droppable = 0
    for line in (_text(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == files.inactive_file and value.isdigit():
            droppable = int(value)
    return max(0, int(limit) - max(0, int(usage) - droppable))


def _available_ram() -> int | None:
    for line in (_text(_PROC / "meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return parse_bytes(f"{line.split()[1]} KiB")  # which the kernel writes as kB
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
