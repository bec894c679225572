#include "torch_numbers.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <unordered_set>

#include "torch_readings.h"

namespace sim {
namespace {

using at::Tensor;

// How many elements are reduced to one.
int64_t num_reduced(const Tensor& input, const c10::IValue& dims) {
  if (dims.isInt()) return input.dim() ? input.size(dims.toInt()) : 1;
  if (!dims.isIntList() || dims.toIntVector().empty()) return input.numel();
  int64_t number = 1;
  for (const int64_t dim : dims.toIntVector()) number *= input.dim() ? input.size(dim) : 1;
  return number;
}

// What stands for each element of a tensor or of a scalar, as arithmetic has it; none of others.
std::optional<double> number_each(const c10::IValue& value) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (!tensor.defined() || tensor.is_complex()) return std::nullopt;
    if (tensor.is_cpu() && tensor.numel() == 1) return tensor.item<double>();
    if (!is_sim(tensor)) return std::nullopt;
    const Reading reading = dry_reading(tensor);
    const bool is_number = reading == Reading::kUnknown || reading == Reading::kNumber;
    return is_number ? std::optional(dry_number(tensor)) : std::nullopt;
  }
  if (!value.isScalar() || value.isComplexDouble()) return std::nullopt;
  return value.toScalar().toDouble();
}

bool is_numbered(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && is_sim(value.toTensor()) &&
         dry_reading(value.toTensor()) == Reading::kNumber;
}

}  // namespace

bool is_scalar(const c10::IValue& value, double number) {
  const bool is_real = value.isScalar() && !value.isComplexDouble();
  return is_real && std::abs(value.toScalar().toDouble()) == number;
}

// Shares of 1 are as large as each other; a mask is true everywhere, and counted so; what stands
// for sums is as many times what stands for each. Arithmetic goes on from such numbers.
std::optional<double> number_after(const std::string& name, const Arguments& arguments) {
  static const auto* known = new std::unordered_set<std::string>{"aten::_log_softmax",
                                                                 "aten::_softmax",
                                                                 "aten::abs",
                                                                 "aten::add",
                                                                 "aten::amax",
                                                                 "aten::amin",
                                                                 "aten::clamp_min",
                                                                 "aten::count_nonzero",
                                                                 "aten::div",
                                                                 "aten::exp",
                                                                 "aten::linalg_vector_norm",
                                                                 "aten::log",
                                                                 "aten::max",
                                                                 "aten::mean",
                                                                 "aten::min",
                                                                 "aten::mul",
                                                                 "aten::neg",
                                                                 "aten::rsub",
                                                                 "aten::sub",
                                                                 "aten::sum"};
  const std::string operation = name.substr(0, name.find('.'));
  if (!known->contains(operation) || !arguments[0].isTensor()) return std::nullopt;
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::find(names.begin(), names.end(), operation) != names.end();
  };
  const auto size_of = [&](const c10::IValue& dims) {
    return static_cast<double>(std::max<int64_t>(1, num_reduced(arguments[0].toTensor(), dims)));
  };
  if (is({"aten::_softmax"})) return 1 / size_of(arguments[1]);
  if (is({"aten::_log_softmax"})) return -std::log(size_of(arguments[1]));
  const bool sums = is({"aten::sum", "aten::count_nonzero"});
  const auto each = number_each(arguments[0]);
  if (!each) return std::nullopt;
  if (sums) {
    const bool is_whole = name == "aten::sum" || name == "aten::sum.out";
    return *each * size_of(is_whole ? c10::IValue() : arguments[1]);
  }
  if (is({"aten::linalg_vector_norm"}) && is_scalar(arguments[1], 1)) {
    return std::abs(*each) * size_of(arguments[2]);
  }
  const bool is_second = arguments.size() > 1 && is_numbered(arguments[1]);
  if (!is_numbered(arguments[0]) && !is_second) return std::nullopt;
  if (is({"aten::exp"})) return std::exp(*each);
  if (is({"aten::log"})) return std::log(*each);
  if (is({"aten::neg"})) return -*each;
  if (is({"aten::abs"})) return std::abs(*each);
  if (is({"aten::clamp_min"}) && arguments[1].isScalar()) {
    return std::max(*each, arguments[1].toScalar().toDouble());
  }
  // Of a dimension, they give places, too.
  if (name == "aten::max" || name == "aten::min" ||
      is({"aten::amax", "aten::amin", "aten::mean"})) {
    return each;
  }
  const auto other = arguments.size() > 1 ? number_each(arguments[1]) : std::nullopt;
  if (!other) return std::nullopt;
  if (is({"aten::mul"})) return *each * *other;
  if (is({"aten::div"}) && *other != 0) return *each / *other;
  if (arguments.size() > 2 && !is_scalar(arguments[2], 1)) return std::nullopt;  // alpha
  if (is({"aten::add"})) return *each + *other;
  if (is({"aten::sub"})) return *each - *other;
  if (is({"aten::rsub"})) return *other - *each;
  return std::nullopt;
}

}  // namespace sim
