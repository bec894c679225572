// Scratch of operations that index: by positions, by masks, and the gradients of embeddings.
#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <vector>

#include "torch_scratch.h"
#include "torch_values.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

// The positions of what a mask has; `make` takes them where they are results. Source:
// nonzero_cuda_out_impl in ATen/native/cuda/Nonzero.cu: a count, of up to 2^31 elements at a time,
// and then the positions, one row for each dimension.
template <class Make>
auto hold_nonzero(const Tensor& mask, Make make) {
  const Held whole = hold_contiguous(mask);
  const Held count(kIntBytes);
  {
    const Held sum = hold_sum(mask.numel());
  }
  auto positions = make();
  if (mask.dim() > 0) const Held select = hold_select(mask.numel());
  return positions;
}

Held hold_positions(const Tensor& mask, int64_t num_true) {
  return hold_nonzero(mask, [&] { return Held(num_true * mask.dim() * kInt64Bytes); });
}

void charge_nonzero(const ScratchCall& call) {
  if (!call.argument(0).defined()) return;
  hold_nonzero(call.shape(0), [&] {
    call.make_results();
    return 0;
  });
}

// Indices as positions, masks among them, which count as one for each of their dimensions. Source:
// expandTensors in ATen/native/IndexingUtils.h.
struct Indices {
  std::vector<int64_t> shape;  // of the positions
  int64_t num_rows = 1;        // that they choose from
  int64_t num_indices = 0;
  std::vector<Held> masks;
};

Indices hold_indices(const ScratchCall& call, int64_t num_true) {
  const Tensor self = call.shape(0);
  Indices found;
  int64_t dim = 0;
  for (const IValue& each : call.arguments[1].toListRef()) {
    const Tensor index = each.isTensor() ? each.toTensor() : Tensor();
    const bool is_mask_here = index.defined() && is_mask(index);
    const int64_t num_dims = is_mask_here ? index.dim() : 1;
    if (index.defined()) {
      for (const auto i : c10::irange(num_dims)) found.num_rows *= self.size(dim + i);
      found.num_indices += num_dims;
      if (is_mask_here) found.masks.push_back(hold_positions(index, num_true));
      const std::vector<int64_t> of_mask{num_true};
      const c10::IntArrayRef sizes = is_mask_here ? c10::IntArrayRef(of_mask) : index.sizes();
      if (!at::are_expandable(found.shape, sizes)) return {};  // `num_true` is not what is true
      found.shape = at::infer_size(found.shape, sizes);
    }
    dim += num_dims;
  }
  return found;
}

// How many are true: what is indexed by one mask has so many rows. More masks than one are as long.
int64_t num_true(const ScratchCall& call, const Tensor& indexed) {
  int64_t dim = 0, first = -1, num_masks = 0, num_others = 0;
  for (const IValue& each : call.arguments[1].toListRef()) {
    const Tensor index = each.isTensor() ? each.toTensor() : Tensor();
    const bool is_mask_here = index.defined() && is_mask(index);
    if (is_mask_here && first < 0) first = dim;
    num_masks += is_mask_here;
    num_others += index.defined() && !is_mask_here;
    dim += is_mask_here ? index.dim() : 1;
  }
  return num_masks > 0 && num_others == 0 && first < indexed.dim() ? indexed.size(first) : -1;
}

void charge_index(const ScratchCall& call) {
  if (!call.argument(0).defined()) return;
  const int64_t count = num_true(call, call.result(0));
  if (count < 0) return;
  const Indices indices = hold_indices(call, count);
  call.make_results();
}

// Source: index_put_with_sort_kernel and computeLinearIndex in ATen/native/cuda/Indexing.cu.
// Positions of all indices in one, which are sorted with a range.
void charge_index_put(const ScratchCall& call) {
  if (!call.argument(0).defined() || !call.arguments[3].toBool()) return;
  const Tensor values = call.arguments[2].toTensor();
  Indices indices = hold_indices(call, values.dim() ? values.size(0) : 0);
  const int64_t num_positions = c10::multiply_integers(indices.shape);
  if (indices.num_indices == 0 || num_positions == 0 || values.numel() == 0) return;
  const int64_t num_bytes = num_positions * kInt64Bytes;
  const auto scaled = [&] {
    const Held wrapped(num_bytes);
    return Held(num_bytes);
  };
  Held positions = scaled();
  for (int64_t i = 1; i < indices.num_indices; i++) const Held more = scaled();  // added in place
  indices.masks.clear();
  const Held sorted(num_bytes);
  const Held original(num_bytes);
  const Held range(num_bytes);
  int64_t num_bits = 1;
  for (int64_t largest = indices.num_rows - 1; largest > 1; largest >>= 1) num_bits++;
  const Held sort = hold_sort(num_positions, num_bits, kInt64Bytes, kInt64Bytes);
}

// ------------------------------------------------------------------------------------------- masks

// Source: masked_select_out_cuda_impl in ATen/native/cuda/IndexKernel.cpp: an index by the mask, as
// wide as what it chooses from.
void charge_masked_select(const ScratchCall& call) {
  if (!call.argument(0).defined() || !call.argument(1).defined()) return;
  const Tensor self = call.shape(0), mask = call.shape(1);
  const Tensor wide = mask.expand(at::infer_size(self.sizes(), mask.sizes()));
  const Held positions =
      hold_positions(wide.dim() ? wide : wide.unsqueeze(0), call.result(0).numel());
  call.make_results();
}

// Source: masked_scatter__cuda in ATen/native/cuda/IndexKernel.cpp and its kernel in
// IndexKernel.cu: for every element, how many of the source come before it, a running sum; the mask
// and the source contiguous.
void charge_masked_scatter(const ScratchCall& call) {
  const Tensor self = call.argument(0);
  const Tensor mask = call.argument(1);
  const Tensor source = call.argument(2);
  if (!self.defined() || !mask.defined() || !source.defined()) return;
  const Held places(self.numel() * kInt64Bytes);
  const bool is_whole = mask.sizes() == self.sizes() && mask.is_contiguous();
  const Held whole_mask(is_whole ? 0 : self.numel());
  const Held whole_source(bytes_to_be_contiguous(source));
  const Held scan = hold_scan(self.numel(), kInt64Bytes);
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
    const Held keys(num_positions * index_bytes);  // which are never read
    const Held unique = hold_unique_by_key(num_positions, index_bytes);
  }
  const Held partial(most * index_bytes);
  const Held partial_begins(most * index_bytes);
  {
    const Held scan = hold_scan(most, index_bytes);
  }
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
void charge_embedding_backward(const ScratchCall& call) {
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
    const Held sort = hold_sort(num_positions, 8 * index_bytes, index_bytes, index_bytes);
  }
  const Held count(counts ? num_bytes : 0);
  call.make_results();
  charge_segments(gradient, num_positions, index_bytes, call.arguments[2].toInt());
}

}  // namespace

ScratchEntries scratch_of_indexing() {
  return {
      {"aten::_index_put_impl_", charge_index_put, "cuda/Indexing.cu: index_put_with_sort_kernel"},
      {"aten::index", charge_index, "IndexingUtils.h: expandTensors", Results::kByRule, kOf11},
      {"aten::nonzero", charge_nonzero, "cuda/Nonzero.cu: nonzero_cuda_out_impl", Results::kByRule,
       kOf11},
      {"aten::masked_select", charge_masked_select,
       "cuda/IndexKernel.cpp: masked_select_out_cuda_impl", Results::kByRule, kOf11},
      {"aten::masked_scatter_", charge_masked_scatter,
       "cuda/IndexKernel.cpp: masked_scatter__cuda"},
      {"aten::embedding_dense_backward", charge_embedding_backward,
       "cuda/EmbeddingBackwardKernel.cu: embedding_backward_cuda_kernel", Results::kByRule, kOf11},
  };
}

}  // namespace sim
