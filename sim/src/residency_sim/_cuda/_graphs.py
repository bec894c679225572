"""The graphs of the simulated accelerator in CUDA's place: what ``torch.cuda.CUDAGraph`` is derived
from.

A capture runs kernels for their shapes only, keeps what it was given with the addresses of then,
and refuses what CUDA refuses (``csrc/captures.h``). A replay runs it on the current stream, in the
order in which it was issued.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from residency._errors import SimulatorError
from residency_sim._allocator import new_pool_id

_MODES = ("global", "thread_local", "relaxed")


class _PoolUser:
    """A user of a private pool, and what was captured into it."""

    _core: Any = None

    def __init__(self, core: Any, pool: tuple[int, int], stream: Any) -> None:
        self.pool = pool
        self.stream = stream
        self.graph: object = None
        self._core = core

    def __del__(self) -> None:
        if self._core is not None:  # an interrupt may have left it half made
            self._core.remove_pool_user(self.pool)


class CudaGraphBase:
    """The base class of ``torch.cuda.CUDAGraph``."""

    _core: Any = None  # set by `install`
    _held: _PoolUser | None = None

    def __new__(cls, keep_graph: bool = False) -> CudaGraphBase:
        """Makes a graph that nothing was captured into yet."""
        return super().__new__(cls)

    def capture_begin(
        self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global"
    ) -> None:
        """Captures the current stream, and those that will wait for it, from here on."""
        if self._held is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. "
                "To capture a new graph, create a new instance."
            )
        if capture_error_mode not in _MODES:
            raise RuntimeError(
                "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got "
                f"{capture_error_mode}"
            )
        stream = torch.cuda.current_stream()
        if stream.stream_id == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                "it's ok to replay them on the default stream.)"
            )
        first, second = new_pool_id()[::-1] if pool is None else (int(pool[0]), int(pool[1]))
        chosen = (first, second)
        self._core.begin_capture(chosen, _MODES.index(capture_error_mode))
        self._held = _PoolUser(self._core, chosen, stream)

    def capture_end(self) -> None:
        """Ends the capture; raises where an error ended it before."""
        held = self._held
        if held is None or torch.cuda.current_stream() != held.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        held.graph = self._core.end_capture(held.pool)

    def instantiate(self) -> None:
        """Does nothing: there is nothing to compile."""
        self._check("instantiate")

    def replay(self) -> None:
        """Issues what was captured to the current stream."""
        graph = self._check("replay").graph
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Cannot prepare for replay during capturing stage. during CUDA graph capture. If "
                "you need this call to be captured, please file an issue. Current "
                "cudaStreamCaptureStatus: cudaStreamCaptureStatusActive"
            )
        self._core.replay(graph)

    def reset(self) -> None:
        """Drops what was captured; its pool's memory goes back when no other graph has the pool."""
        self._held = None

    def pool(self) -> Any:
        """Returns the key of the pool that the graph's memory comes from."""
        return self._check("pool").pool

    def register_generator_state(self, generator: object) -> None:
        """Does nothing: a replay draws from every generator that the capture did."""

    def enable_debug_mode(self) -> None:
        """Does nothing: there is no graph of CUDA's to look at."""

    def debug_dump(self, debug_path: str) -> None:
        """Raises: there is no graph of CUDA's to write."""
        raise SimulatorError("The simulated accelerator does not model dumps of graphs.")

    def raw_cuda_graph(self) -> int:
        """Raises: there is no graph of CUDA's."""
        raise SimulatorError("The simulated accelerator does not model the handles of graphs.")

    raw_cuda_graph_exec = raw_cuda_graph

    def _check(self, what: str) -> _PoolUser:
        if self._held is None or self._held.graph is None:
            raise RuntimeError(f"Called CUDAGraph::{what} without a preceding successful capture.")
        return self._held


def install(core: object) -> None:
    """Puts the class where torch looks for it; the bindings that it needs are there already."""
    CudaGraphBase._core = core
    torch._C.__dict__["_CUDAGraph"] = CudaGraphBase
    graphs = importlib.reload(torch.cuda.graphs)  # its classes, over this base
    torch.cuda.__dict__.update({name: graphs.__dict__[name] for name in graphs.__all__})
