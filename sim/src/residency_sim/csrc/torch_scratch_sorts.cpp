// Scratch of operations that sort, by cub, with copies of what does not lie as it wants it, and of
// draws.
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>

#include "torch_scratch.h"
#include "workspaces.h"

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
    const Held sort(sort_scratch_bytes(num_in_row, 8 * key_bytes, key_bytes, kInt64Bytes));
  } else if (num_rows < kManyRows) {
    const auto row_bits = static_cast<int64_t>(std::ceil(std::log2(num_rows)));
    const Held places(num_keys * kInt64Bytes);
    const Held sorted_places(num_keys * kInt64Bytes);
    {
      const Held sorted(num_keys * key_bytes);
      const Held sort(sort_scratch_bytes(num_keys, 8 * key_bytes, key_bytes, kInt64Bytes));
    }
    const Held sort(sort_scratch_bytes(num_keys, row_bits, kInt64Bytes, 0));
  } else {
    const Held range(num_keys * kInt64Bytes);
    const Held sort(to_multiple(num_keys * key_bytes, 256) +
                    to_multiple(num_keys * kInt64Bytes, 256) + 255);  // keys and values again
  }
}

// Source: sort_cuda_kernel in ATen/native/cuda/Sort.cpp. Up to 4096 a row are sorted in place.
void charge_sort(const ScratchRule& rule, const ScratchCall& call) {
  constexpr int64_t kMostInPlace = 4096;
  const Tensor self = call.argument(0);
  const Tensor values = call.result(0);
  if (!self.defined() || !values.defined() || self.dim() == 0) return;
  const int64_t dim = c10::maybe_wrap_dim(call.arguments[rule.dim].toInt(), self.dim());
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

// ---------------------------------------------------------------------------------- unique values

// Source: ATen/native/cuda/UniqueCub.cu. Truth values are counted.
void charge_unique(const ScratchRule&, const ScratchCall& call) {
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
    const Held sort(
        sort_scratch_bytes(num_values, 8 * value_bytes, value_bytes, inverts ? kInt64Bytes : 0));
  }
  const Held inverse_of_sorted(inverts ? num_values * kInt64Bytes : 0);
}

// ------------------------------------------------------------------------------------ permutations

// Source: ATen/native/cuda/Randperm.cu: keys with so many random bits that few are equal.
void charge_randperm(const ScratchRule&, const ScratchCall& call) {
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
  const Held sort(sort_scratch_bytes(num_values, num_bits, key_bytes, value_bytes));
}

// Source: multinomial_out in ATen/native/Distributions.cpp: without replacement, or of one sample,
// the largest of as many random numbers as there are probabilities.
void charge_multinomial(const ScratchRule&, const ScratchCall& call) {
  const Tensor self = call.argument(0);
  if (!self.defined() || (call.arguments[2].toBool() && call.arguments[1].toInt() != 1)) return;
  const Held numbers(static_cast<int64_t>(self.nbytes()));
}

}  // namespace

ChargesByName scratch_of_sorts() {
  return {
      {"aten::sort", charge_sort},
      {"aten::_unique", charge_unique},
      {"aten::_unique2", charge_unique},
      {"aten::randperm", charge_randperm},
      {"aten::multinomial", charge_multinomial},
  };
}

}  // namespace sim
