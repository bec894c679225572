// What dry mode computes for real: operations on nothing but values that are known. [Note:
// readings]
#include <ATen/core/function_schema.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <unordered_set>

#include "torch_readings.h"
#include "torch_values.h"

namespace sim {
namespace {

using at::Tensor;

constexpr int64_t kMostCounts = 1024;
constexpr size_t kMostListed = 64;
constexpr int64_t kMostDrawn = int64_t(1) << 16;
constexpr int64_t kMostDrawnFractions = 16;  // more are weights

// What is known of counts is that they sum to what was counted: they are taken as equal, and what
// does not divide goes to the first.
std::optional<Computed> compute_counts(const std::string& name, const Arguments& arguments) {
  const bool is_bincount = name == "aten::bincount";
  if (!is_bincount && name != "aten::histc") return std::nullopt;
  const auto is_given = [](const c10::IValue& v) { return v.isTensor() && v.toTensor().defined(); };
  if (is_bincount && is_given(arguments[1])) return std::nullopt;  // weights
  const Tensor& counted = arguments[0].toTensor();
  const int64_t num_places = std::max<int64_t>(1, arguments[is_bincount ? 2 : 1].toInt());
  if (num_places > kMostCounts || !is_sim(counted)) return std::nullopt;
  const auto type = is_bincount ? at::kLong : counted.scalar_type();
  Tensor counts;
  as_device_work([&] {
    counts = at::full({num_places}, counted.numel() / num_places, at::TensorOptions(type));
    counts[0] += counted.numel() % num_places;
  });
  tell_of_guess("counts", counted.numel());
  return Computed{arguments, {}, {counts}};
}

bool is_whole(const Tensor& tensor) {
  return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

// Few numbers that are drawn, as a program reads them: sizes, an order, what a branch goes by.
bool is_small_draw(const c10::FunctionSchema& schema, const Arguments& arguments) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::bernoulli_", "aten::exponential_", "aten::normal_", "aten::random_", "aten::uniform_"};
  if (schema.name() == "aten::randperm") {
    return schema.overload_name() == "generator_out" && arguments[0].toInt() <= kMostDrawn;
  }
  if (!names->contains(schema.name()) || !arguments[0].isTensor()) return false;
  const Tensor& drawn = arguments[0].toTensor();
  return drawn.numel() <= (is_whole(drawn) ? kMostDrawn : kMostDrawnFractions);
}

// Whether an operation that reads and makes such tensors is done in an instant.
bool is_small(const Tensor& tensor) {
  return is_whole(tensor) ? tensor.nbytes() <= most_known(tensor)
                          : tensor.numel() <= kMostComputedFractions;
}

bool makes_small(const torch::jit::Stack& made) {
  bool are_small = true;
  for (const c10::IValue& result : made) {
    visit_tensors(result, [&](const Tensor& tensor) {
      are_small &= !tensor.defined() || tensor.nbytes() <= most_known(tensor);
    });
  }
  return are_small;
}

// Only what is small, repeats, and looks at nothing but what is known: the counters and flags of a
// program, which end its loops, and its whole numbers: positions, lengths, masks, labels.
std::optional<Computed> compute_from_known(const c10::OperatorHandle& op,
                                           const Arguments& arguments, const Numbers& numbers) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  const bool is_draw = op.hasTag(at::Tag::nondeterministic_seeded);
  if (is_draw && (!numbers || !is_small_draw(schema, arguments))) return std::nullopt;
  static const auto* overwriting = new std::unordered_set<std::string>{
      "aten::_cummax_helper", "aten::_cummin_helper", "aten::fill_", "aten::zero_"};
  const bool overwrites = is_draw || overwriting->contains(name);
  // Sizes that hang on values, and whether two inputs are the same, are worth more work.
  const bool is_worth_more = makes_sizes(op);
  bool is_known = true;
  Computed computed;
  for (const auto i : c10::irange(arguments.size())) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    const bool is_viewed = argument.alias_info() && !writes;
    if (writes) computed.written.push_back(i);
    const bool is_overwritten = argument.is_out() || (overwrites && writes);
    auto host_of = [&](const Tensor& tensor) -> Tensor {
      if (!is_known || !tensor.defined() || (tensor.is_cpu() && !writes)) return tensor;
      const bool is_small_here = is_draw         ? tensor.numel() <= kMostDrawn
                                 : is_worth_more ? tensor.nbytes() <= most_known(tensor)
                                                 : is_small(tensor);
      is_known = is_sim(tensor) && is_small_here && !is_viewed;
      if (!is_known) return tensor;
      Tensor empty;
      if (is_overwritten) {
        const auto options = tensor.options().device(c10::kCPU);
        as_device_work([&] { empty = at::empty(tensor.sizes(), options); });
        return empty;
      }
      const auto known = known_value(tensor);
      is_known = known.has_value();
      return known.value_or(tensor);
    };
    const bool is_list = arguments[i].isTensorList() || arguments[i].isOptionalTensorList();
    if (is_list && (writes || arguments[i].toListRef().size() > kMostListed)) return std::nullopt;
    const bool is_device = arguments[i].isDevice();
    if (is_draw && argument.name() == "generator") {
      computed.arguments.emplace_back(numbers(arguments[i]));
      continue;
    }
    computed.arguments.push_back(is_device ? c10::IValue(c10::Device(c10::kCPU))
                                           : replace_tensors(arguments[i], host_of));
    if (!is_known) return std::nullopt;
  }
  try {
    as_device_work([&] {
      computed.results.assign(computed.arguments.begin(), computed.arguments.end());
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &computed.results);
    });
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  if (is_draw && most_elements(arguments) == 1) tell_of_guess("drawn", 1);
  return computed;
}

}  // namespace

bool makes_sizes(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.schema().name() == "aten::equal";
}

std::optional<Computed> compute_known(const c10::OperatorHandle& op, const Arguments& arguments,
                                      const Numbers& numbers, const torch::jit::Stack& made) {
  if (!makes_small(made)) return std::nullopt;
  if (auto computed = compute_from_known(op, arguments, numbers)) return computed;
  return compute_counts(op.schema().name(), arguments);
}

void note_computed(const Computed& computed, const Arguments& arguments,
                   const torch::jit::Stack& stack) {
  auto note = [](const c10::IValue& value, const c10::IValue& device) {
    if (!value.isTensor() || !device.isTensor() || !is_sim(device.toTensor())) return;
    const Tensor& from = value.toTensor();
    const Tensor& to = device.toTensor();
    const bool is_known = from.is_cpu() && from.sizes() == to.sizes();
    is_known ? note_value(from, to) : note_reading(to.storage(), {});
  };
  for (const size_t i : computed.written) note(computed.arguments[i], arguments[i]);
  const size_t first = stack.size() - computed.results.size();
  for (const auto i : c10::irange(computed.results.size())) {
    note(computed.results[i], stack[first + i]);
  }
}

}  // namespace sim
