// Scratch of normalisations, softmax among them, and of the norms of lists of tensors.
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "torch_scratch.h"
#include "workspaces.h"

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

void charge_layer_norm_backward(const ScratchRule&, const ScratchCall& call) {
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

// ----------------------------------------------------------------------------------------- softmax

// Source: host_softmax and host_softmax_backward in ATen/native/cuda/SoftMax.cu: of what is not
// contiguous a copy, as of logits with the classes in the middle.
void charge_softmax(const ScratchRule&, const ScratchCall& call) {
  const Tensor input = call.argument(0);
  const Held whole(input.defined() ? bytes_to_be_contiguous(input) : 0);
}

void charge_softmax_backward(const ScratchRule&, const ScratchCall& call) {
  const Tensor gradient = call.argument(0);
  const Tensor output = call.argument(1);
  if (!gradient.defined() || !output.defined()) return;
  const Held whole_gradient(bytes_to_be_contiguous(gradient));
  const Held whole_output(bytes_to_be_contiguous(output));
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
void charge_list_norm(const ScratchRule&, const ScratchCall& call) {
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

ChargesByName scratch_of_norms() {
  return {
      {"aten::native_layer_norm_backward", charge_layer_norm_backward},
      {"aten::_fused_rms_norm_backward", charge_layer_norm_backward},
      {"aten::_softmax", charge_softmax},
      {"aten::_log_softmax", charge_softmax},
      {"aten::_softmax_backward_data", charge_softmax_backward},
      {"aten::_log_softmax_backward_data", charge_softmax_backward},
      {"aten::_foreach_norm", charge_list_norm},
  };
}

}  // namespace sim
