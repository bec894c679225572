// Scratch of normalisations, softmax among them, and of the norms of lists of tensors.
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "torch_scratch.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

// ------------------------------------------------------------------------------------- layer norms

// Source: LaunchGammaBetaBackwardCUDAKernel in ATen/native/cuda/layer_norm_kernel.cu. Only for many
// short rows the gradients of weight and bias are partial sums first, in their own type, whose sums
// replace those that were allocated.
void charge_partial_sums(const Tensor& input, c10::ArrayRef<Tensor> gradients, int64_t width) {
  constexpr int64_t kManyRows = 64 * 1024, kBlockWidth = 32, kRowsOfBlock = 32;
  constexpr int64_t kMostBlocks = 64 * 1024 / 2;
  const int64_t num_rows = input.numel() / width;
  const int64_t num_multiprocessors = Machine::get().settings().num_multiprocessors;
  if (num_rows <= kManyRows || width / kBlockWidth >= num_multiprocessors / 2) return;
  const int64_t num_blocks =
      std::min(kMostBlocks / divide_up(width, kBlockWidth), divide_up(num_rows, kRowsOfBlock));
  std::vector<Held> held;
  for (const Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    held.emplace_back(num_blocks * width * static_cast<int64_t>(gradient.element_size()));
  }
  for (const Tensor& gradient : gradients) {
    if (gradient.defined()) const Held sum(static_cast<int64_t>(gradient.nbytes()));
  }
}

void charge_layer_norm_backward(const ScratchCall& call) {
  const Tensor gradient = call.argument(0);
  const Tensor input = call.argument(1);
  if (!gradient.defined() || !input.defined()) return;
  const Held whole_gradient(bytes_to_be_contiguous(gradient));
  const Held whole_input(bytes_to_be_contiguous(input));
  int64_t width = 1;
  for (const int64_t size : call.arguments[2].toIntVector()) width *= size;
  std::vector<Tensor> gradients;
  for (const auto i : c10::irange<size_t>(1, call.results.size())) {
    gradients.push_back(call.result(i));
  }
  charge_partial_sums(input, gradients, width);
}

// ------------------------------------------------------------------------------------- batch norms

// The blocks that add up a channel over several blocks, where the channels lie last: none where one
// does. Source: flexible_launch_configs in ATen/native/cuda/Normalization.cuh.
struct Blocks {
  int64_t num_rows = 0, num_columns = 0;
};

Blocks blocks_of_channels(const Tensor& input) {
  constexpr int64_t kValuesOfThread = 16, kTile = 32, kThreads = 512, kMostRows = 128, kFewRows = 8;
  const auto power_of_2 = [](int64_t n) { return int64_t(1) << (63 - __builtin_clzll(n)); };
  const bool is_last = input.dim() > 3 && !input.is_contiguous() &&
                       input.is_contiguous(input.suggest_memory_format());
  if (!is_last || input.numel() == 0) return {};
  const int64_t num_channels = input.size(1), num_values = input.numel() / num_channels;
  const int64_t height = std::min(power_of_2(divide_up(num_values, kValuesOfThread)),
                                  kThreads / std::min(power_of_2(num_channels), kTile));
  const int64_t width = std::min(power_of_2(num_channels), kThreads / height);
  const int64_t num_rows = std::min(divide_up(num_values, height * kValuesOfThread), kMostRows);
  return num_rows < kFewRows ? Blocks{} : Blocks{num_rows, divide_up(num_channels, width)};
}

void hold_channel_sums(const Tensor& input, int64_t sums_of_channel) {
  const Blocks blocks = blocks_of_channels(input);
  const Held staged(sums_of_channel * input.size(1) * blocks.num_rows * kFloatBytes);
  const Held semaphores(blocks.num_columns * kIntBytes);
}

// (input, weight, bias, running_mean, running_var, training, ..)
void charge_batch_norm(const ScratchCall& call) {
  if (call.argument(0).defined() && call.arguments[5].toBool()) {
    hold_channel_sums(call.argument(0), 4);
  }
}

// (gradient, input, .., training, eps, output_mask): both sums of a channel stay.
void charge_batch_norm_backward(const ScratchCall& call) {
  const Tensor input = call.argument(1);
  if (!input.defined() || !call.arguments[7].toBool()) return;
  if (blocks_of_channels(input).num_rows == 0) return;
  const Held sums(input.size(1) * kFloatBytes);
  const Held products(input.size(1) * kFloatBytes);
  hold_channel_sums(input, 2);
  call.make_results();
}

// ------------------------------------------------------------------------------------- group norms

int64_t sum_bytes(const Tensor& input) {
  return c10::isReducedFloatingType(input.scalar_type())
             ? kFloatBytes
             : static_cast<int64_t>(input.element_size());
}

// A scale and a shift for each channel of each sample, unless a sample has one position.
void charge_group_norm(const ScratchCall& call) {
  const Tensor input = call.argument(0);
  const bool is_affine = call.argument(1).defined() || call.argument(2).defined();
  if (!input.defined() || call.arguments[5].toInt() == 1 || !is_affine) return;
  const int64_t num_channels = call.arguments[3].toInt() * call.arguments[4].toInt();
  const Held scales(num_channels * sum_bytes(input));
  const Held shifts(num_channels * sum_bytes(input));
}

void charge_group_norm_backward(const ScratchCall& call) {
  const Tensor input = call.argument(1);
  if (!input.defined()) return;
  const int64_t num_samples = call.arguments[5].toInt();
  const int64_t of_channels = num_samples * call.arguments[6].toInt() * sum_bytes(input);
  const int64_t of_groups = num_samples * call.arguments[8].toInt() * sum_bytes(input);
  const Held products(of_channels);
  const Held sums(of_channels);
  if (call.arguments[7].toInt() == 1 || !call.arguments[9].toBoolList()[0]) return;
  const Held of_weight(call.argument(4).defined() ? of_channels : 0);
  const Held factors(of_groups);
  const Held shifts(of_groups);
}

// ----------------------------------------------------------------------------------------- softmax

// Source: host_softmax and host_softmax_backward in ATen/native/cuda/SoftMax.cu: of what is not
// contiguous a copy, as of logits with the classes in the middle.
void charge_softmax(const ScratchCall& call) {
  const Tensor input = call.argument(0);
  const Held whole(input.defined() ? bytes_to_be_contiguous(input) : 0);
}

void charge_log_softmax_backward(const ScratchCall& call) {
  const Tensor gradient = call.argument(0);
  const Tensor output = call.argument(1);
  if (!gradient.defined() || !output.defined()) return;
  const Held whole_gradient = hold_contiguous(gradient);
  const Held whole_output = hold_contiguous(output);
}

// The gradient times the output first, in the layout that TensorIterator gives it.
void charge_softmax_backward(const ScratchCall& call) {
  if (!call.argument(0).defined() || !call.argument(1).defined()) return;
  const Tensor product = call.shape(0).mul(call.shape(1));
  const Held whole = hold(product);
  const Held whole_product = hold_contiguous(product);
  const Held whole_output = hold_contiguous(call.argument(1));
}

// ---------------------------------------------------------------------------------- norms of lists

// Whether CUDA's kernel for lists takes it (can_use_fast_route in ATen/native/ForeachUtils.h).
bool is_fast(const std::vector<Tensor>& tensors) {
  return !tensors.empty() && std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& tensor) {
    return is_sim(tensor) && tensor.scalar_type() == tensors[0].scalar_type() &&
           tensor.layout() == c10::kStrided && tensor.is_non_overlapping_and_dense();
  });
}

// Source: foreach_tensor_norm_cuda in ATen/native/cuda/ForeachReduceOp.cu: one number for each
// 65,536 elements of the largest, and that for every tensor.
void charge_list_norm(const ScratchCall& call) {
  const std::vector<Tensor> tensors = call.arguments[0].toTensorVector();
  const double order = call.arguments[1].toScalar().toDouble();
  if (!is_fast(tensors) || !c10::isFloatingType(tensors[0].scalar_type())) return;
  if (order != 1 && order != 2 && !std::isinf(order)) return;
  const IValue& dtype = call.arguments[2];
  const c10::ScalarType type =
      dtype.isNone() ? tensors[0].scalar_type() : static_cast<c10::ScalarType>(dtype.toInt());
  constexpr int64_t kChunk = 65536;
  int64_t most = 0;
  for (const Tensor& tensor : tensors) most = std::max(most, divide_up(tensor.numel(), kChunk));
  const Held chunks(static_cast<int64_t>(tensors.size()) * most *
                    (type == c10::kDouble ? kInt64Bytes : kFloatBytes));
}

}  // namespace

ScratchEntries scratch_of_norms() {
  const char* of_norms = "cuda/layer_norm_kernel.cu: LaunchGammaBetaBackwardCUDAKernel";
  const char* of_softmax = "cuda/SoftMax.cu: host_softmax";
  return {
      {"aten::native_layer_norm_backward", charge_layer_norm_backward, of_norms},
      {"aten::_fused_rms_norm_backward", charge_layer_norm_backward, of_norms},
      {"aten::native_batch_norm", charge_batch_norm,
       "cuda/Normalization.cuh: batch_norm_stats_channels_last_cuda_template", Results::kFirst,
       kOf11},
      {"aten::native_batch_norm_backward", charge_batch_norm_backward,
       "cuda/Normalization.cuh: batch_norm_backward_reduce_cuda_channels_last_template",
       Results::kByRule, kOf11},
      {"aten::native_group_norm", charge_group_norm,
       "cuda/group_norm_kernel.cu: GroupNormKernelImplInternal", Results::kFirst, kOf11},
      {"aten::native_group_norm_backward", charge_group_norm_backward,
       "cuda/group_norm_kernel.cu: GroupNormBackwardKernelImplInternal", Results::kFirst, kOf11},
      {"aten::_softmax", charge_softmax, of_softmax},
      {"aten::_log_softmax", charge_softmax, of_softmax},
      {"aten::_softmax_backward_data", charge_softmax_backward,
       "cuda/SoftMax.cu: softmax_backward_cuda_out"},
      {"aten::_log_softmax_backward_data", charge_log_softmax_backward,
       "cuda/SoftMax.cu: host_softmax_backward"},
      {"aten::_foreach_norm", charge_list_norm,
       "cuda/ForeachReduceOp.cu: foreach_tensor_norm_cuda"},
  };
}

}  // namespace sim
