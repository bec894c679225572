// Scratch of operations that index: by positions, by masks, and the gradients of embeddings.
#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <vector>

#include "torch_scratch.h"
#include "workspaces.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

bool is_mask(const Tensor& index) {
  return index.scalar_type() == c10::kBool || index.scalar_type() == c10::kByte;
}

// Source: index_put_with_sort_kernel and makeLinearIndex in ATen/native/cuda/Indexing.cu. Positions
// of all indices in one, which are sorted with a range; those that come from masks are not known.
void charge_index_put(const ScratchRule&, const ScratchCall& call) {
  const Tensor self = call.argument(0);
  if (!self.defined() || !call.arguments[3].toBool()) return;
  std::vector<int64_t> shape;
  int64_t num_rows = 1;
  int64_t num_indices = 0;
  int64_t dim = 0;
  for (const IValue& each : call.arguments[1].toListRef()) {
    if (each.isTensor() && each.toTensor().defined()) {
      const Tensor& index = each.toTensor();
      if (is_mask(index)) return;
      shape = at::infer_size(shape, index.sizes());
      num_rows *= self.size(dim);
      num_indices++;
    }
    dim++;
  }
  if (num_indices == 0) return;
  const int64_t num_positions = c10::multiply_integers(shape);
  if (num_positions == 0 || call.arguments[2].toTensor().numel() == 0) return;
  const int64_t num_bytes = num_positions * kInt64Bytes;
  const auto scaled = [&] {
    const Held wrapped(num_bytes);
    return Held(num_bytes);
  };
  Held positions = scaled();
  for (int64_t i = 1; i < num_indices; i++) {
    const Held more = scaled();
    Held sum(num_bytes);
    positions = std::move(sum);
  }
  const Held sorted(num_bytes);
  const Held original(num_bytes);
  const Held range(num_bytes);
  int64_t num_bits = 1;
  for (int64_t largest = num_rows - 1; largest > 1; largest >>= 1) num_bits++;
  const Held sort(sort_scratch_bytes(num_positions, num_bits, kInt64Bytes, kInt64Bytes));
}

// ------------------------------------------------------------------------------------------- masks

// Source: masked_select_out_cuda_impl in ATen/native/cuda/IndexKernel.cpp: an index by the mask.
void charge_masked_select(const ScratchRule&, const ScratchCall& call) {
  const Tensor self = call.argument(0);
  const Tensor mask = call.argument(1);
  const Tensor result = call.result(0);
  if (!self.defined() || !mask.defined() || !result.defined()) return;
  const int64_t num_dims = std::max<int64_t>({1, self.dim(), mask.dim()});
  const Held positions(result.numel() * num_dims * kInt64Bytes);
}

// Source: masked_scatter__cuda in ATen/native/cuda/IndexKernel.cpp and its kernel in
// IndexKernel.cu: for every element, how many of the source come before it; the mask and the source
// contiguous.
void charge_masked_scatter(const ScratchRule&, const ScratchCall& call) {
  const Tensor self = call.argument(0);
  const Tensor mask = call.argument(1);
  const Tensor source = call.argument(2);
  if (!self.defined() || !mask.defined() || !source.defined()) return;
  const Held places(self.numel() * kInt64Bytes);
  const bool is_whole = mask.sizes() == self.sizes() && mask.is_contiguous();
  const Held whole_mask(is_whole ? 0 : self.numel());
  const Held whole_source(bytes_to_be_contiguous(source));
}

// -------------------------------------------------------------------------------------- embeddings

// Whether few blocks would add up the sums over each ten, so that these are added at once.
bool adds_at_once(int64_t most, int64_t most_partial, int64_t width) {
  constexpr int64_t kWarp = 32, kMostThreads = 1024, kBlocksOfMultiprocessor = 4, kFewTimes = 4;
  const int64_t num_threads = to_multiple(width, kWarp);
  const int64_t num_blocks = divide_up(most * num_threads, std::min(num_threads, kMostThreads));
  return num_blocks < Machine::get().settings().num_multiprocessors * kBlocksOfMultiprocessor &&
         most_partial > num_blocks * kFewTimes && !at::globalContext().deterministicAlgorithms();
}

// What embedding_backward_cuda_kernel takes (ATen/native/cuda/EmbeddingBackwardKernel.cu): the
// places where a row's positions begin, of all and of each ten, and the sums over each ten, in
// float32 at least. How many rows occur is known to the device alone: the buffers are for the most.
void charge_segments(const Tensor& gradient, int64_t num_positions, int64_t index_bytes,
                     int64_t num_rows) {
  constexpr int64_t kPositionsOfSegment = 10;
  const int64_t width = gradient.size(-1);
  const int64_t most = std::min(num_positions, num_rows);
  const int64_t most_partial = num_positions / kPositionsOfSegment + most;
  const bool is_half = c10::isReducedFloatingType(gradient.scalar_type());
  const auto sum_bytes =
      std::max<int64_t>(kFloatBytes, static_cast<int64_t>(gradient.element_size()));
  const Held begins(num_positions * index_bytes);
  const Held num_segments(kInt64Bytes);
  {
    const Held keys(num_positions * index_bytes);
  }  // of cub's unique_by_key, which are never read
  const Held partial(most * index_bytes);
  const Held partial_begins(most * index_bytes);
  const Held num_partial(kInt64Bytes);
  const Held begins_of_partial(most_partial * index_bytes);
  if (adds_at_once(most, most_partial, width)) {
    const Held rows_of_partial(most_partial * index_bytes);
    const Held sums(is_half ? num_rows * width * sum_bytes : 0);
  } else {
    const Held sums(most_partial * width * sum_bytes);
  }
}

// Source: embedding_dense_backward_cuda in ATen/native/cuda/Embedding.cu: more than some positions
// are sorted by the row that they name.
void charge_embedding_backward(const ScratchRule&, const ScratchCall& call) {
  constexpr int64_t kMostUnsorted = 3072;
  const Tensor gradient = call.argument(0);
  const Tensor indices = call.argument(1);
  if (!gradient.defined() || !indices.defined()) return;
  const int64_t num_positions = indices.numel();
  const auto index_bytes = static_cast<int64_t>(indices.element_size());
  const int64_t num_bytes = num_positions * index_bytes;
  const bool counts = call.arguments[4].toBool();
  const Held whole_indices(bytes_to_be_contiguous(indices));
  const Held whole(bytes_to_be_contiguous(gradient));
  if (num_positions <= kMostUnsorted && !counts) return;
  const Held sorted(num_bytes);
  const Held original(num_bytes);
  {
    const Held range(num_bytes);
    const Held sort(sort_scratch_bytes(num_positions, 8 * index_bytes, index_bytes, index_bytes));
  }
  const Held count(counts ? num_bytes : 0);
  charge_segments(gradient, num_positions, index_bytes, call.arguments[2].toInt());
}

}  // namespace

ChargesByName scratch_of_indexing() {
  return {
      {"aten::_index_put_impl_", charge_index_put},
      {"aten::masked_select", charge_masked_select},
      {"aten::masked_scatter_", charge_masked_scatter},
      {"aten::embedding_dense_backward", charge_embedding_backward},
  };
}

}  // namespace sim
