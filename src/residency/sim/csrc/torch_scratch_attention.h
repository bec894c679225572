// What CUDA's fused attention keeps and takes beside its output; the kernels are the CPU's
// (torch_attention.cpp).
#pragma once

#include "torch_device.h"

namespace sim {

// query [batch, heads, length, width], key and value [batch, groups, length, width].
struct AttentionShapes {
  at::Tensor query, key, value;
  bool has_bias;
  bool drops;
};

// Whether CUDA takes its flash kernel, and not the memory-efficient one.
bool takes_flash_kernel(const AttentionShapes& of);

// Charge what the kernels hold while they run.
void charge_attention(const AttentionShapes& of, bool is_flash);
void charge_attention_backward(const AttentionShapes& of, bool is_flash, const at::Tensor& gradient,
                               const at::Tensor& output);

}  // namespace sim
