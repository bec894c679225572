"""What ``torch.compile`` does on the device: it compiles nothing, runs the function eagerly, and
says so once.

Torch's own compilers write code for the devices that they know. The graph that they are given runs
as it is instead, so results are the plain function's bit for bit, and so is the memory. Graphs of
other devices are compiled as ever, and a compiler that the program brings itself is called.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

# torch has no public name for it (2.13); its own compilers take trees apart so.
from torch.utils import _pytree as pytree

# `eager` needs no word: it compiles nothing anywhere.
_COMPILERS = frozenset({"aot_eager", "aot_eager_decomp_partition", "cudagraphs", "inductor"})
_MESSAGE = (
    "torch.compile compiles nothing for the simulated accelerator: compiled functions run eagerly, "
    "with the results and the memory of the plain ones."
)


def run_compiled_eagerly(device_type: str) -> list[bool]:
    """Makes ``torch.compile`` run graphs with tensors of the device as they are.

    Returns:
        A list that has an entry once it has run one.
    """
    wrappers: Any = torch  # torch names these two for itself
    is_said: list[bool] = []
    for wrapper in (wrappers._TorchCompileInductorWrapper, wrappers._TorchCompileWrapper):
        wrapper.__call__ = _eager_on(device_type, wrapper.__call__, is_said)
    return is_said


def _eager_on(
    device_type: str, compile_graph: Callable[..., object], is_said: list[bool]
) -> object:
    @functools.wraps(compile_graph)
    def call(self: Any, graph: Any, inputs: Any, **options: Any) -> Any:
        if self.compiler_name not in _COMPILERS or not _is_on(device_type, graph, inputs):
            return compile_graph(self, graph, inputs, **options)
        if not is_said:
            is_said.append(True)
            warnings.warn(_MESSAGE, stacklevel=2)
        return graph.forward

    return call


def _is_on(device_type: str, graph: torch.fx.GraphModule, inputs: object) -> bool:
    values = [inputs, *(node.meta.get("example_value") for node in graph.graph.nodes)]
    return any(
        isinstance(leaf, torch.Tensor) and leaf.device.type == device_type
        for leaf in pytree.tree_leaves(values)
    )
