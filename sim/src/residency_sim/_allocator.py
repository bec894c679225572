"""What ``torch.sim`` offers of the allocator beyond ``torch.accelerator``: the memory fraction,
private pools, allocator settings and library workspaces, under the names that ``torch.cuda`` has.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from residency._errors import InvalidArgumentError

DEFAULT_POOL = (0, 0)
_pool_numbers = itertools.count(1)


def new_pool_id() -> tuple[int, int]:
    """Returns a key that no private pool of the process has had; 0 first, as CUDA's of users."""
    return 0, next(_pool_numbers)


def adopt_settings(extension: Any) -> None:
    """Makes torch refuse unknown allocator settings, and takes over those of the environment.

    Raises:
        InvalidArgumentError: The environment has a setting that means nothing.
    """
    try:
        extension.adopt_allocator_settings()
    except (RuntimeError, ValueError) as error:
        raise InvalidArgumentError(
            f"PYTORCH_ALLOC_CONF cannot be used: {_first_line(error)}"
        ) from None


def blas_workspace_bytes(extension: Any, capability_major: int) -> int:
    """Returns the bytes of a cuBLAS workspace, by ``CUBLAS_WORKSPACE_CONFIG`` and torch's rule."""
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    num_bytes, is_understood = extension.blas_workspace_bytes(config, capability_major)
    if not is_understood:
        warnings.warn(
            f"CUBLAS_WORKSPACE_CONFIG is {config!r}, expected ':KiB:count', any number of times; "
            f"cuBLAS workspaces have {num_bytes} bytes.",
            stacklevel=4,
        )
    return int(num_bytes)


class MemPool:
    """A private pool: what is allocated in `use_mem_pool` comes from segments of its own.

    Its memory goes back to the device when the object and every tensor in it are gone. As
    ``torch.cuda.MemPool``, which the CPU build of torch has in name only.
    """

    _core: Any  # of the subclass that `functions` makes
    _id = DEFAULT_POOL  # of one that an interrupt left half made

    def __init__(self) -> None:
        core = self._core
        self._id = new_pool_id()
        core.add_pool_user(self._id)

    @property
    def id(self) -> tuple[int, int]:
        """The pool's key in ``reserved_bytes_by_private_pools``."""
        return self._id

    def use_count(self) -> int:
        """Returns how many users the pool has: this object, and each block that allocates to it."""
        return int(self._core.num_pool_users(self._id))

    def __del__(self) -> None:
        if self._id != DEFAULT_POOL and self.use_count():
            self._core.remove_pool_user(self._id)
            self._core.empty_pool_cache(self._id)


@contextmanager
def use_mem_pool(pool: MemPool, device: object = None) -> Iterator[None]:
    """Sends this thread's allocations to a private pool."""
    core = pool._core
    core.begin_allocating_to(pool.id)
    try:
        yield
    finally:
        core.end_allocating_to(pool.id)
        core.remove_pool_user(pool.id)


def memory_stats(core: Any) -> Callable[..., dict[str, Any]]:
    """Returns ``torch.sim.memory_stats``, which names private pools as ``torch.cuda``'s does."""

    def read(device: Any = None) -> dict[str, Any]:
        figures: dict[str, Any] = dict(torch.accelerator.memory_stats(device))
        for pool, kinds in core.private_pool_stats().items():
            name = f"reserved_bytes_by_private_pools.{pool[0]}_{pool[1]}"
            for kind, of_kind in kinds.items():
                figures |= {f"{name}.{kind}.{figure}": of_kind[figure] for figure in of_kind}
        return figures

    return read


def functions(core: Any) -> dict[str, Any]:
    """Returns what concerns the allocator in ``torch.sim``, and what of it ``torch.cuda`` gets."""

    def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
        if isinstance(fraction, bool) or not isinstance(fraction, float | int):
            raise TypeError(f"the memory fraction is {fraction!r}; expected a number from 0 to 1.")
        try:
            core.set_memory_fraction(fraction)
        except ValueError as error:
            raise InvalidArgumentError(_first_line(error)) from None

    def set_allocator_settings(settings: str) -> None:
        try:
            core.set_allocator_settings(settings)
        except (RuntimeError, ValueError) as error:
            raise InvalidArgumentError(
                f"The allocator settings {settings!r} cannot be used: {_first_line(error)}"
            ) from None

    return {
        # A class, because torch asks what is one.
        "MemPool": type("MemPool", (MemPool,), {"_core": core, "__doc__": MemPool.__doc__}),
        "clear_workspaces": core.clear_workspaces,
        "get_per_process_memory_fraction": lambda device=None: core.memory_fraction(),
        "memory_snapshot": lambda mempool_id=None, include_traces=True: core.snapshot(
            mempool_id or DEFAULT_POOL, False
        )["segments"],
        "private_pool_stats": core.private_pool_stats,
        "set_allocator_settings": set_allocator_settings,
        "set_per_process_memory_fraction": set_per_process_memory_fraction,
        "use_mem_pool": use_mem_pool,
    }


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
