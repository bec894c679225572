// What operations take that bring elements into another order, as columns of images and windows,
// or leave some out.
#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <vector>

#include "torch_scratch.h"

namespace sim {
namespace {

using at::Tensor;

// CUDA's kernel makes its result as large as the columns, and resizes it.
int64_t num_columns(const ScratchCall& call) { return call.arguments[0].toTensor().numel(); }

// (gradient, sizes, dim, size, step): a range of positions, unless the windows lie apart.
void charge_unfold_backward(const ScratchCall& call) {
  const std::vector<int64_t> sizes = call.arguments[1].toIntVector();
  const int64_t size = call.arguments[3].toInt(), step = call.arguments[4].toInt();
  if (!call.argument(0).defined() || sizes.empty() || step >= size) return;
  const int64_t dim =
      c10::maybe_wrap_dim(call.arguments[2].toInt(), static_cast<int64_t>(sizes.size()));
  const int64_t num_windows = call.argument(0).size(dim);
  const Held range(std::min(sizes[dim], (num_windows - 1) * step + size) * kInt64Bytes);
}

// Dimension after dimension: roll_common in TensorTransformations.h.
void charge_roll(const ScratchCall& call) {
  std::vector<Held> steps;
  for (size_t i = 1; call.argument(0).defined() && i < call.arguments[2].toIntVector().size();
       i++) {
    steps.push_back(hold(call.result(0)));
  }
  call.make_results();
}

void charge_contiguous(const ScratchCall& call) {
  if (call.argument(0).defined()) const Held whole = hold_contiguous(call.argument(0));
}

}  // namespace

ScratchEntries scratch_of_layouts() {
  return {
      {.operation = "aten::col2im",
       .source = "cuda/Col2Im.cu: col2im_out_cuda_template",
       .num_kept = num_columns},
      {"aten::_fused_dropout", nullptr, "cuda/Dropout.cu: dropout_cuda", Results::kBackwards},
      {"aten::unfold_backward", charge_unfold_backward,
       "UnfoldBackward.h: _make_unfold_backward_iter_over_grad_out", Results::kFirst, kOf11},
      {"aten::roll", charge_roll, "TensorTransformations.h: roll_common", Results::kByRule, kOf11},
      {"aten::upsample_bicubic2d_backward", charge_contiguous,
       "cuda/UpSampleBicubic2d.cu: upsample_bicubic2d_backward_out_cuda_template", Results::kFirst,
       kOf11},
  };
}

}  // namespace sim
