// Which of CUDA's kernels `scaled_dot_product_attention` takes. Torch asks the device, and what it
// does around the kernel follows from the answer: heads and masks that it pads, operators that
// DTensor knows how to shard and whose results activation checkpointing can keep.
//
// Source: check_prefer_cudnn_attention, can_use_cudnn_attention, can_use_flash_attention,
// can_use_mem_efficient_attention and select_sdp_backend in
// ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13.
#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <c10/util/env.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "registration.h"
#include "torch_attention.h"
#include "torch_device.h"
#include "torch_scratch_attention.h"
#include "torch_versions.h"

namespace sim {
namespace {

using at::SDPBackend;
using at::Tensor;
using Asked = ::sdp::sdp_params;

bool is_half(const Asked& asked) { return c10::isReducedFloatingType(asked.query.scalar_type()); }

bool has_one_type(const Asked& asked) {
  return asked.query.scalar_type() == asked.key.scalar_type() &&
         asked.query.scalar_type() == asked.value.scalar_type();
}

int64_t capability() { return Machine::get().settings().capability; }

// Heads that the flash kernel has no backward pass for on the cards with small blocks.
bool has_flash_backward(const Asked& asked) {
  constexpr int64_t kWidest = 192, kWideAgain = 224;
  const bool has_small_blocks =
      (capability() >= 86 && capability() <= 89) || (capability() >= 120 && capability() <= 121);
  if (!has_small_blocks || !::sdp::input_requires_grad(asked)) return true;
  const int64_t width = asked.query.size(-1);
  return width <= kWidest || (asked.dropout == 0.0 && width > kWideAgain);
}

bool can_use_flash(const Asked& asked) {
  constexpr int64_t kWidest = 256, kLeastCapability = 80;
  const int64_t width = asked.query.size(-1);
  const bool is_square = asked.query.size(-2) == asked.key.size(-2);
  return ::sdp::check_runtime_disabled_flash(asked, false) &&
         ::sdp::check_for_attn_mask(asked, false) && capability() >= kLeastCapability &&
         is_half(asked) && has_one_type(asked) && width <= kWidest && asked.key.size(-1) == width &&
         asked.value.size(-1) == width && (!asked.is_causal || is_square) &&
         has_flash_backward(asked) &&
         ::sdp::check_batch_size_and_num_heads_dense</*supports_gqa=*/true>(asked, false) &&
         ::sdp::check_nonzero_sequence_lengths_dense(asked, false) &&
         ::sdp::check_last_dim_stride_equals_1_dense</*ignore_singleton_dim=*/true>(asked, false);
}

// The widths that its matrix products can read at once.
int64_t alignment_of_efficient(const Asked& asked) {
  if (capability() >= 80) return is_half(asked) ? 8 : 4;
  return capability() >= 70 && is_half(asked) ? 8 : 1;
}

bool can_use_efficient(const Asked& asked) {
  const auto type = asked.query.scalar_type();
  const bool has_type =
      type == c10::kFloat || type == c10::kHalf || (type == c10::kBFloat16 && capability() >= 80);
  const int64_t width = asked.query.size(-1), value_width = asked.value.size(-1);
  const int64_t alignment = alignment_of_efficient(asked);
  return ::sdp::check_runtime_disabled_mem_efficient(asked, false) && has_type &&
         has_one_type(asked) && width == asked.key.size(-1) && width > 0 && value_width > 0 &&
         width % alignment == 0 && value_width % alignment == 0 &&
         ::sdp::check_nonzero_sequence_lengths_dense(asked, false) &&
         ::sdp::check_last_dim_stride_equals_1_dense</*ignore_singleton_dim=*/false>(asked,
                                                                                     false) &&
         // Grouped heads, which it gets in torch 2.14.
         ::sdp::check_batch_size_and_num_heads_dense</*supports_gqa=*/false>(asked, false);
}

// cuDNN's, as of 9.20, which the wheels of torch 2.13 for CUDA 13 bring: heads up to 256 wide on
// Hopper alone, and dropout in sixteenths (torch_versions.h).
bool can_use_cudnn(const Asked& asked) {
  constexpr int64_t kLeastCapability = 80, kHopper = 90, kWidest = 128, kWidestOfHopper = 256;
  constexpr double kDropoutSteps = 16.0;
  const int64_t width = asked.query.size(-1), value_width = asked.value.size(-1);
  const int64_t widest = capability() == kHopper ? kWidestOfHopper : kWidest;
  const bool is_deepseek = capability() / 10 == 10 && width == 192 && value_width == 128;
  const double dropout_steps = asked.dropout * kDropoutSteps;
  return at::globalContext().userEnabledCuDNNSDP() && capability() >= kLeastCapability &&
         is_half(asked) && has_one_type(asked) && !is_deterministic() &&
         (!drops_in_sixteenths() || dropout_steps == std::floor(dropout_steps)) &&
         (is_deepseek || std::max(width, value_width) <= widest) && width % 8 == 0 &&
         value_width % 8 == 0 && asked.key.size(2) != 1 &&
         (asked.dropout == 0.0 || asked.query.size(2) != 1) &&
         ::sdp::check_attn_mask_shape(asked, false) &&
         ::sdp::check_batch_size_and_num_heads_dense</*supports_gqa=*/true,
                                                     /*requires_same_num_heads=*/false>(asked,
                                                                                        false) &&
         ::sdp::check_nonzero_sequence_lengths_dense(asked, false) &&
         ::sdp::check_last_dim_stride_equals_1_dense</*ignore_singleton_dim=*/true>(asked, false);
}

// Torch puts cuDNN first on these cards, when it first chooses, unless a program has set an order.
bool prefers_cudnn() {
  static const bool is_declined = c10::utils::check_env("TORCH_CUDNN_SDPA_DEPRIORITIZED") == true;
  return !is_declined && (capability() / 10 == 9 || capability() / 10 == 10);
}

using Order = std::array<SDPBackend, at::num_sdp_backends>;

Order order_of_kernels() {
  const Order set = at::globalContext().sDPPriorityOrder();
  constexpr Order unset{SDPBackend::flash_attention, SDPBackend::efficient_attention,
                        SDPBackend::math, SDPBackend::cudnn_attention, SDPBackend::overrideable};
  if (set != unset || !prefers_cudnn()) return set;
  return {SDPBackend::cudnn_attention, SDPBackend::flash_attention, SDPBackend::efficient_attention,
          SDPBackend::math, SDPBackend::overrideable};
}

bool can_use(SDPBackend backend, const Asked& asked) {
  const bool is_fusable = ::sdp::check_tensor_shapes(asked, false) && !asked.query.is_nested() &&
                          !asked.key.is_nested() && !asked.value.is_nested();
  switch (backend) {
    case SDPBackend::flash_attention:
      return is_fusable && can_use_flash(asked);
    case SDPBackend::efficient_attention:
      return is_fusable && can_use_efficient(asked);
    case SDPBackend::cudnn_attention:
      return is_fusable && can_use_cudnn(asked);
    case SDPBackend::math:
      return at::globalContext().userEnabledMathSDP();
    default:
      return false;
  }
}

}  // namespace

SDPBackend kernel_of_attention(const Asked& asked) {
  for (const SDPBackend backend : order_of_kernels()) {
    if (!can_use(backend, asked)) continue;
    // Torch knows the flash kernel of CUDA and that of the host, and asks another device for its
    // own.
    const bool is_own = backend == SDPBackend::flash_attention && !face().is_cuda;
    return is_own ? SDPBackend::overrideable : backend;
  }
  return SDPBackend::error;
}

namespace {

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double>, bool is_grouped) {
  return static_cast<int64_t>(
      kernel_of_attention({query, key, value, mask, dropout, is_causal, is_grouped}));
}

}  // namespace
}  // namespace sim

namespace at::native {
namespace {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)

}  // namespace
}  // namespace at::native

namespace sim {

RESIDENCY_KERNELS(aten, face().key, library) {
  if (!face().is_cuda) return;
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  library.impl("_fused_sdp_choice", choose_attention);
}

}  // namespace sim
