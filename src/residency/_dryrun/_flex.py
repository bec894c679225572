"""FlexAttention in a dry run, where a script compiles it: the memory of the kernel that torch's
compiler writes for it, and for its masks.

Run as it is, ``flex_attention`` makes matrices of length x length, on a GPU as here, and torch
warns of it. Called by what ``torch.compile`` gave, which is how it is meant to be used, it is one
kernel that takes its results and two numbers for each row; of a mask there are the numbers of
blocks alone. A dry run compiles nothing, so these are made in place of what runs.

Source: ``torch/_inductor/kernel/flex`` of torch 2.13, whose buffers these are: `flex_attention.py`
(`_attend`, `_go_back`) and `flex_decoding.py` (`_num_splits`).
`tests/torture/test_flex.py` holds them against its own reading of these files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from residency._dryrun._captured import captured_by, with_others
from residency._dryrun._compiling import Compiling
from residency._dryrun._methods import around
from residency._memory import ImportWatch

_Function = Callable[..., object]
_SHORT = 128  # queries; fewer are split (flex_decoding.py: _use_flex_decoding)
_SORTED_BYTES = 12  # of a block, while a compiled mask is made: its order, as int64, and a copy


def fuse_attention(compiling: Compiling) -> None:
    """Replaces FlexAttention's operators and masks, once they are imported.

    Args:
        compiling: Knows whether a compiled function runs.
    """

    def watch_operators(module: ModuleType) -> None:
        # The operators have no public name, and torch no other way to a kernel of theirs.
        operators = [vars(module)[each] for each in ("flex_attention", "flex_attention_backward")]
        choices: tuple[Callable[..., _Function], ...] = (_choosing, _choosing_back)
        # As have keys of the dispatcher.
        key = torch._C.DispatchKey.CompositeExplicitAutograd
        for operator, choose in zip(operators, choices, strict=True):
            operator.py_kernels[key] = choose(operator.py_kernels[key], compiling)
            operator._dispatch_cache.clear()
        # Of the function that changes scores: a pass for each call, of which nothing comes here.
        trace = vars(module)["create_fw_bw_graph"]
        module.__dict__["create_fw_bw_graph"] = _tracing(trace, compiling)

    def watch_masks(module: ModuleType) -> None:
        names = vars(module)
        made = _making_blocks(names["create_block_mask"], names["BlockMask"], compiling)
        module.__dict__["create_block_mask"] = made

    watched = {
        "torch._higher_order_ops.flex_attention": watch_operators,
        "torch.nn.attention.flex_attention": watch_masks,
    }
    ImportWatch(watched).start()


def name_captured(compiling: Compiling) -> None:
    """Gives FlexAttention the tensors that learn, which its functions have captured, once imported.

    Args:
        compiling: Knows whether the script compiles, after which Dynamo no longer looks for them.
    """

    def watch_operators(module: ModuleType) -> None:
        kind: Any = type(vars(module)["flex_attention"])
        kind.__call__ = _naming_captured(kind.__call__, compiling)

    ImportWatch({"torch._higher_order_ops.flex_attention": watch_operators}).start()


def _choosing(plain: _Function, compiling: Compiling) -> _Function:
    signature = inspect.signature(plain)

    @around(plain)
    def kernel(*args: Any, **options: Any) -> object:
        given = signature.bind(*args, **options)
        is_fused = given.arguments["query"].is_cuda and compiling.is_inside
        return _attend(*given.args) if is_fused else plain(*args, **options)

    return kernel


def _choosing_back(plain: _Function, compiling: Compiling) -> _Function:
    """Chooses by the forward pass: a backward pass is called by autograd, not by a function."""
    signature = inspect.signature(plain)

    @around(plain)
    def kernel(*args: Any, **options: Any) -> object:
        given = signature.bind(*args, **options).args
        is_fused = any(each is _fused_graph for each in given)
        return _go_back(*given) if is_fused else plain(*args, **options)

    return kernel


def _fused_graph(*args: object) -> None:
    """Stands for the graph of a function that changes scores, in a kernel that runs none."""


def _tracing(trace: _Function, compiling: Compiling) -> _Function:
    @around(trace)
    def traced(
        score: object, examples: Sequence[torch.Tensor], *args: object, **options: object
    ) -> object:
        is_fused = examples[0].is_cuda and compiling.is_inside
        return (score, _fused_graph) if is_fused else trace(score, examples, *args, **options)

    return traced


def _naming_captured(call: _Function, compiling: Compiling) -> _Function:
    """Gives the operator what Dynamo would: the tensors of which a gradient is asked.

    Dynamo finds them in what a function that changes scores has captured, and runs no more once a
    script has compiled anything (`Compiling`).
    """
    signature = inspect.signature(call)

    @around(call)
    def called(*args: Any, **options: Any) -> object:
        bound = signature.bind(*args, **options)
        given = bound.arguments
        is_asked = "score_mod_other_buffers" not in given and torch.is_grad_enabled()
        if is_asked and compiling.is_used and given["query"].is_cuda:
            captured = captured_by(given["score_mod"], given["query"])
            if captured:
                given["score_mod"] = with_others(given["score_mod"], captured)
                given["score_mod_other_buffers"] = tuple(captured)
                given["mask_mod_other_buffers"] = ()
        return call(*bound.args, **bound.kwargs)

    return called


def _making_blocks(create: _Function, masks: Any, compiling: Compiling) -> _Function:
    """Returns a function that makes a mask on the device of its blocks, where that is compiled."""
    signature = inspect.signature(create)

    @around(create)
    def created(*args: object, **options: object) -> object:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        asked = given.arguments
        device = torch.device(asked["device"] or "cuda")
        is_compiled = compiling.is_inside or asked["_compile"]
        if device.type != "cuda" or not is_compiled or asked.get("compute_dq_write_order"):
            return create(*args, **options)
        compiling.is_used = True
        return _mask_of_blocks(masks, asked, device)

    return created


def _mask_of_blocks(masks: Any, asked: dict[str, Any], device: torch.device) -> object:
    size = asked["BLOCK_SIZE"]
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    lengths = asked["Q_LEN"], asked["KV_LEN"]
    rows, columns = (-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    batch = asked["B"] or 1, asked["H"] or 1

    def blocks(*shape: int) -> torch.Tensor:
        return torch.zeros(*batch, *shape, dtype=torch.int32, device=device)

    kinds = range(1 + bool(asked.get("separate_full_blocks", True)))
    by_row = [each for _ in kinds for each in (blocks(rows), blocks(rows, columns))]
    by_column = [each for _ in kinds for each in (blocks(columns), blocks(columns, rows))]
    # It is sorted while the results are there, the last of them in place.
    torch.empty(by_row[1].numel() * _SORTED_BYTES, dtype=torch.uint8, device=device)
    mask = masks.from_kv_blocks(
        *by_row,
        BLOCK_SIZE=sizes,
        mask_mod=asked["mask_mod"],
        seq_lengths=lengths,
        compute_q_blocks=False,
    )
    mask.q_num_blocks, mask.q_indices, *full = by_column
    mask.full_q_num_blocks, mask.full_q_indices = full or (None, None)
    return mask


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: object,
    mask: Sequence[Any],
    scale: object,
    options: dict[str, Any],
    *others: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the result, and of each row the logarithm of its sum and its greatest score."""
    rows = query.shape[:-1]
    num_splits = _num_splits(query, key, mask[3].shape[1], options)
    if num_splits:
        parts = (rows[0], num_splits, *rows[1:])
        split = _empty(query, (*parts, value.shape[-1] + 2))  # results, sums and greatest scores
    else:
        # Greatest scores are written by each call, and gone where none asks for them.
        split = _empty(query, rows)
    sums = _empty(query, rows)
    out = _in_order_of(query, (*rows, value.shape[-1]))
    del split
    # What autograd saves of them, it reads nowhere: a number for all rows takes no room.
    greatest = _empty(query, ()).expand(rows) if options["OUTPUT_MAX"] else _empty(query, (0,))
    return out, sums, greatest


def _num_splits(
    query: torch.Tensor, key: torch.Tensor, mask_heads: int, options: dict[str, Any]
) -> int:
    """Returns in how many parts of the keys the kernel for a few queries works, or 0.

    Source: ``_use_flex_decoding`` and ``get_split_k``, and the choice in ``flex_attention``.
    """
    batch, heads, length = query.shape[:3]
    kept_heads = key.shape[1]
    ratio = heads // kept_heads
    is_split = (
        options.get("BACKEND", "AUTO") in ("AUTO", "TRITON_DECODE")
        and not options.get("FORCE_USE_FLEX_ATTENTION", False)
        and not options["OUTPUT_MAX"]
        and length < _SHORT
        and (mask_heads == 1 or (heads == kept_heads and mask_heads == heads))
        and ratio & (ratio - 1) == 0
    )
    if not is_split:
        return 0
    properties = torch.get_device_module(query.device).get_device_properties(query.device)
    num_processors = properties.multi_processor_count
    asked: int = options.get("SPLIT_KV", num_processors // max(batch * kept_heads, 1) * 2)
    return max(asked, 1)


def _go_back(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    of_out: torch.Tensor | None,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Returns the gradients of the three, and of what a function that changes scores captured."""
    captured = others[-2]
    # AOTAutograd lays a gradient out as it expects it; of what was not used it makes zeros.
    is_laid_out = of_out is not None and _lies_as(of_out, out)
    laid_out = None if is_laid_out else torch.empty_like(out)
    sums_of_captured = [_empty(each, each.shape) if _learns(each) else None for each in captured]
    products = _empty(sums, sums.shape)  # of the result and its gradient
    of_query, of_value = _of_each_batch(query, query), _of_each_batch(query, value)
    # The kernel's own result, which is not made where no step reads it; the others are.
    of_key = _of_each_batch(query, key) if key.requires_grad else None
    del products, laid_out
    if query.shape[0] != key.shape[0]:
        of_key = of_key.sum(0, keepdim=True) if of_key is not None else None
        of_value = of_value.sum(0, keepdim=True)
    of_captured: list[torch.Tensor | None] = []
    for each in captured:
        of_sums = sums_of_captured.pop(0)
        of_captured.append(None if of_sums is None else of_sums.to(each.dtype))
    return of_query, of_key, of_value, tuple(of_captured)


def _learns(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _lies_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one shape have their elements in the same places."""
    pairs = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(mine == its for size, mine, its in pairs if size > 1)


def _empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns numbers that kernels keep as float32, whatever their inputs are."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _of_each_batch(query: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a gradient for each batch of the queries, which may share keys and values."""
    return _in_order_of(tensor, (query.shape[0], *tensor.shape[1:]))


def _in_order_of(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a dense tensor with the dimensions in the order of another one's, the last inmost."""
    strides = tensor.stride()
    order = sorted(range(len(shape) - 1), key=lambda each: -strides[each])
    return torch.empty_permuted(
        shape, (*order, len(shape) - 1), dtype=tensor.dtype, device=tensor.device
    )
