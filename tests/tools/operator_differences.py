"""Where an operator on the simulated accelerator is not the host's, bit for bit, and why.

One table: an entry that no longer holds fails the tests, as does a difference that is not here.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Difference(NamedTuple):
    """Which runs differ, and how."""

    mode: str  # "real", "dry", or "bytes": what dry mode counts beside real mode
    kind: str
    names: str  # a regular expression of whole names
    status: str  # the worst that is expected
    reason: str
    variants: str = ".*"
    dtypes: str = ".*"
    is_steady: bool = True  # or the host's result is not defined, and any status may come

    def allows(self, status: str) -> bool:
        return status == self.status or not self.is_steady

    def holds_for(self, key: tuple[str, str, str, str, str]) -> bool:
        mode, kind, name, dtype, variant = key
        patterns = ((self.names, name), (self.dtypes, dtype), (self.variants, variant))
        return (mode, kind) == (self.mode, self.kind) and all(
            re.fullmatch(pattern, text) for pattern, text in patterns
        )


_CELLS = "CUDA's fused cell has no kernel on the host: it is made of plain operations"
_UPPER_BOUND = "rows depend on the data: dry mode takes the upper bound (docs, Dry mode)"
_ATTENTION = "float32 attention takes the memory-efficient kernel, which rounds in another order"
_BUFFER = "CUDA and dry mode keep nothing in log_sigmoid's buffer, which the CPU's kernel fills"
_STRIDES = "the strides of CUDA's kernel, which torch's meta kernel gives; the CPU's are others"

DIFFERENCES = [
    Difference("real", "module", r"nn\.(LSTM|GRU|RNN)(Cell)?", "close", _CELLS),
    Difference(
        "real",
        "module",
        r"nn\.Transformer(Encoder|DecoderLayer)?",
        "close",
        _ATTENTION,
        dtypes="float32",
    ),
    Difference(
        "real",
        "module",
        r"nn\.TransformerEncoderLayer",
        "different",
        f"{_ATTENTION}; the gradient of a sum behind a norm is nothing but rounding",
        dtypes="float32",
    ),
    Difference(
        "real",
        "module",
        r"nn\.Lazy.*",
        "different",
        "parameters are drawn on the device, whose random numbers are its own, as CUDA's are",
    ),
    Difference(
        "real",
        "operator",
        r"__rmatmul__|addmm(_decomposed)?|addmv|baddbmm|bmm|dot|einsum|inner|linalg_multi_dot"
        r"|matmul|mm|mv|nn_functional_(bilinear|linear)|tensordot|vdot",
        "error",
        "products of whole numbers are refused, as on CUDA",
        dtypes="int64",
    ),
    Difference(
        "real",
        "operator",
        "nn_functional_scaled_dot_product_attention",
        "different",
        "the strides of outputs and gradients are those of CUDA's fused kernels, not the host's",
        "contiguous|side_stream|channels_last|strided|transposed",
    ),
    Difference(
        "real",
        "operator",
        "nn_functional_rms_norm",
        "close",
        "CUDA's own kernel has a formula for its second derivatives, the host plain operations",
        "forward_mode|double_backward",
    ),
    Difference(
        "real",
        "optimizer",
        "SGD",
        "different",
        "the host's kernel leaves the last element of an odd number as the memory had it",
        "fused",
        "bfloat16",
        is_steady=False,
    ),
    Difference(
        "real",
        "operator",
        "tensor_split",
        "error",
        "indices on the device are refused, as on CUDA",
    ),
    Difference(
        "dry", "operator", "tensor_split", "error", "indices on the device are refused, as on CUDA"
    ),
    Difference(
        "real",
        "operator",
        "native_batch_norm|native_layer_norm",
        "different",
        "statistics of bfloat16 inputs are float32, as on CUDA",
        dtypes="bfloat16",
    ),
    Difference(
        "real",
        "operator",
        "nn_functional_pixel_shuffle",
        "different",
        "CUDA has no kernel of its own, as the host has: strides as composed",
        "channels_last",
    ),
    Difference(
        "real",
        "operator",
        "nn_functional_linear_cross_entropy_chunked(_none)?",
        "close",
        "by default torch adds the parts up in another dtype on a CPU than on other devices",
        dtypes="bfloat16",
    ),
    # Dry mode.
    Difference(
        "bytes",
        "operator",
        "argwhere|combinations|masked_scatter|masked_select|nn_functional_ctc_loss"
        "|nonzero|nonzero_static",
        "different",
        _UPPER_BOUND,
    ),
    Difference(
        "bytes",
        "operator",
        "nn_functional_embedding_bag",
        "different",
        "CUDA and dry mode keep one block of 512 bytes less",
    ),
    *(
        Difference("bytes", kind, names, "different", _BUFFER)
        for kind, names in (
            ("module", r"nn\.(LogSigmoid|MultiLabelSoftMarginLoss)"),
            ("operator", "nn_functional_(logsigmoid|multilabel_soft_margin_loss)"),
        )
    ),
    Difference(
        "bytes",
        "optimizer",
        "LBFGS",
        "different",
        "how many of its directions it keeps goes by values, of which dry mode has none",
    ),
    Difference(
        "bytes", "operator", "linalg_eig|nn_functional_max_unpool2d(_grad)?", "different", _STRIDES
    ),
]
