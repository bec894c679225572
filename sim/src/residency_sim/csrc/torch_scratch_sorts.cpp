// Scratch of operations that sort, by cub, with copies of what does not lie as it wants it, and of
// draws.
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>

#include "torch_scratch.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

// ------------------------------------------------------------------------------------------- sort

// Source: ATen/native/cuda/SortStable.cu: rows one after the other, all at once with their number
// in the value, or as cub's segments. `num_keys` is of all rows.
void charge_stable_sort(int64_t num_keys, int64_t num_in_row, int64_t key_bytes) {
  constexpr int64_t kManyInRow = 1000000, kManyRows = 128;
  const int64_t num_rows = num_keys / num_in_row;
  if (num_rows == 1 || num_in_row >= kManyInRow) {
    const Held range(num_in_row * kInt64Bytes);
    const Held sort = hold_sort(num_in_row, 8 * key_bytes, key_bytes, kInt64Bytes);
  } else if (num_rows < kManyRows) {
    const auto row_bits = static_cast<int64_t>(std::ceil(std::log2(num_rows)));
    const Held places(num_keys * kInt64Bytes);
    const Held sorted_places(num_keys * kInt64Bytes);
    {
      const Held sorted(num_keys * key_bytes);
      const Held sort = hold_sort(num_keys, 8 * key_bytes, key_bytes, kInt64Bytes);
    }
    const Held sort = hold_sort(num_keys, row_bits, kInt64Bytes, 0);
  } else {
    const Held range(num_keys * kInt64Bytes);
    const Held sort(segmented_sort_scratch_bytes(num_keys, key_bytes, kInt64Bytes));
  }
}

// Source: sort_cuda_kernel in ATen/native/cuda/Sort.cpp. Up to 4096 a row are sorted in place.
void charge_sort(const ScratchCall& call) {
  constexpr int64_t kMostInPlace = 4096;
  const Tensor self = call.argument(0);
  const Tensor values = call.result(0);
  if (!self.defined() || !values.defined() || self.dim() == 0) return;
  const int64_t dim = c10::maybe_wrap_dim(call.arguments[call.dim].toInt(), self.dim());
  const int64_t num_in_row = self.size(dim);
  if (num_in_row <= kMostInPlace) {
    const Held range(num_in_row * kInt64Bytes);
    return;
  }
  const bool is_in_rows = self.is_non_overlapping_and_dense() && self.stride(dim) == 1;
  const bool are_results_in_rows = is_in_rows && values.strides() == self.strides();
  const auto num_bytes = self.numel() * static_cast<int64_t>(self.element_size());
  const Held rows(is_in_rows ? 0 : num_bytes);
  const Held sorted(are_results_in_rows ? 0 : num_bytes);
  const Held indices(are_results_in_rows ? 0 : self.numel() * kInt64Bytes);
  charge_stable_sort(self.numel(), num_in_row, static_cast<int64_t>(self.element_size()));
}

// ------------------------------------------------------------------------------------------- topk

// Whether each slice is searched by many blocks. Source: should_use_multiblock in TensorTopK.cu.
bool takes_many_blocks(int64_t num_slices, int64_t size) {
  const std::pair<int64_t, int64_t> least[] = {{20, 20000}, {40, 10000}, {80, 8000},
                                               {199, 5000}, {799, 3000}, {4000, 800}};
  for (const auto& [most_slices, least_size] : least) {
    if (num_slices <= most_slices) return size >= least_size;
  }
  return size >= 400;
}

// Source: mbtopk::launch and get_items_per_thread in the same file. A block alone takes nothing.
void charge_topk(const ScratchCall& call) {
  constexpr int64_t kThreads = 256, kDigits = 256, kRegisters = 65536, kRegistersOfThread = 40;
  constexpr int64_t kLeastItems = 4, kMostItems = 64, kShortBytes = 2;
  const Tensor self = call.argument(0);
  if (!self.defined() || self.numel() == 0) return;
  const Held whole = hold_contiguous(self);
  const int64_t dim = c10::maybe_wrap_dim(call.arguments[call.dim].toInt(), self.dim());
  const int64_t size = self.dim() ? self.size(dim) : 1, num_slices = self.numel() / size;
  if (!takes_many_blocks(num_slices, size)) return;
  const int64_t num_at_once = Machine::get().settings().num_multiprocessors *
                              (kRegisters / (kRegistersOfThread * kThreads)) * kThreads;
  const int64_t num_items =
      std::clamp(divide_up(self.numel(), num_at_once), kLeastItems, kMostItems);
  const int64_t num_blocks = num_slices * divide_up(size, num_items * kThreads);
  const auto value_bytes = static_cast<int64_t>(self.element_size());
  const Held kth(num_slices * value_bytes);
  const Held places(2 * num_slices * kIntBytes);
  const Held desired(2 * num_slices * std::max(value_bytes, kIntBytes));
  const Held counts(num_blocks * kDigits * kShortBytes);
  const Held sums(num_slices * kDigits * kIntBytes);
  const Held within(num_blocks * kIntBytes);
  const Held of_kth(num_blocks * kIntBytes);
  for (int i = 0; i < 2; i++) const Held scan = hold_scan_by_key(num_blocks);
}

// ------------------------------------------------------------------------------------------ scans

// Source: cumsum_cuda_kernel and scan_dim in ATen/native/cuda/ScanUtils.cuh: a single row by cub.
void charge_cumulative(const ScratchCall& call) {
  const Tensor self = call.argument(0);
  if (!self.defined() || self.dim() == 0 || self.numel() == 0) return;
  const auto type = call.result(0).scalar_type();
  const bool has_type = self.scalar_type() == type;
  const Tensor scanned = has_type ? call.shape(0) : call.shape(0).to(type);
  const Held copy = has_type ? Held(0) : hold(scanned);
  const Held whole = hold_contiguous(scanned);
  const int64_t dim = c10::maybe_wrap_dim(call.arguments[1].toInt(), self.dim());
  if (self.numel() != self.size(dim)) return;
  const Held scan = hold_scan(self.numel(), static_cast<int64_t>(scanned.element_size()));
}

// ---------------------------------------------------------------------------------- unique values

// Source: ATen/native/cuda/UniqueCub.cu. Truth values are counted.
void charge_unique(const ScratchCall& call) {
  const Tensor self = call.argument(0);
  if (!self.defined() || self.scalar_type() == c10::kBool) return;
  const int64_t num_values = self.numel();
  const auto value_bytes = static_cast<int64_t>(self.element_size());
  const bool inverts = call.arguments[2].toBool();
  const Held whole(bytes_to_be_contiguous(self));
  const Held sorted(num_values * value_bytes);
  const Held places(inverts ? num_values * kInt64Bytes : 0);
  {
    const Held range(inverts ? num_values * kInt64Bytes : 0);
    const Held sort =
        hold_sort(num_values, 8 * value_bytes, value_bytes, inverts ? kInt64Bytes : 0);
  }
  const Held inverse_of_sorted(inverts ? num_values * kInt64Bytes : 0);
}

// ------------------------------------------------------------------------------------ permutations

// Source: ATen/native/cuda/Randperm.cu: keys with so many random bits that few are equal.
void charge_randperm(const ScratchCall& call) {
  const Tensor result = call.result(0);
  if (!result.defined()) return;
  const int64_t num_values = result.numel();
  const auto value_bytes = static_cast<int64_t>(result.element_size());
  const auto n = static_cast<double>(num_values);
  const auto num_bits = std::min<int64_t>(
      64, static_cast<int64_t>(std::ceil(std::log2(n - (6 * n * n + 1) / (std::log(0.9) * 12)))));
  const int64_t key_bytes = num_bits <= 32 ? 4 : 8;
  const Held range(num_values * value_bytes);
  const Held keys(num_values * key_bytes);
  const Held sorted(num_values * key_bytes);
  const Held sort = hold_sort(num_values, num_bits, key_bytes, value_bytes);
}

// Source: multinomial_out in ATen/native/Distributions.cpp: checks of the probabilities and then,
// without replacement or of one sample, the largest of as many random numbers as there are.
void charge_multinomial(const ScratchCall& call) {
  if (!call.argument(0).defined()) return;
  const int64_t num_samples = call.arguments[1].toInt();
  if (call.arguments[2].toBool() && num_samples != 1) return;
  const Tensor self = call.shape(0);
  const Held are_valid(1);
  const Held have_sums(1);
  const Held numbers = hold(at::empty_like(self));
  if (num_samples > 1) const Held largest = hold(call.result(0).to(self.scalar_type()));
}

}  // namespace

ScratchEntries scratch_of_sorts() {
  const char* of_unique = "cuda/UniqueCub.cu: unique_cuda_template";
  return {
      {"aten::sort", charge_sort, "cuda/SortStable.cu: launch_stable_sort_kernel"},
      {"aten::topk", charge_topk, "cuda/TensorTopK.cu: mbtopk::launch"},
      {"aten::cumsum", charge_cumulative, "cuda/ScanUtils.cuh: scan_dim", Results::kFirst, kOf11},
      {"aten::cumprod", charge_cumulative, "cuda/ScanUtils.cuh: scan_dim", Results::kFirst, kOf11},
      {"aten::_unique", charge_unique, of_unique},
      {"aten::_unique2", charge_unique, of_unique},
      {"aten::randperm", charge_randperm, "cuda/Randperm.cu: randperm_out_cuda"},
      {"aten::multinomial", charge_multinomial, "Distributions.cpp: multinomial_out",
       Results::kFirst, kOf11},
  };
}

}  // namespace sim
