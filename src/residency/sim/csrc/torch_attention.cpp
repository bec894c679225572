// Scaled dot product attention that never charges an [S, S] matrix to the device where CUDA's fused
// kernels have none: by torch's CPU flash kernel, and what that cannot do (dropout, values of
// another width) by the plain formula; what either needs beside its results is the host's. Grouped
// keys and values are repeated for the flash kernel, which does not group. What the device is
// charged are the results as CUDA's kernels leave them, and their scratch
// (torch_scratch_attention.h).
#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>

#include <cmath>

#include "registration.h"
#include "torch_device.h"
#include "torch_generator.h"
#include "torch_scratch_attention.h"

namespace at::native {
namespace {

// Whether CUDA has a fused kernel for it that the program allows (torch.nn.attention.sdpa_kernel).
bool is_fused(const Tensor& query, const Tensor& key, const Tensor& value,
              const std::optional<Tensor>& mask, bool is_grouped) {
  const at::Context& context = at::globalContext();
  const bool is_allowed = context.userEnabledMemEfficientSDP() || context.userEnabledCuDNNSDP() ||
                          context.userEnabledOverrideableSDP() ||
                          (context.userEnabledFlashSDP() && !mask);
  return is_allowed && query.dim() == 4 && query.size(0) == key.size(0) &&
         (is_grouped || query.size(1) == key.size(1)) && query.size(2) > 0 && key.size(2) > 0 &&
         value.size(3) > 0 && !(mask && mask->requires_grad());
}

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double, bool, std::optional<double>,
                         bool is_grouped) {
  if (is_fused(query, key, value, mask, is_grouped)) {
    return static_cast<int64_t>(at::SDPBackend::overrideable);
  }
  const bool has_math = at::globalContext().userEnabledMathSDP();
  return static_cast<int64_t>(has_math ? at::SDPBackend::math : at::SDPBackend::error);
}

}  // namespace

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)

}  // namespace at::native

namespace sim {
namespace {

using at::Tensor;

// What torch checks before it takes the CPU's kernel, which does not look again: the numbers of one
// position lie side by side, and a mask has a shape that the kernel can spread. Groups are repeated
// for it.
bool has_flash_kernel(const Tensor& query, const Tensor& key, const Tensor& value,
                      const std::optional<Tensor>& mask, double dropout) {
  const auto is_dense = [](const Tensor& tensor) { return tensor.stride(-1) == 1; };
  const ::sdp::sdp_params asked{query,
                                key,
                                value,
                                mask,
                                dropout,
                                /*is_causal=*/false,
                                /*enable_gqa=*/true};
  return dropout == 0.0 && query.size(-1) == key.size(-1) && query.size(-1) == value.size(-1) &&
         is_dense(query) && is_dense(key) && is_dense(value) &&
         ::sdp::check_attn_mask_shape(asked, /*debug=*/false);
}

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

struct Inputs {
  Tensor query, key, value;
  std::optional<Tensor> bias;
  double dropout;
  bool is_causal;
  std::optional<double> scale;
};

AttentionShapes shapes_of(const Inputs& in) {
  return {in.query, in.key, in.value, in.bias.has_value(), in.dropout > 0.0};
}

// ------------------------------------------------------------------------------- the flash kernel

void attend_by_flash(const Inputs& in, const Tensor& output, const Tensor& log_sum_exp) {
  const int64_t num_heads = in.query.size(1);
  auto [found, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      in.query, repeat_groups(in.key, num_heads), repeat_groups(in.value, num_heads), in.dropout,
      in.is_causal, in.bias, in.scale);
  output.copy_(found);
  log_sum_exp.copy_(sums);
}

void attend_by_flash_backward(const Inputs& in, const Tensor& gradient, const Tensor& output,
                              const Tensor& log_sum_exp, const std::vector<Tensor>& gradients) {
  const int64_t num_heads = in.query.size(1);
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, in.query, repeat_groups(in.key, num_heads), repeat_groups(in.value, num_heads),
      output, log_sum_exp, in.dropout, in.is_causal, in.bias, in.scale);
  gradients[0].copy_(of_query);
  gradients[1].copy_(sum_groups(of_key, in.key));
  gradients[2].copy_(sum_groups(of_value, in.value));
}

// ------------------------------------------------------------------------------ the plain formula

// Torch's plain formula computes in fp32, and so does this, operation by operation: the CPU's bits.
Tensor in_float(const Tensor& tensor) {
  return at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}

// The weights before dropout, and what dropout multiplies them by (undefined: nothing is dropped).
std::pair<Tensor, Tensor> weights_of(const Inputs& in, const at::Generator& generator) {
  auto bias = in.bias ? std::optional<Tensor>(in_float(*in.bias)) : std::nullopt;
  Tensor weights = std::get<1>(at::_scaled_dot_product_attention_math(
      in_float(in.query), in_float(in.key), in_float(in.value), bias, 0.0, in.is_causal,
      std::nullopt, in.scale, /*enable_gqa=*/true));
  if (in.dropout == 0.0) return {weights, Tensor()};
  Tensor kept = at::empty_like(weights).bernoulli_(1.0 - in.dropout, generator);
  return {weights, kept.div_(1.0 - in.dropout)};
}

void attend(const Inputs& in, const at::Generator& generator, const Tensor& output) {
  auto [weights, kept] = weights_of(in, generator);
  if (kept.defined()) weights = weights * kept;
  output.copy_(at::matmul(weights, repeat_groups(in_float(in.value), in.query.size(1))));
}

void attend_backward(const Inputs& in, const at::Generator& generator, const Tensor& gradient,
                     const Tensor& query_gradient, const Tensor& key_gradient,
                     const Tensor& value_gradient) {
  const int64_t num_heads = in.query.size(1);
  const double scale = in.scale.value_or(1.0 / std::sqrt(static_cast<double>(in.query.size(3))));
  const double root = std::sqrt(std::abs(scale));
  const Tensor key = repeat_groups(in_float(in.key), num_heads);
  const Tensor value = repeat_groups(in_float(in.value), num_heads);
  const Tensor above = in_float(gradient);
  auto [weights, kept] = weights_of(in, generator);
  const Tensor dropped = kept.defined() ? weights * kept : weights;
  value_gradient.copy_(sum_groups(at::matmul(dropped.transpose(-2, -1), above), in.value));
  Tensor inner = at::matmul(above, value.transpose(-2, -1));
  if (kept.defined()) inner = inner * kept;
  inner = at::_softmax_backward_data(inner, weights, -1, weights.scalar_type());
  const double query_root = scale < 0 ? -root : root;  // as torch splits the scale between the two
  const Tensor scaled_query = in_float(in.query) * query_root;
  query_gradient.copy_(at::matmul(inner, key * root) * query_root);
  const Tensor transposed = at::matmul(scaled_query.transpose(-2, -1), inner) * root;
  key_gradient.copy_(sum_groups(transposed.transpose(-2, -1), in.key));
}

// Runs a formula on the tensors' bytes as one kernel, whose scratch is the host's. It gets what is
// read beside the inputs and what is written.
template <class Formula>
void launch_formula(const char* name, const Inputs& in, const std::vector<Tensor>& read_beside,
                    const std::vector<Tensor>& written, Formula formula) {
  Machine& machine = Machine::get();
  Launch launch{name, {}};
  std::vector<Tensor> read{in.query, in.key, in.value};
  if (in.bias) read.push_back(*in.bias);
  read.insert(read.end(), read_beside.begin(), read_beside.end());
  for (const bool writes : {false, true}) {
    for (const Tensor& tensor : writes ? written : read) {
      if (machine.checks_races()) add_accesses(launch.accesses, tensor, writes);
      launch.num_bytes += static_cast<double>(tensor.nbytes());
    }
  }
  const double num_products = written.size() < 3 ? 2 : 5;  // forward or backward
  launch.num_operations = num_products * 2.0 * static_cast<double>(in.query.numel()) *
                          static_cast<double>(in.key.size(2));
  if (machine.settings().dry) return machine.observe(std::move(launch));
  Aliases aliases(false);
  std::vector<Tensor> targets;
  for (const Tensor& tensor : written) targets.push_back(aliases.of(tensor));
  std::vector<Tensor> sources;
  for (const Tensor& tensor : read_beside) sources.push_back(aliases.of(tensor));
  Inputs local = in;
  local.query = aliases.of(in.query);
  local.key = aliases.of(in.key);
  local.value = aliases.of(in.value);
  if (in.bias) local.bias = aliases.of(*in.bias);
  machine.launch(std::move(launch),
                 [=] { as_device_work([&] { formula(local, sources, targets); }); });
}

// The host's, as CUDA keeps them.
Tensor as_tensor(Draw draw) {
  Tensor tensor = at::empty({2}, at::kLong);
  tensor.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(draw.seed);
  tensor.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(draw.offset);
  return tensor;
}

Draw as_draw(const Tensor& tensor) {
  const auto* numbers = tensor.const_data_ptr<int64_t>();
  return {static_cast<uint64_t>(numbers[0]), static_cast<uint64_t>(numbers[1])};
}

// ------------------------------------------------------------------------------------ for torch

// Laid out as CUDA's kernels do: flash as the query is, the other one by position.
Tensor empty_output(const Inputs& in, bool is_flash) {
  if (is_flash) return at::empty_like(in.query);
  const int64_t batch = in.query.size(0), num_heads = in.query.size(1), length = in.query.size(2);
  return at::empty({batch, length, num_heads, in.value.size(3)}, in.query.options())
      .transpose(1, 2);
}

Tensor empty_gradient(const Tensor& of, bool is_flash) {
  if (is_flash) return at::empty_like(of);
  return at::empty({of.size(0), of.size(2), of.size(1), of.size(3)}, of.options()).transpose(1, 2);
}

// Of each query; the memory-efficient kernel pads them to whole blocks for its backward pass.
Tensor empty_sums(const Inputs& in, bool is_flash) {
  constexpr int64_t kBlock = 32;
  const int64_t length = in.query.size(2);
  const int64_t padded = is_flash ? length : (length + kBlock - 1) / kBlock * kBlock;
  const auto options = in.query.options().dtype(at::toOpMathType(in.query.scalar_type()));
  return at::empty({in.query.size(0), in.query.size(1), padded}, options).narrow(2, 0, length);
}

// CUDA's flash kernel keeps the state of its generator on the device, the other one on the host;
// both do so without dropout, too.
std::pair<Tensor, Tensor> empty_state(const Inputs& in, bool is_flash) {
  const auto on_device = in.query.options().dtype(at::kLong);
  if (is_flash) return {at::empty({2}, on_device), at::empty({}, on_device)};
  return {at::empty({}, at::kLong), at::empty({}, at::kLong)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attention(const Tensor& query, const Tensor& key, const Tensor& value,
          const std::optional<Tensor>& bias, double dropout, bool is_causal, bool,
          std::optional<double> scale) {
  const Inputs in{query, key, value, bias, dropout, is_causal, scale};
  const AttentionShapes shapes = shapes_of(in);
  const bool is_flash = takes_flash_kernel(shapes);
  const Tensor output = empty_output(in, is_flash);
  const Tensor sums = empty_sums(in, is_flash);
  const auto [seed, offset] = empty_state(in, is_flash);
  Tensor numbers;  // backward draws them again; in a place that is free where nothing is nested
  if (has_flash_kernel(query, key, value, bias, dropout)) {
    launch_formula("scaled_dot_product_attention", in, {}, {output, sums},
                   [](const Inputs& local, const auto&, const auto& targets) {
                     attend_by_flash(local, targets[0], targets[1]);
                   });
  } else {
    const bool drops = dropout > 0.0;
    const int64_t num_drawn = drops ? query.numel() / query.size(3) * key.size(2) : 0;
    const Draw draw = drops ? reserve(default_generator(), num_drawn) : Draw{};
    const at::Generator generator = numbers_at(draw);
    if (drops) numbers = as_tensor(draw);
    launch_formula("scaled_dot_product_attention", in, {}, {output},
                   [=](const Inputs& local, const auto&, const auto& targets) {
                     attend(local, generator, targets[0]);
                   });
  }
  charge_attention(shapes, is_flash);
  return {output, sums, numbers, Tensor(), query.size(2), key.size(2), seed, offset, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, std::array<bool, 4>, const Tensor& output, const Tensor& log_sum_exp,
    const Tensor& numbers, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal,
    const Tensor& seed, const Tensor&, std::optional<double> scale) {
  auto mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  const Inputs in{query, key, value, mask, dropout, is_causal, scale};
  const AttentionShapes shapes = shapes_of(in);
  const bool is_flash = is_sim(seed);  // what sdpa_kernel allowed in the forward pass may be over
  const std::vector<Tensor> gradients{empty_gradient(query, is_flash),
                                      empty_gradient(key, is_flash),
                                      empty_gradient(value, is_flash)};
  if (has_flash_kernel(query, key, value, mask, dropout)) {
    launch_formula("scaled_dot_product_attention_backward", in, {gradient, output, log_sum_exp},
                   gradients, [](const Inputs& local, const auto& sources, const auto& targets) {
                     attend_by_flash_backward(local, sources[0], sources[1], sources[2], targets);
                   });
  } else {
    const at::Generator generator = numbers_at(dropout > 0.0 ? as_draw(numbers) : Draw{});
    launch_formula("scaled_dot_product_attention_backward", in, {gradient}, gradients,
                   [=](const Inputs& local, const auto& sources, const auto& targets) {
                     attend_backward(local, generator, sources[0], targets[0], targets[1],
                                     targets[2]);
                   });
  }
  charge_attention_backward(shapes, is_flash, gradient, output);
  return {gradients[0], gradients[1], gradients[2], Tensor()};
}

}  // namespace

RESIDENCY_KERNELS(aten, face().key, library) {
  if (face().is_cuda) {
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&at::native::choose_attention);
    library.impl("_fused_sdp_choice", at::native::choose_attention);
  }
  library.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
}

}  // namespace sim
