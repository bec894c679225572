"""Attention's bytes on CUDA, taken and kept, written from torch's public sources alone.

Each rule names the file of pytorch/pytorch that it was read in, as of torch 2.13.0: the headers
and shape functions (``torch/_meta_registrations.py``) that its wheels bring, and the sources below
``aten/src/ATen/native``, here without that prefix. Layouts are asked of torch's meta device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

OF_PLAN = 256  # of cuDNN's
MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # the numbers of torch.nn.attention.SDPBackend

# sharedMemPerBlockOptin decides between tiles: CUDA's programming guide, table of capabilities.
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10}


@dataclass(frozen=True)
class Card:
    """A card as torch sees it: capability, and multiprocessors."""

    major: int
    minor: int
    processors: int

    @property
    def number(self) -> int:
        """Returns 89 for the capability 8.9."""
        return self.major * 10 + self.minor


CARDS = {
    "t4": Card(7, 5, 40),
    "a100-40g": Card(8, 0, 108),
    "rtx4090": Card(8, 9, 128),
    "h100-80g": Card(9, 0, 132),
}


@dataclass(frozen=True)
class Figures:
    """Requested bytes beside the inputs: held after forward, and at the peak of each pass."""

    choice: int
    held: int
    forward: int
    backward: int


def up(number: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-number // multiple) * multiple


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's own storage."""
    return tensor.untyped_storage().nbytes()


@dataclass(frozen=True)
class Call:
    """One call of ``scaled_dot_product_attention``: tensors of shapes alone, and its options."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    gradient: torch.Tensor | None = None  # that the output gets
    dropout: float = 0.0
    causal: bool = False
    gqa: bool = False
    kernels: tuple[int, ...] = (CUDNN, FLASH, EFFICIENT, MATH)  # that the program allows
    deterministic: bool = False

    @property
    def learns(self) -> bool:
        """Tells whether the call keeps anything for gradients."""
        every = (self.query, self.key, self.value, self.mask)
        return any(each is not None and each.requires_grad for each in every)


class Attention:
    """A call on a card: its kernel, and the bytes that it takes and keeps."""

    def __init__(self, call: Call, card: Card) -> None:
        self.call, self.card = call, card
        self.query, self.key, self.value, self.mask = call.query, call.key, call.value, call.mask
        inputs = (self.query, self.key, self.value)
        self.wants_statistics = any(each.requires_grad for each in inputs)
        self.is_half = self.query.dtype in (torch.float16, torch.bfloat16)

    # Which kernel: transformers/cuda/sdp_utils.cpp, transformers/sdp_utils_cpp.h --------------

    def choice(self) -> int | None:
        """Returns the kernel that torch takes, or nothing where it raises."""
        allowed = self.call.kernels
        # check_prefer_cudnn_attention: capabilities 9 and 10 with cuDNN above 9.15; the wheel of
        # torch 2.13.0 on PyPI requires nvidia-cudnn-cu13 9.20.0.48 and is built for CUDA 13.0.
        # Context.h: else cuDNN comes after math, where nothing else is allowed.
        order = [FLASH, EFFICIENT, MATH, CUDNN]
        if self.card.major in (9, 10):
            order = [CUDNN, FLASH, EFFICIENT, MATH]
        can = {
            CUDNN: self.can_cudnn,
            FLASH: self.can_flash,
            EFFICIENT: self.can_efficient,
            MATH: lambda: True,
        }
        return next((each for each in order if each in allowed and can[each]()), None)

    def is_like(self, *, groups: bool) -> bool:
        """Tells whether batches and heads are equal, or grouped as a kernel takes them."""
        # check_batch_size_and_num_heads_dense<supports_gqa>, check_grouped_query_attention
        heads, kept = self.query.shape[1], self.key.shape[1]
        if groups and self.call.gqa:
            return heads % kept == 0
        return heads == kept

    def has_unit_strides(self, *, ignores_one: bool) -> bool:
        """Tells whether last strides are 1: check_last_dim_stride_equals_1_dense."""
        ones = all(each.stride(-1) == 1 for each in (self.query, self.key, self.value))
        ones = ones or (ignores_one and self.query.shape[-1] == 1)
        return ones and (self.mask is None or self.mask.stride(-1) == 1)

    def can_flash(self) -> bool:
        """Tells whether the flash kernel can: can_use_flash_attention."""
        width, length = self.query.shape[-1], self.query.shape[-2]
        is_even = width == self.value.shape[-1] and width <= 256
        if not is_even or self.mask is not None or not self.is_half or self.card.major < 8:
            return False
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        has_small_blocks = self.card.number in (86, 89, 120, 121) and self.wants_statistics
        if has_small_blocks and (192 < width <= 224 or (width > 224 and self.call.dropout > 0)):
            return False
        if self.call.causal and length != self.key.shape[-2]:
            return False
        return self.is_like(groups=True) and self.has_unit_strides(ignores_one=True)

    def can_efficient(self) -> bool:
        """Tells whether the memory-efficient kernel can: can_use_mem_efficient_attention."""
        # No groups: mem_eff_attention/kernel_forward.h of 2.13 has one number of heads; they came
        # with pytorch/pytorch#191085.
        if self.query.dtype == torch.bfloat16 and self.card.major < 8:
            return False
        # minimum_gemm_alignment
        alignment = 4 if self.card.major >= 8 else 1
        if self.card.major >= 8 or (self.card.major == 7 and self.is_half):
            alignment = max(alignment, 8 if self.is_half else 4)
        if self.query.shape[-1] % alignment or self.value.shape[-1] % alignment:
            return False
        return self.is_like(groups=False) and self.has_unit_strides(ignores_one=False)

    def can_cudnn(self) -> bool:
        """Tells whether cuDNN can: can_use_cudnn_attention."""
        dropout = self.call.dropout
        if not self.is_half or self.card.major < 8 or self.call.deterministic:
            return False
        # check_cudnn_dropout: in sixteenths
        if dropout * 16 != math.floor(dropout * 16):
            return False
        # check_attn_mask_shape
        if self.mask is not None:
            wanted = (*self.query.shape[:3], self.key.shape[2])
            shape = self.mask.shape
            fits = all(s in (1, w) for s, w in zip(shape[::-1], wanted[::-1], strict=False))
            if self.mask.requires_grad or len(shape) not in (2, 4) or not fits:
                return False
        # check_cudnn_tensor_shapes, of 2.11 to 2.13
        widths = (self.query.shape[-1], self.value.shape[-1])
        limit = 256 if self.card.number == 90 else 128
        if self.card.major == 10 and widths == (192, 128):
            limit = 192
        if max(widths) > limit or widths[0] % 8 or widths[1] % 8:
            return False
        if self.key.shape[2] == 1 or (self.query.shape[2] == 1 and dropout):
            return False
        return self.is_like(groups=True) and self.has_unit_strides(ignores_one=True)

    # What it keeps and takes -----------------------------------------------------------------

    def figures(self) -> Figures | None:
        """Returns what the call keeps and takes; nothing where torch raises."""
        choice = self.choice()
        if choice is None:
            return None
        of = {FLASH: self.flash, EFFICIENT: self.efficient, CUDNN: self.cudnn, MATH: self.plain}
        return Figures(choice, *of[choice]())

    def converted_mask(self) -> tuple[torch.Tensor | None, int]:
        """Returns the mask that the kernel gets, and its new bytes: transformers/attention.cpp."""
        mask = self.mask
        if mask is None:
            return None, 0
        if mask.dtype == torch.bool:  # convert_boolean_attn_mask
            mask = torch.empty_like(mask, dtype=self.query.dtype)
            return mask, bytes_of(mask)
        return mask, 0

    def flash(self) -> tuple[int, int, int]:
        """Follows transformers/cuda/flash_attn/flash_api.cpp and attention_backward.cu."""
        query, key, value = (each.transpose(1, 2) for each in (self.query, self.key, self.value))
        item = query.element_size()
        padded = 0
        if query.shape[-1] % 8:  # attention.cpp: pad_last_dim<8, false>
            more = 8 - query.shape[-1] % 8
            query, key, value = (
                torch.nn.functional.pad(each.transpose(1, 2), (0, more)).transpose(1, 2)
                for each in (query, key, value)
            )
            padded = sum(bytes_of(each) for each in (query, key, value))
        batch, length, heads, width = query.shape
        keys, kept = key.shape[1], key.shape[2]
        out = torch.empty_like(query)
        statistics = batch * heads * length * 4
        state = 16 + 8
        rounded = up(width, 32 if width <= 128 else 64)
        rows, groups = length, heads
        is_swapped = length == 1 and heads > kept and not self.call.dropout
        if is_swapped:
            rows, groups = heads // kept, kept
        splits = self.splits(batch * groups, rows, keys, width)
        accumulated = 0
        if splits > 1:
            accumulated = splits * batch * groups * rows * (rounded + 1) * 4
        forward = padded + bytes_of(out) + statistics + state + accumulated
        if not self.call.learns:
            return bytes_of(out), forward, 0
        held = padded + bytes_of(out) + statistics + state
        taken = 0 if out.is_contiguous() else bytes_of(out)
        if self.call.gradient is not None and not lies_by_position(self.call.gradient):
            taken += self.call.gradient.numel() * item
        taken += sum(bytes_of(torch.empty_like(each)) for each in (query, key, value))
        rows = up(length, 128)
        taken += batch * heads * rows * 4  # softmax_d
        sums = batch * heads * rows * rounded * 4  # dq_accum
        if self.call.deterministic:
            sums *= -(-self.card.processors // (batch * heads))
        taken += sums
        if kept != heads:
            taken += 2 * batch * keys * heads * width * item  # dk_expanded, dv_expanded
        return held, forward, taken

    def splits(self, parallel: int, length: int, keys: int, width: int) -> int:
        """Follows set_params_splitkv and num_splits_heuristic."""
        if self.call.dropout:
            return 1
        block = 256 if width <= 64 else 128 if width <= 128 else 64
        blocks = -(-keys // block)
        processors = self.card.processors * 2
        parallel *= -(-length // 64)
        if parallel >= 0.8 * processors:
            return 1
        most = min(128, processors, blocks)

        def is_new(number: int) -> bool:
            return number == 1 or -(-blocks // number) != -(-blocks // (number - 1))

        waves = [parallel * each / processors for each in range(1, most + 1)]
        efficiency = [
            each / math.ceil(each) if is_new(number) else 0.0
            for number, each in enumerate(waves, 1)
        ]
        best = max(efficiency, default=0.0)
        for number, each in enumerate(efficiency, 1):
            if is_new(number) and each >= 0.85 * best:
                return number
        return 1

    def efficient(self) -> tuple[int, int, int]:
        """Follows transformers/cuda/attention.cu, attention_backward.cu and kernel_backward.h."""
        batch, heads, length, width = self.query.shape
        keys, value_width = self.key.shape[2], self.value.shape[3]
        item = self.query.element_size()
        mask, made = self.converted_mask()
        scalars = 2 * item if made else 0
        kept_mask = made
        if mask is not None and not is_aligned(mask, 8):  # preprocess_mask, pad_bias<8>
            mask = torch.nn.functional.pad(mask, (0, 8 - mask.shape[-1] % 8))
            kept_mask = bytes_of(mask)
        out = batch * length * heads * value_width * item
        statistics = batch * heads * up(length, 32) * 4 if self.wants_statistics else 0
        sums = 0
        if self.is_half and max(width, value_width) > 128:  # kNeedsOutputAccumulatorBuffer
            sums = batch * length * heads * value_width * 4
        both = made + kept_mask if kept_mask != made else made + scalars
        forward = max(both, kept_mask + out + statistics + sums)
        if not self.call.learns:
            return out, forward, 0
        held = kept_mask + out + statistics
        gradient = self.call.gradient
        taken = 0 if gradient is None or lies_by_position(gradient) else out
        taken += batch * heads * (length * width + keys * (width + value_width)) * item
        if self.mask is not None and self.mask.requires_grad:
            taken += batch * heads * length * up(keys, 16) * item
        delta, workspace = self.tiles()
        return held, forward, taken + max(delta[0], delta[1] + workspace)

    def tiles(self) -> tuple[tuple[int, int], int]:
        """Returns bytes of delta (at its peak, and kept) and of the backward's workspace."""
        batch, heads, length, width = self.query.shape
        keys, value_width = self.key.shape[2], self.value.shape[3]
        rows, columns, limit = self.tile()
        is_in_registers = self.is_half and limit <= rows  # kOutputInRF
        per_row = batch * heads * length * 4
        delta = (per_row, per_row)
        if not self.is_half:  # kKernelComputesDelta: else a product, its sums, and these by head
            copied = per_row if length > 1 and heads > 1 else 0
            delta = (batch * heads * length * value_width * 4 + per_row + copied, per_row)
        splits = -(-keys // columns)
        if batch * heads >= 256 and keys <= 2 * columns:
            splits = 1
        accumulates = self.is_half and not is_in_registers  # kNeedsAccumGradK and V
        if accumulates:
            splits = min(splits, 200 // (batch * heads))
        if splits < 1 or self.call.deterministic:
            splits = 1
        elements = -(-length // rows) * -(-width // columns) * (4 + rows * columns)
        if accumulates:
            elements += splits * columns * (up(width, rows) + up(value_width, rows))
        return delta, batch * heads * up(elements, 4) * 4

    def tile(self) -> tuple[int, int, int]:
        """Returns rows, columns and widest head of a tile: mem_eff_attention/kernels/cutlassB.h.

        The first one of the list is taken whose SharedStorage the card has: as nvcc compiles it,
        of half 54,784 bytes with 128 x 64 for capability 7.5, 60,928 for 8.0 (91,648 up to a width
        of 96), 162,304 with 128 x 128; of float32 121,344 with 128 x 64.
        """
        widest = max(self.query.shape[-1], self.value.shape[-1])
        dropout, number = bool(self.call.dropout), self.card.number
        if widest <= 64:
            return 64, 64, 32 if widest <= 32 else 64
        is_large = SHARED_BYTES[number] > (100 << 10)
        if number >= 80 and self.is_half:
            if number in (86, 89) and not dropout and widest <= 96:
                return 128, 64, 96
            if widest <= 128:
                return (128, 128, 128) if is_large else (64, 64, 128)
            return 128, 64, 65536
        if number >= 80:
            rows = 128 if is_large else 64
            return rows, 64, 128 if widest <= 128 else 65536
        rows = 128 if self.is_half else 64
        return rows, 64, 128 if widest <= 128 else 65536

    def cudnn(self) -> tuple[int, int, int]:
        """Follows transformers/cuda/attention.cu, cudnn/MHA.cpp and NVIDIA/cudnn-frontend.

        Of the workspace it has what cudnn-frontend asks for (``get_fe_workspace_size_node`` in
        ``node/scaled_dot_product_flash_attention.h``), and what cuDNN adds to that on an H100: no
        source says it, and docs/reference/temporaries.md has what was measured.
        """
        batch, heads, length, width = self.query.shape
        item = self.query.element_size()
        _mask, made = self.converted_mask()
        scalars = 2 * item if made else 0
        out = blank_out(self.query, self.value)
        statistics = batch * heads * length * 4 if self.wants_statistics else 0
        state = 8 + 8
        forward = max(made + scalars, made + bytes_of(out) + statistics + state + OF_PLAN)
        if not self.call.learns:
            return bytes_of(out), forward, 0
        held = made + bytes_of(out) + statistics + state
        gradient = self.call.gradient
        taken = bytes_of(out) if gradient is not None and gradient.stride(-1) != 1 else 0
        taken += sum(
            bytes_of(torch.empty_like(each)) for each in (self.query, self.key, self.value)
        )
        taken += batch * heads * length * (width + 1) * 4 + OF_PLAN  # dQ_accum, softmax_sum
        for each in (self.key, self.value):
            if each.shape[1] != heads:  # dK_fullhead, dV_fullhead: tensors of cuDNN's own graph
                taken += bytes_of(torch.empty_like(each)) // each.shape[1] * heads
        return held, forward, taken

    def plain(self) -> tuple[int, int, int]:
        """Returns what the scores alone take: transformers/attention.cpp, the math kernel."""
        batch, heads, length, _width = self.query.shape
        scores = batch * heads * length * self.key.shape[2] * 4
        if not self.is_half:
            scores = scores // 4 * self.query.element_size()
        return (scores if self.call.learns else 0), scores, scores


def is_aligned(mask: torch.Tensor, alignment: int) -> bool:
    """Tells whether a mask is as the memory-efficient kernel reads it: aligned_tensor."""
    return mask.stride(-1) == 1 and all(each % alignment == 0 for each in mask.stride()[:-1])


def lies_by_position(tensor: torch.Tensor) -> bool:
    """Tells whether heads of one position lie side by side, one position after the other."""
    return tensor.transpose(1, 2).is_contiguous()


def blank_out(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns an output in the query's order of dimensions: alloc_with_matching_layout."""
    shape = [*query.shape[:3], value.shape[-1]]
    if shape == list(query.shape):
        return torch.empty_like(query)
    order = sorted(range(4), key=lambda each: query.stride(each), reverse=True)
    return torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)


# Layers in inference: transformers/transformer.cpp, and native_multi_head_attention_cuda in
# transformers/cuda/attention.cu ---------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A transformer layer of torch's without gradients, on a card."""

    card: Card
    dtype: torch.dtype
    batch: int
    length: int
    heads: int
    width: int
    hidden: int
    norm_first: bool
    is_padded: bool
    weights: bool  # that attention returns

    @property
    def rows(self) -> int:
        """Returns the bytes of one value for each position."""
        return self.batch * self.length * self.dtype.itemsize

    def attention(self) -> int:
        """Returns what the attention of the layer takes at its peak, its result among it."""
        one = self.rows * self.width
        wide = (self.batch, self.length, 3, self.heads, self.width // self.heads)
        packed = torch.empty(wide, dtype=self.dtype, device="meta").unbind(2)
        call = Call(*(each.transpose(1, 2) for each in packed))
        attention = Attention(call, self.card)
        figures = attention.figures()
        assert figures is not None
        if figures.choice != MATH and not self.is_padded and not self.weights:
            return 3 * one + max(figures.forward, figures.held + one)
        scores = self.rows * self.heads * self.length
        # _masked_softmax makes a result, and the mask's truth values; _softmax_out none.
        softened = scores + self.batch * self.length if self.is_padded else 0
        averaged = scores // self.heads if self.weights else 0
        kept = scores if self.weights else 0
        return max(
            6 * one,  # qkv and what transform_bias_rescale_qkv makes of it
            3 * one + scores + softened,
            3 * one + kept + 2 * one,  # transform0213: a copy by position, and the projection
            3 * one + kept + one + averaged,
        )

    def layer(self) -> int:
        """Returns what a layer takes at its peak, its result among it."""
        one = self.rows * self.width
        normed = one + 2 * self.batch * self.length * 4  # mean and deviation
        inner = self.rows * self.hidden
        if self.norm_first:
            return max(normed, one + self.attention(), one + normed, 3 * one + inner)
        return max(self.attention(), one + normed, 2 * one + inner, 2 * one + normed)

    def mask(self) -> int:
        """Returns the bytes of the padding as a fraction: torch.nn.functional._canonical_mask."""
        return self.rows if self.is_padded else 0
