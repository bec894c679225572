// Scaled dot product attention by torch's CPU flash kernel, so that no [S, S] matrix is ever
// charged to the device, as on CUDA. Grouped keys and values are repeated for the kernel, which
// does not group.
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>

#include "registration.h"

namespace at::native {
namespace {

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double dropout, bool,
                         std::optional<double>, bool is_grouped) {
  const bool is_flash = dropout == 0.0 && query.dim() == 4 && query.size(-1) == value.size(-1) &&
                        (is_grouped || query.size(1) == key.size(1)) &&
                        !(mask && mask->requires_grad());
  return static_cast<int64_t>(is_flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

}  // namespace

#if !defined(RESIDENCY_SIM_CUDA)
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
#endif

}  // namespace at::native

namespace {

using at::Tensor;

// [batch, groups, length, width] -> [batch, heads, length, width]
Tensor repeat_groups(const Tensor& grouped, int64_t num_heads) {
  if (grouped.size(1) == num_heads) return grouped;
  return grouped.repeat_interleave(num_heads / grouped.size(1), 1);
}

Tensor sum_groups(const Tensor& gradient, const Tensor& grouped) {
  if (gradient.size(1) == grouped.size(1)) return gradient;
  const int64_t per_group = gradient.size(1) / grouped.size(1);
  return gradient.unflatten(1, {grouped.size(1), per_group}).sum(2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attention(const Tensor& query, const Tensor& key, const Tensor& value,
          const std::optional<Tensor>& bias, double dropout, bool is_causal, bool,
          std::optional<double> scale) {
  const int64_t num_heads = query.size(1);
  auto [output, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, repeat_groups(key, num_heads), repeat_groups(value, num_heads), dropout, is_causal,
      bias, scale);
  Tensor unused =
      at::empty({}, query.options().dtype(at::kLong));  // the seed and offset of dropout
  return {output,      log_sum_exp, Tensor(), Tensor(), query.size(2),
          key.size(2), unused,      unused,   Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, std::array<bool, 4>, const Tensor& output, const Tensor& log_sum_exp,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal,
    const Tensor&, const Tensor&, std::optional<double> scale) {
  const int64_t num_heads = query.size(1);
  auto mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  auto [query_gradient, key_gradient, value_gradient] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          gradient, query, repeat_groups(key, num_heads), repeat_groups(value, num_heads), output,
          log_sum_exp, dropout, is_causal, mask, scale);
  return {query_gradient, sum_groups(key_gradient, key), sum_groups(value_gradient, value),
          Tensor()};
}

}  // namespace

RESIDENCY_KERNELS(aten, RESIDENCY_SIM_KEY, library) {
#if defined(RESIDENCY_SIM_CUDA)
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&at::native::choose_attention);
  library.impl("_fused_sdp_choice", at::native::choose_attention);
#endif
  library.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
}
