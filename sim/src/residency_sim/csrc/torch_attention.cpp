// Scaled dot product attention that never charges an [S, S] matrix to the device where CUDA's fused
// kernels have none (torch_attention_choice.cpp says where): by torch's CPU flash kernel, and what
// that cannot do (dropout, values of another width, a gradient of the bias) by the plain formula;
// what either needs beside its results is the host's. Grouped keys and values are repeated for the
// flash kernel, which does not group. What the device is charged are the results as CUDA's kernels
// leave them, and their scratch (torch_scratch_attention.cpp).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/matmul.h>

#include <algorithm>
#include <cmath>

#include "registration.h"
#include "torch_device.h"
#include "torch_generator.h"
#include "torch_scratch.h"

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

// By the table of what CUDA's kernels take (torch_scratch.h), with what they see of a call.
void charge(const char* operation, const Inputs& in, std::initializer_list<Tensor> more = {}) {
  c10::SmallVector<c10::IValue, 6> seen{in.query, in.key, in.value, in.dropout > 0.0};
  for (const Tensor& tensor : more) seen.emplace_back(tensor);
  charge_scratch(operation, seen);
}

// ------------------------------------------------------------------------------- the flash kernel

// `found`: the output and, where they are asked for, the sums.
void attend_by_flash(const Inputs& in, const std::vector<Tensor>& found) {
  const int64_t num_heads = in.query.size(1);
  auto [output, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      in.query, repeat_groups(in.key, num_heads), repeat_groups(in.value, num_heads), in.dropout,
      in.is_causal, in.bias, in.scale);
  found[0].copy_(output);
  if (found.size() > 1) found[1].copy_(sums);
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

// `gradients`: those of query, key and value and, where it is asked for, of the bias.
void attend_backward(const Inputs& in, const at::Generator& generator, const Tensor& above_output,
                     const std::vector<Tensor>& gradients) {
  const int64_t num_heads = in.query.size(1);
  const double scale = in.scale.value_or(1.0 / std::sqrt(static_cast<double>(in.query.size(3))));
  const double root = std::sqrt(std::abs(scale));
  const Tensor key = repeat_groups(in_float(in.key), num_heads);
  const Tensor value = repeat_groups(in_float(in.value), num_heads);
  const Tensor above = in_float(above_output);
  auto [weights, kept] = weights_of(in, generator);
  const Tensor dropped = kept.defined() ? weights * kept : weights;
  gradients[2].copy_(sum_groups(at::matmul(dropped.transpose(-2, -1), above), in.value));
  Tensor inner = at::matmul(above, value.transpose(-2, -1));
  if (kept.defined()) inner = inner * kept;
  inner = at::_softmax_backward_data(inner, weights, -1, weights.scalar_type());
  if (gradients.size() > 3) gradients[3].copy_(inner);
  const double query_root = scale < 0 ? -root : root;  // as torch splits the scale between the two
  const Tensor scaled_query = in_float(in.query) * query_root;
  gradients[0].copy_(at::matmul(inner, key * root) * query_root);
  const Tensor transposed = at::matmul(scaled_query.transpose(-2, -1), inner) * root;
  gradients[1].copy_(sum_groups(transposed.transpose(-2, -1), in.key));
}

// -------------------------------------------------------------------------------------- launching

// What a kernel draws with where it drops, for its backward pass. CUDA's flash kernel keeps both
// numbers in one tensor of the device; the other one has a tensor for each, on the host, or on the
// device in a capture, where each replay draws anew.
struct State {
  Tensor seed, offset;

  bool is_on_device() const { return is_sim(seed); }
  State in(Aliases& aliases) const {
    return is_on_device() ? State{aliases.of(seed), aliases.of(offset)} : *this;
  }
  void keep(Draw draw) const {
    static_cast<uint64_t*>(seed.mutable_data_ptr())[0] = draw.seed;
    *place_of_offset() = draw.offset;
  }
  Draw kept() const {
    return {static_cast<const uint64_t*>(seed.const_data_ptr())[0], *place_of_offset()};
  }

 private:
  uint64_t* place_of_offset() const {
    const Tensor& tensor = seed.numel() > 1 ? seed : offset;
    return static_cast<uint64_t*>(tensor.mutable_data_ptr()) + tensor.numel() - 1;
  }
};

// A formula that runs on the tensors' bytes as one kernel, whose scratch is the host's.
struct Kernel {
  const char* name;
  Inputs in;
  State state;
  int64_t num_steps;         // of the generator, by a forward pass; a backward pass draws again
  std::vector<Tensor> read;  // beside the inputs
  std::vector<Tensor> written;

  bool is_forward() const { return written.size() < 3; }
  bool keeps_on_device() const { return in.dropout > 0.0 && state.is_on_device(); }
};

Launch launch_of(const Kernel& kernel) {
  Machine& machine = Machine::get();
  Launch launch{kernel.name, {}};
  const Inputs& in = kernel.in;
  std::vector<Tensor> read{in.query, in.key, in.value};
  if (in.bias) read.push_back(*in.bias);
  read.insert(read.end(), kernel.read.begin(), kernel.read.end());
  std::vector<Tensor> written = kernel.written;
  if (kernel.keeps_on_device()) (kernel.is_forward() ? written : read).push_back(kernel.state.seed);
  for (const bool writes : {false, true}) {
    for (const Tensor& tensor : writes ? written : read) {
      if (machine.checks_races()) add_accesses(launch.accesses, tensor, writes);
      launch.num_bytes += static_cast<double>(tensor.nbytes());
    }
  }
  const double num_products = kernel.is_forward() ? 2 : 5;
  launch.num_operations = num_products * 2.0 * static_cast<double>(in.query.numel()) *
                          static_cast<double>(in.key.size(2));
  return launch;
}

// Gives a kernel its bytes and, where it drops, the generator of its numbers.
template <class Formula>
void launch(const Kernel& kernel, Formula formula) {
  Machine& machine = Machine::get();
  if (machine.settings().dry) return machine.observe(launch_of(kernel));
  Aliases aliases(false);
  std::vector<Tensor> targets;
  for (const Tensor& tensor : kernel.written) targets.push_back(aliases.of(tensor));
  std::vector<Tensor> sources;
  for (const Tensor& tensor : kernel.read) sources.push_back(aliases.of(tensor));
  Inputs local = kernel.in;
  local.query = aliases.of(local.query);
  local.key = aliases.of(local.key);
  local.value = aliases.of(local.value);
  if (local.bias) local.bias = aliases.of(*local.bias);
  const State state = kernel.in.dropout > 0.0 ? kernel.state.in(aliases) : State();
  const bool is_late = kernel.keeps_on_device();  // else the host's tensors say it at the launch
  const bool keeps = kernel.num_steps > 0, has_kept = kernel.in.dropout > 0.0 && !keeps;
  auto issue = [=, num_steps = kernel.num_steps] {
    Draw draw = keeps ? reserve_steps(default_generator(), num_steps) : Draw{};
    if (keeps && !is_late) state.keep(draw);
    if (has_kept && !is_late) draw = state.kept();
    return [=] {
      if (keeps && is_late) state.keep(draw);
      const at::Generator numbers = numbers_at(has_kept && is_late ? state.kept() : draw);
      as_device_work([&] { formula(local, numbers, sources, targets); });
    };
  };
  if (machine.is_capturing()) return machine.capture_issue(launch_of(kernel), std::move(issue));
  machine.launch(launch_of(kernel), issue());
}

// How far kernels move the generator: a number for each weight, or for each lane of a warp. Source:
// _efficient_attention_forward and _cudnn_attention_forward in attention.cu; mha_fwd in
// flash_api.cpp.
int64_t steps_by_weight(const Inputs& in) {
  return in.query.numel() / in.query.size(3) * in.key.size(2);
}
int64_t steps_by_lane(const Inputs& in) { return in.query.size(0) * in.query.size(1) * 32; }

// The CPU's kernel, or the plain formula.
void launch_forward(const Inputs& in, const State& state, const Tensor& output, const Tensor& sums,
                    int64_t (*steps_of)(const Inputs& in)) {
  if (!has_flash_kernel(in.query, in.key, in.value, in.bias, in.dropout)) {
    const int64_t num_steps = in.dropout > 0.0 ? steps_of(in) : 0;
    return launch({"scaled_dot_product_attention", in, state, num_steps, {}, {output}},
                  [](const Inputs& local, const at::Generator& numbers, const auto&,
                     const auto& targets) { attend(local, numbers, targets[0]); });
  }
  std::vector<Tensor> written{output};
  if (sums.defined() && sums.numel()) written.push_back(sums.narrow(2, 0, in.query.size(2)));
  launch({"scaled_dot_product_attention", in, state, 0, {}, written},
         [](const Inputs& local, const at::Generator&, const auto&, const auto& targets) {
           attend_by_flash(local, targets);
         });
}

void launch_backward(const Inputs& in, const State& state, const Tensor& gradient,
                     const Tensor& output, const Tensor& sums,
                     const std::vector<Tensor>& gradients) {
  const char* name = "scaled_dot_product_attention_backward";
  const bool has_bias_gradient = gradients.size() > 3;
  if (has_bias_gradient || !sums.numel() ||
      !has_flash_kernel(in.query, in.key, in.value, in.bias, in.dropout)) {
    return launch(
        {name, in, state, 0, {gradient}, gradients},
        [](const Inputs& local, const at::Generator& numbers, const auto& sources,
           const auto& targets) { attend_backward(local, numbers, sources[0], targets); });
  }
  const Tensor of_queries = sums.narrow(2, 0, in.query.size(2));
  launch({name, in, state, 0, {gradient, output, of_queries}, gradients},
         [](const Inputs& local, const at::Generator&, const auto& sources, const auto& targets) {
           attend_by_flash_backward(local, sources[0], sources[1], sources[2], targets);
         });
}

// ---------------------------------------------------------------------------------- CUDA's flash

// Its results are laid out as what they are of. The state of its generator is the device's, without
// dropout, too.
using OfFlash =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

OfFlash attend_with(const Inputs& in) {
  const Tensor output = at::empty_like(in.query);
  const int64_t length = in.query.size(2);
  const Tensor sums = at::empty({in.query.size(0), in.query.size(1), length},
                                in.query.options().dtype(c10::kFloat));
  const auto of_state = in.query.options().dtype(c10::kUInt64);
  const State state{at::empty({2}, of_state), at::empty({}, of_state)};
  launch_forward(in, state, output, sums, steps_by_lane);
  charge("aten::_scaled_dot_product_flash_attention", in);
  return {output,     sums,         Tensor(),
          Tensor(),   length,       in.key.size(2),
          state.seed, state.offset, at::empty({0}, in.query.options())};
}

std::vector<Tensor> flash_gradients(const Inputs& in, const State& state, const Tensor& gradient,
                                    const Tensor& output, const Tensor& sums) {
  const std::vector<Tensor> gradients{at::empty_like(in.query), at::empty_like(in.key),
                                      at::empty_like(in.value)};
  launch_backward(in, state, gradient, output, sums, gradients);
  charge("aten::_scaled_dot_product_flash_attention_backward", in, {gradient, output});
  return gradients;
}

OfFlash flash_attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout,
                        bool is_causal, bool, std::optional<double> scale) {
  return attend_with({query, key, value, std::nullopt, dropout, is_causal, scale});
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool is_causal, const Tensor& seed, const Tensor& offset,
    std::optional<double> scale) {
  const auto found = flash_gradients({query, key, value, std::nullopt, dropout, is_causal, scale},
                                     {seed, offset}, gradient, output, sums);
  return {found[0], found[1], found[2]};
}

// What torch asks a device for whose kernels it does not know. No bias comes here: it has the other
// kernel.
OfFlash own_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                      const std::optional<Tensor>& bias, double dropout, bool is_causal, bool,
                      std::optional<double> scale) {
  return attend_with({query, key, value, bias, dropout, is_causal, scale});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> own_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, std::array<bool, 4>, const Tensor& output, const Tensor& sums,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal,
    const Tensor& seed, const Tensor& offset, std::optional<double> scale) {
  const auto mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  const auto found = flash_gradients({query, key, value, mask, dropout, is_causal, scale},
                                     {seed, offset}, gradient, output, sums);
  return {found[0], found[1], found[2], Tensor()};
}

// ------------------------------------------------------------------- CUDA's memory-efficient one

// Laid out by position.
Tensor empty_by_position(const Tensor& of, int64_t width) {
  return at::empty({of.size(0), of.size(2), of.size(1), width}, of.options()).transpose(1, 2);
}

// The backward pass wants the sums in whole blocks, and the gradient of a bias in whole lines.
// Source: _efficient_attention_forward in attention.cu, and _efficient_attention_backward in
// attention_backward.cu.
constexpr int64_t kBlock = 32, kLine = 16;

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias,
    bool with_sums, double dropout, bool is_causal, std::optional<double> scale) {
  const Inputs in{query, key, value, bias, dropout, is_causal, scale};
  const Tensor output = empty_by_position(query, value.size(3));
  const int64_t num_sums = with_sums ? to_multiple(query.size(2), kBlock) : 0;
  const Tensor sums =
      at::empty({query.size(0), query.size(1), num_sums}, query.options().dtype(c10::kFloat));
  const bool is_captured = Machine::get().is_capturing();
  const auto of_state = query.options()
                            .dtype(c10::kLong)
                            .device(is_captured ? query.device() : c10::Device(c10::kCPU));
  const State state{at::empty({}, of_state), at::empty({}, of_state)};
  launch_forward(in, state, output, sums, steps_by_weight);
  charge("aten::_scaled_dot_product_efficient_attention", in);
  return {output, sums, state.seed, state.offset};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, const Tensor& output, const Tensor& sums, const Tensor& seed,
    const Tensor& offset, double dropout, std::array<bool, 4> wanted, bool is_causal,
    std::optional<double> scale) {
  if (!gradient.defined()) return {};
  const auto mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  const Inputs in{query, key, value, mask, dropout, is_causal, scale};
  std::vector<Tensor> gradients{empty_by_position(query, query.size(3)),
                                empty_by_position(key, key.size(3)),
                                empty_by_position(value, value.size(3))};
  Tensor of_bias;
  if (wanted[3] && mask) {
    std::vector<int64_t> sizes = bias.sizes().vec();
    sizes.back() = to_multiple(sizes.back(), kLine);
    of_bias = at::empty(sizes, bias.options()).narrow(-1, 0, bias.size(-1));
    gradients.push_back(of_bias);
  }
  launch_backward(in, {seed, offset}, gradient, output, sums, gradients);
  charge("aten::_scaled_dot_product_efficient_attention_backward", in, {gradient, output});
  return {gradients[0], gradients[1], gradients[2], of_bias};
}

// ----------------------------------------------------------------------------------- cuDNN's own

// Laid out in the order of the query's dimensions. Source: alloc_with_matching_layout in MHA.cpp.
Tensor empty_as_query(const Tensor& query, int64_t width) {
  if (width == query.size(3)) return at::empty_like(query);
  std::vector<int64_t> order{0, 1, 2, 3};
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return query.stride(a) < query.stride(b); });
  std::vector<int64_t> sizes = query.sizes().vec(), strides(sizes.size());
  sizes.back() = width;
  int64_t stride = 1;
  for (const int64_t dim : order) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  return at::empty_strided(sizes, strides, query.options());
}

// Without gradients no sums are kept; the state of its generator always is, on the device.
OfFlash cudnn_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                        const std::optional<Tensor>& bias, bool with_sums, double dropout,
                        bool is_causal, bool, std::optional<double> scale) {
  const Inputs in{query, key, value, bias, dropout, is_causal, scale};
  const auto of_state = query.options().dtype(c10::kLong);
  const State state{at::empty({}, of_state), at::empty({}, of_state)};
  const Tensor output = empty_as_query(query, value.size(3));
  Tensor sums;
  if (with_sums) {
    sums = at::empty({query.size(0), query.size(1), query.size(2), 1},
                     query.options().dtype(c10::kFloat));
  }
  launch_forward(in, state, output, with_sums ? sums.squeeze(-1) : sums, steps_by_weight);
  charge("aten::_scaled_dot_product_cudnn_attention", in);
  return {output,      sums,       Tensor(),     Tensor(), query.size(2),
          key.size(2), state.seed, state.offset, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, const Tensor& sums, const Tensor& seed, const Tensor& offset,
    const Tensor& bias, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout,
    bool is_causal, std::optional<double> scale) {
  const auto mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  const Inputs in{query, key, value, mask, dropout, is_causal, scale};
  const std::vector<Tensor> gradients{at::empty_like(query), at::empty_like(key),
                                      at::empty_like(value)};
  launch_backward(in, {seed, offset}, gradient, output, sums.squeeze(-1), gradients);
  charge("aten::_scaled_dot_product_cudnn_attention_backward", in, {gradient, output});
  return {gradients[0], gradients[1], gradients[2]};
}

}  // namespace

RESIDENCY_KERNELS(aten, face().key, library) {
  library.impl("_scaled_dot_product_cudnn_attention", cudnn_attention);
  library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_attention_backward);
  library.impl("_scaled_dot_product_efficient_attention", efficient_attention);
  library.impl("_scaled_dot_product_efficient_attention_backward", efficient_attention_backward);
  library.impl("_scaled_dot_product_flash_attention", flash_attention);
  library.impl("_scaled_dot_product_flash_attention_backward", flash_attention_backward);
  library.impl("_scaled_dot_product_fused_attention_overrideable", own_attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", own_attention_backward);
}

}  // namespace sim
