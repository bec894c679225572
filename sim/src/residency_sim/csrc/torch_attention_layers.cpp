// Torch's transformer layers where nothing is trained: one call for a layer, and one for its
// attention, which CUDA computes by operations of its own choice. Here they are the same ones, each
// charged as itself.
//
// Source: native_multi_head_attention_cuda and transform_bias_rescale_qkv_cuda in
// ATen/native/transformers/cuda/attention.cu; a layer is torch's own function on every device, in
// transformer.cpp.
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_transformer_encoder_layer_fwd_native.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/util/irange.h>

#include <cmath>

#include "registration.h"
#include "torch_attention.h"

namespace sim {
namespace {

using at::SDPBackend;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// [batch, length, heads * width] -> [batch, heads, length, width]
Tensor in_heads(const Tensor& joined, int64_t num_heads) {
  return joined.unflatten(-1, {num_heads, joined.size(-1) / num_heads}).transpose(1, 2);
}

// All three lie in one storage, as on CUDA.
std::tuple<Tensor, Tensor, Tensor> transform_bias_rescale(const Tensor& joined, const Tensor& bias,
                                                          int64_t num_heads) {
  const auto parts = joined.chunk(3, -1), biases = bias.chunk(3, -1);
  const int64_t width = parts[0].size(-1) / num_heads;
  const Tensor packed =
      at::empty({3, joined.size(0), num_heads, joined.size(1), width}, joined.options());
  for (const auto part : c10::irange<int64_t>(3)) {
    Tensor target = packed[part];
    at::add_out(target, in_heads(parts[part], num_heads),
                biases[part].unflatten(0, {num_heads, 1, width}));
  }
  packed[0].mul_(1.0 / std::sqrt(static_cast<double>(width)));
  return {packed[0], packed[1], packed[2]};
}

bool has_fused_kernel(const Tensor& query, int64_t num_heads) {
  const Tensor heads = in_heads(query, num_heads);
  const SDPBackend choice = kernel_of_attention({heads, heads, heads, std::nullopt, /*dropout=*/0.0,
                                                 /*is_causal=*/false, /*enable_gqa=*/false});
  return choice != SDPBackend::math && choice != SDPBackend::error;
}

std::tuple<Tensor, Tensor> multi_head_attention(const Tensor& query, const Tensor& key,
                                                const Tensor& value, int64_t embed_dim,
                                                int64_t num_heads, const Tensor& weight,
                                                const Tensor& bias, const Tensor& last_weight,
                                                const Tensor& last_bias, const MaybeTensor& mask,
                                                bool wants_weights, bool averages,
                                                std::optional<int64_t> mask_type) {
  const bool is_of_itself = query.is_same(key) && key.is_same(value);
  if (is_of_itself && !wants_weights && !mask && has_fused_kernel(query, num_heads)) {
    const auto parts = at::linear(query, weight, bias).chunk(3, -1);
    const Tensor output = at::scaled_dot_product_attention(in_heads(parts[0], num_heads),
                                                           in_heads(parts[1], num_heads),
                                                           in_heads(parts[2], num_heads));
    return {at::linear(output.transpose(1, 2).flatten(2), last_weight, last_bias), Tensor()};
  }
  Tensor joined = at::native::qkv_projection(query, key, value, embed_dim, weight);
  if (joined.numel() == 0) return {at::empty_like(query), Tensor()};
  auto [queries, keys, values] = transform_bias_rescale(joined, bias, num_heads);
  joined = Tensor();  // it is free from here on
  Tensor weights = at::native::bmm_nt(queries, keys);
  weights = at::native::masked_softmax(weights, mask, query, mask_type);
  const Tensor output = at::native::bmm_nn(queries, weights, values);
  if (!wants_weights) weights = Tensor();
  Tensor projected = at::native::transform0213_gemm_nt_bias(output, last_weight, last_bias, query);
  if (wants_weights && averages) weights = weights.sum(1).div_(num_heads);
  return {projected, weights};
}

// Tensors of ragged lengths have no kernels here: torch keeps to padded ones where it hears this.
bool is_left_aligned(const Tensor&, const Tensor&) { return false; }

}  // namespace

RESIDENCY_KERNELS(aten, face().key, library) {
  library.impl("_transform_bias_rescale_qkv", transform_bias_rescale);
  library.impl("_native_multi_head_attention", multi_head_attention);
  library.impl("_transformer_encoder_layer_fwd", at::native::transformer_encoder_layer_forward);
  library.impl("_nested_tensor_from_mask_left_aligned", is_left_aligned);
}

}  // namespace sim
