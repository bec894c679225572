"""FlexAttention in a dry run, where a script compiles: the memory of the kernel that torch's
compiler writes for it, and for its masks.

Run as it is, ``flex_attention`` makes matrices of length x length, on a GPU as here, and torch
warns of it. Compiled, which is how it is meant to be used, it is one kernel that takes its results
and two numbers for each row; of a mask there are the numbers of blocks alone. A dry run compiles
nothing, so these results are made in place of what runs.

Source: ``torch/_inductor/kernel/flex/flex_attention.py`` of torch 2.13, whose buffers these are.
Left out: a mask that a compiled function of the script's makes is whole; what the kernel for a few
queries (decoding) splits its results into; and gradients of tensors that a function of the script's
has captured, which a compiler alone makes out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from residency._dryrun._compiling import Compiling
from residency._memory import ImportWatch

_Function = Callable[..., object]


def fuse_attention(compiling: Compiling) -> None:
    """Replaces FlexAttention's operators and masks, once they are imported.

    Args:
        compiling: Knows whether the script compiles.
    """

    def watch_operators(module: ModuleType) -> None:
        # The operators have no public name, and torch no other way to a kernel of theirs.
        for name, fused in (("flex_attention", _attend), ("flex_attention_backward", _go_back)):
            operator: Any = vars(module)[name]
            key = torch._C.DispatchKey.CompositeExplicitAutograd
            operator.py_kernels[key] = _choosing(operator.py_kernels[key], fused, compiling)
            operator._dispatch_cache.clear()
        # Of the function that changes scores: a pass for each call, of which nothing comes here.
        trace = vars(module)["create_fw_bw_graph"]
        module.__dict__["create_fw_bw_graph"] = _tracing(trace, compiling)

    def watch_masks(module: ModuleType) -> None:
        create = vars(module)["create_block_mask"]
        compiling.stand_ins[create] = _making_blocks(create, vars(module)["BlockMask"])

    watched = {
        "torch._higher_order_ops.flex_attention": watch_operators,
        "torch.nn.attention.flex_attention": watch_masks,
    }
    ImportWatch(watched).start()


def _choosing(plain: _Function, fused: _Function, compiling: Compiling) -> _Function:
    @functools.wraps(plain)
    def kernel(query: torch.Tensor, *args: object) -> object:
        is_fused = query.is_cuda and compiling.is_used
        return fused(query, *args) if is_fused else plain(query, *args)

    return kernel


def _tracing(trace: _Function, compiling: Compiling) -> _Function:
    @functools.wraps(trace)
    def traced(score: object, examples: Sequence[torch.Tensor], *args: object) -> object:
        is_fused = examples[0].is_cuda and compiling.is_used
        return (score, score) if is_fused else trace(score, examples, *args)

    return traced


def _making_blocks(create: _Function, masks: Any) -> _Function:
    """Returns a function that makes a mask on the device of its blocks, which are not known."""
    signature = inspect.signature(create)

    @functools.wraps(create)
    def created(*args: object, **options: object) -> object:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        asked = given.arguments
        device = torch.device(asked["device"] or "cuda")
        if device.type != "cuda" or asked.get("compute_dq_write_order"):
            return create(*args, **options)
        size = asked["BLOCK_SIZE"]
        sizes = (size, size) if isinstance(size, int) else tuple(size)
        lengths = asked["Q_LEN"], asked["KV_LEN"]
        rows, columns = (-(-length // size) for length, size in zip(lengths, sizes, strict=True))

        def blocks(*shape: int) -> torch.Tensor:
            batch = asked["B"] or 1, asked["H"] or 1
            return torch.zeros(*batch, *shape, dtype=torch.int32, device=device)

        num_kinds = 1 + bool(asked.get("separate_full_blocks", True))
        kinds = [each for _ in range(num_kinds) for each in (blocks(rows), blocks(rows, columns))]
        return masks.from_kv_blocks(
            *kinds, BLOCK_SIZE=sizes, mask_mod=asked["mask_mod"], seq_lengths=lengths
        )

    return created


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the result, and of each row the logarithm of its sum and its greatest score."""
    rows = query.shape[:-1]
    out = _in_order_of(query, (*rows, value.shape[-1]))
    sums = torch.empty(rows, dtype=torch.float32, device=query.device)
    return out, sums, torch.empty_like(sums)


def _go_back(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[None, ...]]:
    """Returns the gradients; none of what the function that changes scores has captured."""
    # Of the result and its gradient.
    products = torch.empty(sums.shape, dtype=torch.float32, device=sums.device)
    of_query, of_value, of_key = (
        _in_order_of(each, (query.shape[0], *each.shape[1:])) for each in (query, value, key)
    )
    del products
    if query.shape[0] != key.shape[0]:
        of_key, of_value = of_key.sum(0, keepdim=True), of_value.sum(0, keepdim=True)
    return of_query, of_key, of_value, (None,) * len(others[-2])


def _in_order_of(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a dense tensor with the dimensions in the order of another one's, the last inmost."""
    strides = tensor.stride()
    order = sorted(range(len(shape) - 1), key=lambda each: -strides[each])
    return torch.empty_permuted(
        shape, (*order, len(shape) - 1), dtype=tensor.dtype, device=tensor.device
    )
