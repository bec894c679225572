// What CUDA's fused attention keeps and takes beside its output; the kernels are the CPU's
// (torch_attention.cpp).
#pragma once

#include "torch_device.h"

namespace sim {

// query [batch, heads, length, width], key and value [batch, groups, length, width].
struct AttentionShapes {
  at::Tensor query, key, value;
  bool drops;
};

// Charge what the kernels hold while they run, where the machine is to charge it.
void charge_flash(const AttentionShapes& of);
void charge_flash_backward(const AttentionShapes& of, const at::Tensor& gradient,
                           const at::Tensor& output);
void charge_efficient(const AttentionShapes& of);
void charge_efficient_backward(const AttentionShapes& of, const at::Tensor& gradient,
                               const at::Tensor& output);
void charge_cudnn_backward(const AttentionShapes& of, const at::Tensor& gradient);

// Whether a program wants the same bits each time, and no warning alone.
bool is_deterministic();

}  // namespace sim
