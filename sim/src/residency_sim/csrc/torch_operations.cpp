// How many arithmetic operations a kernel does, for the clock. Counted are the kernels whose time
// is arithmetic (a multiplication and an addition each count); all others are as slow as their
// memory traffic. Backward passes of matrix products are matrix products, so they need no entry.
#include <unordered_map>

#include "torch_device.h"

namespace sim {
namespace {

using c10::IValue;

double size(const IValue& value, int64_t dim) {
  return static_cast<double>(value.toTensor().size(dim));
}

double numel(const IValue& value) { return static_cast<double>(value.toTensor().numel()); }

// [.., m, k] x [.., k, n]
double product(const IValue& left, const IValue& right) {
  return 2.0 * numel(left) * size(right, -1);
}

double first_two(const IValue* a) { return product(a[0], a[1]); }
double second_two(const IValue* a) { return product(a[1], a[2]); }

// query, key and value are [batch, heads, length, width]; two products, of which a causal mask
// leaves half, which is not taken off: kernels differ in what they skip.
double attention_of(const IValue& query, const IValue& key, const IValue& value) {
  return 2.0 * numel(query) * size(key, 2) +
         2.0 * numel(query) / size(query, 3) * size(key, 2) * size(value, 3);
}

double attention(const IValue* a) { return attention_of(a[0], a[1], a[2]); }
double attention_backward(const IValue* a) { return 2.5 * attention_of(a[1], a[2], a[3]); }

// Each weight meets every position of the smaller side: the output, or the input if transposed.
double convolution_of(const IValue& input, const IValue& weight, const IValue& stride,
                      bool is_transposed) {
  double num_positions = size(input, 0);
  const auto strides = stride.toIntVector();
  for (int64_t d = 2; d < input.toTensor().dim(); d++) {
    const auto step = static_cast<double>(strides[std::min<size_t>(d - 2, strides.size() - 1)]);
    num_positions *= is_transposed ? size(input, d) : std::max(1.0, size(input, d) / step);
  }
  return 2.0 * numel(weight) * num_positions;
}

double convolution(const IValue* a) { return convolution_of(a[0], a[1], a[3], a[6].toBool()); }
double convolution_backward(const IValue* a) {
  return 2.0 * convolution_of(a[1], a[2], a[3], a[6].toBool());
}
double convolution_backward_with_bias(const IValue* a) {  // its sizes come before the stride
  return 2.0 * convolution_of(a[1], a[2], a[4], a[7].toBool());
}

}  // namespace

OperationCounter operation_counter(const std::string& name) {
  static const std::unordered_map<std::string, OperationCounter> counters{
      {"aten::mm", first_two},
      {"aten::mm.out", first_two},
      {"aten::bmm", first_two},
      {"aten::bmm.out", first_two},
      {"aten::addmm", second_two},
      {"aten::addmm.out", second_two},
      {"aten::addmm_", second_two},
      {"aten::_addmm_activation.out", second_two},
      {"aten::baddbmm", second_two},
      {"aten::baddbmm.out", second_two},
      {"aten::baddbmm_", second_two},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward},
      {"aten::convolution", convolution},
      {"aten::convolution_overrideable", convolution},
      {"aten::convolution_backward", convolution_backward_with_bias},
      {"aten::convolution_backward_overrideable", convolution_backward},
  };
  // A product with a dtype for its result costs what it costs without.
  const size_t dtype = name.find(".dtype");
  const auto found = counters.find(name.substr(0, dtype));
  return found == counters.end() ? nullptr : found->second;
}

}  // namespace sim
